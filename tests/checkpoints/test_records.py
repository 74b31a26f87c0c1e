"""One reader of what a folder says about its model, whatever wrote it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("olmo", reason="needs ai2-olmo")

from support.exports import export, save_olmo

from olmo_lns.checkpoints import record_in
from olmo_lns.cli import main
from olmo_lns.record import Record
from olmo_lns.schemes import PRE_LN, Scheme

QUARTER = Scheme.of("lns", exponent=0.25)


def test_olmo_and_its_exports(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    save_olmo(tmp_path / "quarter", exponent=0.25, layer_norm_type="lns_rms")
    assert record_in(tmp_path / "quarter") == Record(QUARTER, "rms", "plain")
    for form in ("olmo", "hf"):
        assert export(tmp_path / "quarter", tmp_path / form, "--format", form, "--tokenizer", "none") == 0
        assert record_in(tmp_path / form) == Record(QUARTER, "rms", "plain", folded=True)
    save_olmo(tmp_path / "preln", layer_norm_type="rms")
    assert getattr(record_in(tmp_path / "preln"), "scheme", None) == PRE_LN
    (tmp_path / "quarter" / "lns.json").unlink()  # a lost record is in the config
    lost = record_in(tmp_path / "quarter")
    assert lost is not None and str(lost.scheme) == "lns" and lost.norm == "rms"


def test_a_transformers_folder_of_ours_and_a_stock_one(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    arguments = ["hf", "init", "llama", "--set", "num_hidden_layers=2", "--no-weights", "-o", str(tmp_path / "ours")]
    assert main([*arguments, "--scheme", "lns:exponent=0.25"]) == 0
    found = record_in(tmp_path / "ours")
    assert found is not None and found.scheme == QUARTER and not found.folded
    values = json.loads((tmp_path / "ours" / "config.json").read_text())
    (tmp_path / "stock").mkdir()
    (tmp_path / "stock" / "config.json").write_text(json.dumps({**values, "lns_record": None}))
    assert record_in(tmp_path / "stock") is None and record_in(tmp_path) is None
