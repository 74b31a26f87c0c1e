"""Weights with a Pre-LN model's names and shapes, trained under another scheme: every way to run them as what they are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from olmo.checkpoint import Checkpointer
from olmo.config import TrainConfig
from olmo.model import OLMo
from support.olmo_models import TINY, build

from olmo_lns.errors import CheckpointMismatchError
from olmo_lns.export import guards
from olmo_lns.integrations.olmo import checkpoint, register
from olmo_lns.integrations.olmo.model import record_of
from olmo_lns.record import Record
from olmo_lns.schemes import names, parse

register()

STOCK_KEYS = [name for name in names() if name not in ("preln", "lns") and parse(name).stock_keys(TINY["n_layers"])]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A checkpoint of each scheme, its config and record written by OLMo's own checkpointer."""
    folders = {}
    for name in ("rms", "lns", *STOCK_KEYS):
        folder = folders[name] = tmp_path_factory.mktemp(name) / "step1-unsharded"
        model = build(layer_norm_type=name if name == "rms" else f"{name}_rms")
        config = TrainConfig.new(model=TINY, save_folder=str(folder.parent))
        config.model = model.config
        folder.mkdir()
        torch.save(model.state_dict(), folder / "model.pt")
        Checkpointer._save_config(type("Saver", (), {"cfg": config})(), folder)
    return folders


def test_they_have_stock_names(saved: dict[str, Any]) -> None:
    """Otherwise there would be nothing to guard."""
    assert {"postln", "mixln", "deepnorm"} < set(STOCK_KEYS)
    stock = torch.load(saved["rms"] / "model.pt", weights_only=True)
    for name in STOCK_KEYS:
        state = torch.load(saved[name] / "model.pt", weights_only=True)
        assert {k: v.shape for k, v in state.items()} == {k: v.shape for k, v in stock.items()}


@pytest.mark.parametrize("trained", ["rms", "lns", *STOCK_KEYS])
def test_no_scheme_runs_anothers_weights(saved: dict[str, Any], trained: str) -> None:
    for running in {"rms", "lns", "mixln", trained}:
        record = record_of(build(layer_norm_type=running if running == "rms" else f"{running}_rms"))
        if running == trained:
            checkpoint.check_checkpoint(saved[trained], record)
        else:
            with pytest.raises(CheckpointMismatchError, match="was saved with"):
                checkpoint.check_checkpoint(saved[trained], record)


@pytest.mark.parametrize("name", STOCK_KEYS)
def test_neither_converter_makes_a_pre_ln_model_of_them(saved: dict[str, Any], name: str) -> None:
    for keeps_gains in (True, False):  # hf_olmo's, and OLMo's script or transformers' copy of it
        with pytest.raises(CheckpointMismatchError, match=f"was saved with {name}"):
            guards.check_conversion(saved[name], keeps_gains=keeps_gains)
    guards.check_conversion(saved["rms"], keeps_gains=True)


def test_hf_olmo_is_stopped(saved: dict[str, Any]) -> None:
    pytest.importorskip("hf_olmo", reason="ai2-olmo without its hf_olmo package")
    guards.install()
    from hf_olmo.convert_olmo_to_hf import write_config

    with pytest.raises(CheckpointMismatchError, match="was saved with postln"):
        write_config(str(saved["postln"]))
    assert not (saved["postln"] / "config.json").exists()


def test_a_config_that_was_given_the_stock_type_does_not_pass(saved: dict[str, Any]) -> None:
    """As somebody would who wants stock OLMo to open it: the record beside it still says what it is."""
    text = (saved["mixln"] / "config.yaml").read_text()
    try:
        (saved["mixln"] / "config.yaml").write_text(text.replace("mixln_rms", "rms"))
        with pytest.raises(CheckpointMismatchError, match="was saved with mixln"):
            OLMo.from_checkpoint(str(saved["mixln"]), device="cpu", checkpoint_type="unsharded")
        with pytest.raises(CheckpointMismatchError, match="was saved with mixln"):
            guards.check_conversion(saved["mixln"], keeps_gains=True)
    finally:
        (saved["mixln"] / "config.yaml").write_text(text)
    assert Record.read(saved["mixln"]) == Record(parse("mixln"), "rms", "plain")
