"""Megatron's distributed checkpoints, written by Megatron Core itself, folded and converted."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any, Iterator

import pytest
import torch
from support import megatron_tiny as tiny
from support.exports import export, load_hf, refused, relative
from support.megatron_checkpoints import (
    TOKENS,
    arguments,
    as_core_0_19,
    copy_with,
    export_in_process,
    load,
    perturbed,
    run,
    save,
    under_lns,
)
from support.megatron_cpu import single_process

from olmo_lns.checkpoints.distributed import DistributedCheckpoint as MegatronState
from olmo_lns.checkpoints.megatron import COMMON_OBJECT, MegatronCheckpoint
from olmo_lns.cli import main
from olmo_lns.errors import CheckpointMismatchError, LNSConfigError
from olmo_lns.integrations.megatron.checkpoint import load_base
from olmo_lns.integrations.megatron.settings import ZERO_CENTRED

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
pytest.importorskip("psutil", reason="megatron-core writes checkpoints only with psutil")


@pytest.fixture(scope="module", autouse=True)
def one_process() -> Iterator[None]:
    with single_process():
        yield


#: Changes of the config; whether layers are stacked; whether the layout of Core 0.19 is made of an older one's.
CASES: dict[str, tuple[dict[str, Any], bool, bool]] = {
    "stacked": ({}, True, False),
    "numbered_gqa": ({"num_query_groups": 2}, False, False),
    "core_0_19": ({}, True, True),
}


@pytest.fixture(scope="module", params=CASES)
def case(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Any, torch.Tensor]:
    """(checkpoint, the same folded, config, logits of the model with its factor, by hooks)."""
    changes, stacked, newer = CASES[request.param]
    config = tiny.config(**changes)
    model = perturbed(config)
    root = save(tmp_path_factory.mktemp(request.param) / "run", model, arguments(config), stacked)
    if newer:
        as_core_0_19(root)
    folded = root.with_name("folded")
    assert export(root, folded, "--format", "megatron") == 0
    return root, folded, config, run(tiny.hook_reference(model))


def test_folded_for_stock_megatron_and_unfolded_again(case: tuple[Path, Path, Any, torch.Tensor]) -> None:
    root, folded, config, expected = case
    assert relative(run(load(folded, tiny.build(config))), expected) <= 1e-5
    with pytest.raises(CheckpointMismatchError, match="was saved with lns"):
        load(root, tiny.build(config))
    opened = MegatronCheckpoint.open(folded)
    args = opened.args
    said = (args.layernorm_scaling, args.layernorm_scaling_folded, args.layernorm_scaling_exponent)
    assert said == (False, True, 0.5)
    assert not any("optimizer" in name for name in opened.state.metadata.state_dict_metadata)
    with pytest.raises(LNSConfigError, match="folded already"):
        export_in_process(folded, root.with_name("again"))
    assert export(folded, root.with_name("unfolded"), "--format", "megatron", "--unfold") == 0
    assert relative(run(load(root.with_name("unfolded"), under_lns(config))), expected) <= 1e-5
    args = MegatronCheckpoint.open(root.with_name("unfolded")).args
    assert args.layernorm_scaling and not args.layernorm_scaling_folded


def test_transformers(case: tuple[Path, Path, Any, torch.Tensor], capsys: pytest.CaptureFixture[str]) -> None:
    """A stock Llama of the fold; our class, to train on, of what was trained and of the fold unfolded."""
    root, folded, _, expected = case
    assert export(root, root.with_name("hf"), "--format", "hf") == 0
    assert main(["verify", str(root), str(root.with_name("hf")), "--length", "16"]) == 0
    assert "PASS" in capsys.readouterr().out
    models = {"hf": "LlamaForCausalLM"}
    for source, said in ((root, "as trained"), (folded, "unfolded: the factors are outside again")):
        assert main(["hf", "import", str(source), "-o", str(root.with_name(f"lns-{source.name}"))]) == 0
        assert said in capsys.readouterr().out
        models[f"lns-{source.name}"] = "LNSLlamaForCausalLM"
    for name, kind in models.items():
        model = load_hf(root.with_name(name))
        assert type(model).__name__ == kind
        with torch.no_grad():
            assert relative(model(TOKENS).logits.double(), expected) <= 1e-5
    assert model.model.layers[1].input_layernorm.lns_scale == pytest.approx(2**-0.5)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny.config()
    return save(tmp_path_factory.mktemp("plain") / "run", perturbed(config), arguments(config))


def test_a_mixture_of_experts_is_folded_as_a_megatron_checkpoint(tmp_path: Path) -> None:
    config = tiny.config(num_moe_experts=4)
    model = perturbed(config)
    root = save(tmp_path / "run", model, arguments(config, num_experts=4), stacked=False)
    expected = run(tiny.hook_reference(model))
    assert export(root, tmp_path / "folded", "--format", "megatron") == 0
    assert relative(run(load(tmp_path / "folded", tiny.build(config))), expected) <= 1e-5
    assert relative(run(load(root, under_lns(config))), expected) <= 1e-5


@pytest.mark.parametrize("version", ["0.15", "0.16", "0.20"])
def test_zero_centred_gains_become_plain(tmp_path: Path, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file holds gain - 1; the export holds s·gain, and the argument is switched off, whatever it is called."""
    config = tiny.config()
    plain = perturbed(config)
    expected = run(tiny.hook_reference(plain))
    centred = perturbed(config)
    with torch.no_grad():
        for name, parameter in centred.named_parameters():
            if "norm" in name:
                parameter.sub_(1)
    args = arguments(config, "zero_centred", version)
    root = save(tmp_path / "run", centred, args)
    assert export(root, tmp_path / "folded", "--format", "megatron") == 0
    written = vars(MegatronCheckpoint.open(tmp_path / "folded").args)
    assert written.keys() - vars(args).keys() == {"layernorm_scaling_folded"}
    assert not any(written[name] for name in ZERO_CENTRED if name in written)
    assert relative(run(load(tmp_path / "folded", tiny.build(config))), expected) <= 1e-5
    assert export(root, tmp_path / "hf", "--format", "hf") == 0
    with torch.no_grad():
        assert relative(load_hf(tmp_path / "hf")(TOKENS).logits.double(), expected) <= 1e-5
    assert export(tmp_path / "folded", tmp_path / "again", "--format", "megatron", "--unfold") == 0
    assert relative(run(load(tmp_path / "again", under_lns(config))), expected) <= 1e-5
    # The run's own script says --apply-layernorm-1p still, and with --finetune Megatron compares nothing.
    words = "holds plain gains, but this run reads zero-centred gains .*: drop --apply-layernorm-1p"
    monkeypatch.setenv("OLMO_LNS_ALLOW_MISMATCH", "folded-to-preln,lns-to-preln,missing-record")
    for folder in ("folded", "again"):
        state = MegatronCheckpoint.open(tmp_path / folder).common
        with pytest.raises(CheckpointMismatchError, match=words):
            load_base(lambda *_, state=state: (state, "iter"))("load", Namespace(**vars(args), finetune=True))
        model = tiny.build(replace(config))
        model.config.layernorm_zero_centered_gamma = True
        with pytest.raises(CheckpointMismatchError, match=words):
            load(tmp_path / folder, model)


class Hostile:
    def __reduce__(self) -> Any:
        return print, ("this must never run",)


def argument(**changes: Any) -> Any:
    return lambda common: vars(common["args"]).update(changes)


#: What is changed of the common state, the format asked for and what the refusal says.
REFUSED: dict[str, tuple[Any, str, str]] = {
    "q/k norms": (argument(qk_layernorm=True), "hf", "qk_layernorm=True"),
    "channels": (argument(kv_channels=99), "hf", "kv_channels=99"),
    "exponent": (argument(layernorm_scaling_exponent=1e9), "megatron", "exponent must be at most 8"),  # zeros
    "no arguments": (lambda common: common.pop("args"), "megatron", "holds no arguments"),
    "hostile": (lambda common: common.update(extra=Hostile()), "megatron", "names the class"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(run_folder: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    change, form, reason = REFUSED[name]
    assert reason in refused(
        capsys, copy_with(run_folder, tmp_path / "run", change), tmp_path / "out", "--format", form
    )


def test_what_megatron_wrote_is_where_it_is_looked_for(case: tuple[Path, Path, Any, torch.Tensor]) -> None:
    """The layout that ``as_core_0_19`` makes is read by a Megatron Core that writes it."""
    from megatron.core.dist_checkpointing import serialization

    if not hasattr(serialization, "_legacy_common_state_exists"):
        pytest.skip("this Megatron Core keeps the common state in common.pt")
    folder = case[0] / "iter_0000010"
    assert COMMON_OBJECT in MegatronState(folder).metadata.state_dict_metadata
    assert serialization.load_common_state_dict(str(folder))["args"].num_layers == tiny.LAYERS


def test_fsdp_dtensor_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Megatron writes that format, and torch_dcp, with torch's own writer."""
    from torch.distributed import checkpoint as dcp

    folder = tmp_path / "run" / "iter_0000010"
    dcp.save({"args": arguments(tiny.config()), "model": {"w": torch.ones(2)}}, checkpoint_id=folder, no_dist=True)
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("10")
    for place in (folder, folder.parent):
        line = refused(capsys, place, tmp_path / "out", "--format", "megatron")
        assert "torch_dcp or fsdp_dtensor format" in line and "--ckpt-format torch_dist" in line
