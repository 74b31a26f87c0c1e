"""The record beside OLMo's checkpoints: what is written, and every way of losing LNS."""

from __future__ import annotations

import pytest
import torch
from olmo.checkpoint import Checkpointer
from olmo.config import TrainConfig
from olmo.model import OLMo
from support.olmo_models import TINY, build, tokens

from olmo_lns.errors import CheckpointMismatchError
from olmo_lns.integrations.olmo import checkpoint, register
from olmo_lns.record import RECORD_FILE, LNSRecord

register()


def save(folder, kind, **changes):
    """An unsharded checkpoint as OLMo lays it out, its config written by OLMo's own checkpointer."""
    model = build(layer_norm_type=kind, **changes)
    config = TrainConfig.new(model={**TINY, "layer_norm_type": kind, **changes}, save_folder=str(folder.parent))
    folder.mkdir(parents=True)
    torch.save(model.state_dict(), folder / "model.pt")
    Checkpointer._save_config(_Saver(config), folder)
    return model, config


class _Saver:
    def __init__(self, cfg):
        self.cfg = cfg


def test_record_is_written_for_lns(tmp_path, monkeypatch):
    monkeypatch.setenv("OLMO_LNS_EXPONENT", "0.25")
    monkeypatch.setenv("OLMO_LNS_SCALED_INIT", "keep")
    save(tmp_path / "a", "lns_rms")
    assert LNSRecord.read(tmp_path / "a") == LNSRecord.lns("lns_rms", 0.25, scaled_init="keep")


def test_stock_checkpoints_are_untouched(tmp_path):
    save(tmp_path / "a", "rms")
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["config.yaml", "model.pt"]


def test_policy_off_without_lns_is_recorded(tmp_path, monkeypatch):
    monkeypatch.setenv("OLMO_LNS_SCALED_INIT", "off")
    save(tmp_path / "a", "rms")
    assert LNSRecord.read(tmp_path / "a") == LNSRecord(scaled_init="off")


@pytest.mark.parametrize("kind", ["lns_rms", "lns_default", "lns_low_precision"])
def test_from_checkpoint_gives_the_same_logits(tmp_path, kind):
    model, _ = save(tmp_path / "a", kind)
    assert torch.equal(OLMo.from_checkpoint(str(tmp_path / "a"))(tokens()).logits, model(tokens()).logits)


def test_from_checkpoint_under_another_exponent_stops(tmp_path, monkeypatch):
    save(tmp_path / "a", "lns_rms")
    monkeypatch.setenv("OLMO_LNS_EXPONENT", "0.25")
    with pytest.raises(CheckpointMismatchError, match=r"exponent 0\.5.*exponent 0\.25.*ALLOW_MISMATCH=exponent"):
        OLMo.from_checkpoint(str(tmp_path / "a"))


CASES = {
    # saved type, saved env, running type, running env, difference
    "lns to preln": ("lns_rms", {}, "rms", {}, "lns-to-preln"),
    "preln to lns": ("rms", {}, "lns_rms", {}, "preln-to-lns"),
    "exponent": ("lns_rms", {"OLMO_LNS_EXPONENT": "0.4"}, "lns_rms", {}, "exponent"),
    "norm": ("lns_default", {}, "lns_rms", {}, "norm"),
    "policy": ("lns_rms", {"OLMO_LNS_SCALED_INIT": "keep"}, "lns_rms", {}, "scaled-init"),
    "policy without lns": ("rms", {"OLMO_LNS_SCALED_INIT": "off"}, "rms", {}, "scaled-init"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_resuming_with_another_setting_stops(tmp_path, monkeypatch, caplog, case):
    saved_type, saved_env, running_type, running_env, difference = case
    with monkeypatch.context() as patch:
        for name, value in saved_env.items():
            patch.setenv(name, value)
        save(tmp_path / "step10-unsharded", saved_type)
    for name, value in running_env.items():
        monkeypatch.setenv(name, value)
    from olmo.train import Trainer

    class Running:
        cfg = TrainConfig.new(model={**TINY, "layer_norm_type": running_type})
        loaded = False

        def restore_unsharded_checkpoint(self, *args, **kwargs):
            self.loaded = True

    running = Running()
    with pytest.raises(CheckpointMismatchError, match=f"OLMO_LNS_ALLOW_MISMATCH={difference} "):
        Trainer.restore_checkpoint(running, tmp_path / "step10-unsharded")
    assert not running.loaded
    monkeypatch.setenv("OLMO_LNS_ALLOW_MISMATCH", difference)
    Trainer.restore_checkpoint(running, tmp_path / "step10-unsharded")
    assert running.loaded and f"although it differs ({difference})" in caplog.text


def test_folded_weights_run_as_preln_but_not_under_lns(tmp_path):
    _, config = save(tmp_path / "a", "rms")
    LNSRecord.lns("lns_rms", folded=True).write(tmp_path / "a")
    checkpoint.check_checkpoint(tmp_path / "a", config.model, training=False)
    with pytest.raises(CheckpointMismatchError, match="folded-to-preln"):
        checkpoint.check_checkpoint(tmp_path / "a", config.model, training=True)
    under_lns = TrainConfig.new(model={**TINY, "layer_norm_type": "lns_rms"})
    with pytest.raises(CheckpointMismatchError, match="applied twice"):
        checkpoint.check_checkpoint(tmp_path / "a", under_lns.model, training=False)


def test_a_lost_record_is_not_guessed(tmp_path, monkeypatch):
    save(tmp_path / "a", "lns_rms")
    (tmp_path / "a" / RECORD_FILE).unlink()
    with pytest.raises(CheckpointMismatchError, match=f"{RECORD_FILE} is missing.*missing-record"):
        OLMo.from_checkpoint(str(tmp_path / "a"))
    monkeypatch.setenv("OLMO_LNS_ALLOW_MISMATCH", "missing-record")
    OLMo.from_checkpoint(str(tmp_path / "a"))
