"""One loader: `analyze` and `verify` open a checkpoint as its record says it was trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("olmo", reason="needs ai2-olmo")

from support.exports import save_olmo

from olmo_lns.export.sources import source_of
from olmo_lns.integrations.olmo.model import record_of
from olmo_lns.models.loading import load_model


def _for_verify(folder: Path) -> torch.nn.Module:
    return source_of(folder).model(folder)


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
    one, other = load_model(str(tmp_path / "quarter"), device="cpu").model, _for_verify(tmp_path / "quarter")
    assert {str(record_of(model).scheme) for model in (one, other)} == {"lns:exponent=0.25"}
    ids = torch.arange(24).view(2, 12)
    with torch.inference_mode():
        assert torch.equal(one(ids).logits, other(ids).logits)


def test_without_its_record_a_checkpoint_is_what_its_config_says(tmp_path: Path) -> None:
    save_olmo(tmp_path / "lost", layer_norm_type="lns_rms")
    (tmp_path / "lost" / "lns.json").unlink()
    model = load_model(str(tmp_path / "lost"), device="cpu").model
    assert str(record_of(model).scheme) == "lns"
