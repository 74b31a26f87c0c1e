"""Megatron checkpoints of the other schemes: folded, as transformers models, refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Iterator

import pytest
import torch
from support import megatron_tiny as tiny
from support.exports import export, load_hf, relative
from support.megatron_checkpoints import TOKENS, arguments, export_in_process, load, perturbed, run, save
from support.megatron_cpu import single_process

from olmo_lns.checkpoints.megatron import MegatronCheckpoint
from olmo_lns.cli import main
from olmo_lns.errors import LNSConfigError
from olmo_lns.integrations.megatron import apply, register
from olmo_lns.schemes import definition, names, parse

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
pytest.importorskip("psutil", reason="megatron-core writes checkpoints only with psutil")

FOLDED = ("lnsafterbranch:exponent=0.75", "lnsafterattn", "layerscale:start=0.5", "skipinit")
#: Whether layers are stacked.
STACKED = {"skipinit": False, "lnsafterattn": False}
STOCK_KEYS = [
    name
    for name in names()
    if name not in ("preln", "lns") and parse(name).stock_keys(4) and not definition(name).olmo_only
]


@pytest.fixture(scope="module", autouse=True)
def one_process() -> Iterator[None]:
    register()
    with single_process():
        yield


def checkpoint(folder: Path, scheme: str) -> tuple[Path, Any, torch.Tensor]:
    """(checkpoint, stock config, logits of the model under its scheme)."""
    config = tiny.config()
    apply(config, scheme=scheme)
    model = perturbed(config)
    args = arguments(config, layernorm_scaling=False, norm_scheme=scheme)
    return save(folder / "run", model, args, STACKED.get(scheme, True)), tiny.config(), run(model)


@pytest.mark.parametrize("scheme", FOLDED)
def test_constants_and_gates_fold_into_stock_megatron_and_llama(
    scheme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, config, expected = checkpoint(tmp_path, scheme)
    out, hf = tmp_path / "folded", tmp_path / "hf"
    assert export(root, out, "--format", "megatron") == 0
    assert relative(run(load(out, tiny.build(config))), expected) <= 1e-5
    folded = MegatronCheckpoint.open(out)
    assert not [name for name in folded.names if "_bda" in name]
    assert (str(folded.record.scheme), folded.record.folded) == (scheme, True)
    with pytest.raises(LNSConfigError, match="folded already"):
        export_in_process(out, tmp_path / "again")
    for source, target in ((root, hf), (out, tmp_path / "hf-2")):
        assert export(source, target, "--format", "hf") == 0
        model = load_hf(target)
        assert type(model).__name__ == "LlamaForCausalLM"
        with torch.no_grad():
            assert relative(model(TOKENS).logits.double(), expected) <= 1e-5
        assert main(["verify", str(source), str(target), "--length", "16"]) == 0
        assert "PASS" in capsys.readouterr().out
    wrong = tmp_path / "wrong"  # verify sees a factor that is missing
    assert export(*checkpoint(tmp_path / "stock", "lnsafterff:exponent=0.0")[:1], wrong, "--format", "hf") == 0
    assert main(["verify", str(root), str(wrong), "--length", "16"]) == 1
    for source in (root, out):  # into transformers where its integration has the scheme
        code = main(["hf", "import", str(source), "-o", str(tmp_path / f"lns-{source.name}")])
        if not scheme.startswith("lnsafter"):
            assert code == 1 and "would need another form of the block" in capsys.readouterr().err
            continue
        model = load_hf(tmp_path / f"lns-{source.name}")
        assert code == 0 and type(model).__name__ == "LNSLlamaForCausalLM"
        with torch.no_grad():
            assert relative(model(TOKENS).logits.double(), expected) <= 1e-5


@pytest.mark.parametrize("scheme", ["sandwich", "sandwich_depth"])
def test_sandwich_is_a_stock_gemma_2(scheme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root, _, expected = checkpoint(tmp_path, scheme)
    assert export(root, tmp_path / "hf", "--format", "hf") == 0
    model = load_hf(tmp_path / "hf")
    assert type(model).__name__ == "Gemma2ForCausalLM"
    with torch.no_grad():
        assert relative(model(TOKENS).logits.double(), expected) <= 1e-5
    assert main(["verify", str(root), str(tmp_path / "hf"), "--length", "16"]) == 0
    assert "PASS" in capsys.readouterr().out
    with pytest.raises(LNSConfigError, match="cannot be folded into a stock model: it normalises the branches"):
        export_in_process(root, tmp_path / "folded")


@pytest.mark.parametrize("scheme", STOCK_KEYS)
def test_stock_names_do_not_pass_for_pre_ln(scheme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only the saved arguments tell these weights from a Pre-LN model's."""
    config = tiny.config()
    args = arguments(config, layernorm_scaling=False, norm_scheme=scheme)
    root = save(tmp_path / "run", perturbed(config), args)
    for kind in ("hf", "megatron"):
        code = export(root, tmp_path / kind, "--format", kind)
        if parse(scheme).folds_into_pre_ln(4):
            assert code == 0
        else:
            assert code != 0 and f"({scheme}) cannot be folded" in capsys.readouterr().err


def test_a_mixture_of_experts_is_not_folded(tmp_path: Path) -> None:
    config = tiny.config(num_moe_experts=4)
    apply(config, scheme="lnsafterbranch")
    args = arguments(config, "experts", layernorm_scaling=False, norm_scheme="lnsafterbranch")
    root = save(tmp_path / "run", perturbed(config), args)
    with pytest.raises(LNSConfigError, match="not folded into a mixture of experts"):
        export_in_process(root, tmp_path / "out")
