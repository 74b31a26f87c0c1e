"""Megatron's distributed checkpoints, written by Megatron Core itself, folded and converted."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any, Iterator

import pytest
import torch
from support import megatron_tiny as tiny
from support.exports import export, load_hf, relative
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

from olmo_lns.checkpoints.common_state import COMMON_OBJECT
from olmo_lns.checkpoints.distributed import DistributedCheckpoint as MegatronState
from olmo_lns.checkpoints.megatron import MegatronCheckpoint
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
def case(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, torch.Tensor]:
    """(checkpoint, config, logits of the model with its factor, by hooks)."""
    changes, stacked, newer = CASES[request.param]
    config = tiny.config(**changes)
    model = perturbed(config)
    root = save(tmp_path_factory.mktemp(request.param) / "run", model, arguments(config), stacked)
    if newer:
        as_core_0_19(root)
    return root, config, run(tiny.hook_reference(model))


@pytest.mark.slow
def test_folded_checkpoint_in_stock_megatron(case: tuple[Path, Any, torch.Tensor]) -> None:
    root, config, expected = case
    out = root.with_name("folded")
    assert export(root, out, "--format", "megatron") == 0
    assert relative(run(load(out, tiny.build(config))), expected) <= 1e-5
    with pytest.raises(CheckpointMismatchError, match="was saved with lns"):
        load(root, tiny.build(config))
    args = MegatronCheckpoint.open(out).args
    assert (args.layernorm_scaling, args.layernorm_scaling_folded, args.layernorm_scaling_exponent) == (
        False,
        True,
        0.5,
    )
    assert not any("optimizer" in name for name in MegatronCheckpoint.open(out).state.metadata.state_dict_metadata)
    with pytest.raises(LNSConfigError, match="folded already"):
        export_in_process(out, root.with_name("again"))


def test_hugging_face_llama(case: tuple[Path, Any, torch.Tensor], capsys: pytest.CaptureFixture[str]) -> None:
    root, _, expected = case
    out = root.with_name("hf")
    assert export(root, out, "--format", "hf") == 0
    model = load_hf(out)
    assert type(model).__name__ == "LlamaForCausalLM"
    with torch.no_grad():
        assert relative(model(TOKENS).logits.double(), expected) <= 1e-5
    assert main(["verify", str(root), str(out), "--length", "16"]) == 0
    assert "PASS" in capsys.readouterr().out


def test_into_transformers_to_train_on(
    case: tuple[Path, Any, torch.Tensor], capsys: pytest.CaptureFixture[str]
) -> None:
    """As trained and, folded, unfolded on the way: the model of our class computes what Megatron's does."""
    root, _, expected = case
    assert export(root, root.with_name("folded-3"), "--format", "megatron") == 0
    for source, said in ((root, "as trained"), (root.with_name("folded-3"), "unfolded: the factors are outside again")):
        out = root.with_name(f"lns-of-{source.name}")
        assert main(["hf", "import", str(source), "-o", str(out)]) == 0
        assert said in capsys.readouterr().out
        model = load_hf(out)
        assert type(model).__name__ == "LNSLlamaForCausalLM"
        with torch.no_grad():
            assert relative(model(TOKENS).logits.double(), expected) <= 1e-5
        assert model.model.layers[1].input_layernorm.lns_scale == pytest.approx(2**-0.5)


def test_unfolded_again(case: tuple[Path, Any, torch.Tensor]) -> None:
    root, config, expected = case
    folded, again = root.with_name("folded-2"), root.with_name("unfolded")
    assert export(root, folded, "--format", "megatron") == 0
    assert export(folded, again, "--format", "megatron", "--unfold") == 0
    assert relative(run(load(again, under_lns(config))), expected) <= 1e-5
    args = MegatronCheckpoint.open(again).args
    assert args.layernorm_scaling and not args.layernorm_scaling_folded


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


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"qk_layernorm": True}, "qk_layernorm=True"),
        ({"rotary_percent": 0.5}, "rotary_percent=0.5"),
        ({"num_experts": 8}, "num_experts=8"),
        ({"kv_channels": 99}, "kv_channels=99"),
    ],
)
def test_what_llama_cannot_hold_is_refused(
    case: tuple[Path, Any, torch.Tensor],
    tmp_path: Path,
    changes: dict[str, Any],
    reason: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    root, _, _ = case
    copy = copy_with(root, tmp_path / "run", lambda common: vars(common["args"]).update(changes))
    assert export(copy, tmp_path / "hf", "--format", "hf") == 1
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "hf").exists()


class Hostile:
    def __reduce__(self) -> Any:
        return print, ("this must never run",)


def test_arguments_run_no_code(
    case: tuple[Path, Any, torch.Tensor], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = copy_with(case[0], tmp_path / "run", lambda common: common.update(extra=Hostile()))
    assert export(copy, tmp_path / "out", "--format", "megatron") == 1
    captured = capsys.readouterr()
    assert "names the class" in captured.err and "must never run" not in captured.out


def test_what_megatron_wrote_is_where_it_is_looked_for(case: tuple[Path, Any, torch.Tensor]) -> None:
    """The layout that ``as_core_0_19`` makes is read by a Megatron Core that writes it."""
    from megatron.core.dist_checkpointing import serialization

    if not hasattr(serialization, "_legacy_common_state_exists"):
        pytest.skip("this Megatron Core keeps the common state in common.pt")
    folder = case[0] / "iter_0000010"
    assert COMMON_OBJECT in MegatronState(folder).metadata.state_dict_metadata
    assert serialization.load_common_state_dict(str(folder))["args"].num_layers == tiny.LAYERS


@pytest.mark.parametrize("inside", [False, True], ids=["run", "iteration"])
def test_fsdp_dtensor_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], inside: bool) -> None:
    """Megatron writes that format, and torch_dcp, with torch's own writer."""
    from torch.distributed import checkpoint as dcp

    folder = tmp_path / "run" / "iter_0000010"
    dcp.save({"args": arguments(tiny.config()), "model": {"w": torch.ones(2)}}, checkpoint_id=folder, no_dist=True)
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("10")
    assert export(folder if inside else folder.parent, tmp_path / "out", "--format", "megatron") == 1
    line = capsys.readouterr().err
    assert "torch_dcp or fsdp_dtensor format" in line and "--ckpt-format torch_dist" in line


def test_an_exponent_that_would_make_zeros_is_refused(
    case: tuple[Path, Any, torch.Tensor], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = copy_with(
        case[0], tmp_path / "run", lambda common: vars(common["args"]).update(layernorm_scaling_exponent=1e9)
    )
    assert export(copy, tmp_path / "out", "--format", "megatron") == 1
    assert "exponent must be at most 8" in capsys.readouterr().err


def test_checkpoint_without_arguments_is_refused(
    case: tuple[Path, Any, torch.Tensor], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = copy_with(case[0], tmp_path / "run", lambda common: common.pop("args"))
    assert export(copy, tmp_path / "out", "--format", "megatron") == 1
    assert "holds no arguments" in capsys.readouterr().err
