"""One loader: `analyze` and `verify` open a checkpoint as its record says it was trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("olmo", reason="needs ai2-olmo")

from support.exports import save_olmo

from olmo_lns.export.cli import source_of
from olmo_lns.integrations.olmo.model import record_of
from olmo_lns.models.loading import load_model


@pytest.mark.parametrize("sharded", [False, True], ids=["unsharded", "sharded"])
@pytest.mark.parametrize("selected", [None, "lns:exponent=0.5"])
def test_analyze_and_verify_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sharded: bool, selected: str | None
) -> None:
    """The exponent stands in the record alone; the environment names none, or another."""
    monkeypatch.delenv("OLMO_LNS_SCHEME", raising=False)
    save_olmo(tmp_path / "quarter", sharded=sharded, exponent=0.25, layer_norm_type="lns_rms")
    if selected is not None:
        monkeypatch.setenv("OLMO_LNS_SCHEME", selected)
    one, other = (
        load_model(str(tmp_path / "quarter"), device="cpu").model,
        source_of(tmp_path / "quarter").model(tmp_path / "quarter"),
    )
    assert {str(record_of(model).scheme) for model in (one, other)} == {"lns:exponent=0.25"}
    ids = torch.arange(24).view(2, 12)
    with torch.inference_mode():
        assert torch.equal(one(ids).logits, other(ids).logits)
