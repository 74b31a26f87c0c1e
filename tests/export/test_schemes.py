"""Exports of the other schemes: folded into stock code where that is exact, kept or refused where it is not."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.exports import export, load_hf, load_olmo, logits, refused, relative, save_olmo
from support.olmo_models import tokens

from olmo_lns.cli import main
from olmo_lns.export import fold
from olmo_lns.export.huggingface import is_gemma2
from olmo_lns.record import Record
from olmo_lns.schemes import names, parse

IDS = tokens(batch=2, length=16)
FOLDS = (
    "layerscale",
    "skipinit",
    "lnsafterbranch",
    "lnsafterattn",
    "lnsafterff",
    "lnsvalue",
    "lnsrate",
    "lnsstart",
    "lnsuniform",
    "lnsreversed",
)
GEMMA = ("sandwich", "sandwich_depth")
KEPT = tuple(name for name in names() if name not in ("preln", "lns", *FOLDS))
#: Name -> part of the reason.
REASONS = {
    **dict.fromkeys(("postln", "mixln", "deepnorm", "admin"), "its norms sit on the sums"),
    **dict.fromkeys(("branchln", "branchln_depth", *GEMMA), "it normalises the branches"),
    **dict.fromkeys(("lnsbefore", "lnsafterresidual"), "equals Pre-LN only up to the eps"),
    "groupln": "statistics over groups of channels",
}
SHAPES: dict[str, dict[str, Any]] = {
    "rms": {},
    "default, llama blocks": {"block_type": "llama"},
    "biases": {"include_bias": True, "weight_tying": True},
    "no gains, groups": {"layer_norm_with_affine": False, "block_group_size": 2},
}


def saved(folder: Path, name: str, **changes: Any) -> Any:
    return save_olmo(folder / "checkpoint", layer_norm_type=name, **changes), folder / "checkpoint"


def test_every_scheme_folds_or_has_a_reason():
    assert set(REASONS) == set(KEPT)
    for name in (*FOLDS, *KEPT):
        problem = fold.obstacle(parse(name), 4)
        assert (REASONS[name] in problem) if name in REASONS else not problem
        assert parse(name).folds_into_pre_ln(4) is not bool(problem)
        assert is_gemma2(parse(name), 4) is (name in GEMMA)


@pytest.mark.parametrize(("name", "shape"), [(name, list(SHAPES)[i % 4]) for i, name in enumerate(FOLDS)])
def test_folds_into_stock_olmo_and_transformers(tmp_path, name, shape):
    base = "default" if "default" in shape else "rms"
    model, folder = saved(tmp_path, f"{name}_{base}", **SHAPES[shape])
    expected = logits(model, IDS)
    assert export(folder, tmp_path / "olmo") == 0
    stock = load_olmo(tmp_path / "olmo")
    assert str(stock.config.layer_norm_type) == base
    assert relative(logits(stock, IDS), expected) <= 1e-5
    assert Record.read(tmp_path / "olmo") == Record(parse(name), base, "plain", folded=True)
    assert export(folder, tmp_path / "hf", "--format", "hf", "--tokenizer", "none") == 0
    assert relative(logits(load_hf(tmp_path / "hf"), IDS), expected) <= 1e-5
    if name in ("layerscale", "lnsafterbranch"):
        for out in ("olmo", "hf"):
            assert main(["verify", str(folder), str(tmp_path / out), "--length", "16"]) == 0


@pytest.mark.parametrize("name", ["layerscale_rms", "skipinit_rms", "lnsafterff_rms"])
def test_sharded_checkpoints_are_folded_by_rows(tmp_path, name):
    model, folder = saved(tmp_path, name, sharded=True, optimizer=True)
    assert export(folder, tmp_path / "sharded") == 0
    assert export(folder, tmp_path / "unsharded", "--format", "olmo-unsharded") == 0
    stock = load_olmo(tmp_path / "unsharded")
    assert relative(logits(stock, IDS), logits(model, IDS)) <= 1e-5
    from olmo_lns.checkpoints.olmo import OLMoCheckpoint

    written = OLMoCheckpoint.open(tmp_path / "sharded").tensors
    assert set(written) == set(stock.state_dict())
    for key, value in stock.state_dict().items():
        torch.testing.assert_close(written[key].load(), value, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", GEMMA)
@pytest.mark.parametrize(
    "changes", [{}, {"block_type": "llama", "weight_tying": True}, {"n_kv_heads": 2, "layer_norm_with_affine": False}]
)
def test_sandwich_is_gemma_2(tmp_path, name, changes):
    model, folder = saved(tmp_path, f"{name}_rms", **changes)
    assert export(folder, tmp_path / "hf", "--format", "hf", "--tokenizer", "none") == 0
    exported = load_hf(tmp_path / "hf")
    assert type(exported).__name__ == "Gemma2ForCausalLM"
    assert relative(logits(exported, IDS), logits(model, IDS)) <= 1e-5
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["lns_record"]["scheme"] == name
    assert main(["verify", str(folder), str(tmp_path / "hf"), "--length", "16"]) == 0


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        ("default", {}, "LayerNorm .Gemma 2 has RMSNorm"),
        ("rms", {"include_bias": True, "weight_tying": True}, "biases"),
    ],
)
def test_a_sandwich_that_is_no_gemma_2_is_refused(tmp_path, capsys, base, changes, message):
    _, folder = saved(tmp_path, f"sandwich_{base}", **changes)
    assert re.search(message, refused(capsys, folder, tmp_path / "hf", "--format", "hf", "--tokenizer", "none"))


@pytest.mark.parametrize("name", KEPT)
def test_what_does_not_fold_keeps_its_scheme(tmp_path, capsys, name):
    model, folder = saved(tmp_path, f"{name}_default", sharded=name == "mixln")
    assert export(folder, tmp_path / "olmo", "--format", "olmo-unsharded") == 0
    assert REASONS[name] in capsys.readouterr().out
    assert Record.read(tmp_path / "olmo") == Record(parse(name), "default", "plain")
    assert relative(logits(load_olmo(tmp_path / "olmo"), IDS), logits(model, IDS)) <= 1e-6
    if name == "postln":
        assert main(["verify", str(folder), str(tmp_path / "olmo"), "--length", "16"]) == 0
    if name not in GEMMA:
        assert REASONS[name] in refused(capsys, folder, tmp_path / "hf", "--format", "hf", "--tokenizer", "none")


def test_unfolding_is_for_what_only_scales_norms(tmp_path, capsys):
    _, folder = saved(tmp_path, "layerscale_rms")
    assert export(folder, tmp_path / "folded") == 0
    message = refused(capsys, tmp_path / "folded", tmp_path / "again", "--unfold")
    assert "LayerScale" in message and "more than multiply the norms" in message
