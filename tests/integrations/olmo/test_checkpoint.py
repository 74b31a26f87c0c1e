"""The record beside OLMo's checkpoints: what is written, and every way of losing LNS."""

from __future__ import annotations

import copy
import http.server
import pickle
import threading

import pytest
import torch
from olmo.checkpoint import Checkpointer
from olmo.config import TrainConfig
from olmo.model import OLMo, RMSLayerNorm
from olmo.train import Trainer
from support.olmo_models import TINY, build, tokens

from olmo_lns.errors import CheckpointMismatchError, LNSConfigError, UpstreamChangedError
from olmo_lns.export import guards
from olmo_lns.integrations.olmo import checkpoint, register
from olmo_lns.integrations.olmo.model import blocks_of, record_of
from olmo_lns.record import RECORD_FILE, Record
from olmo_lns.schemes import names, parse

register()


def save(folder, kind, **changes):
    """An unsharded checkpoint as OLMo lays it out, its config written by OLMo's own checkpointer."""
    model = build(layer_norm_type=kind, **changes)
    save_built(folder, model)
    return model


def save_built(folder, model):
    config = TrainConfig.new(model=TINY, save_folder=str(folder.parent))
    config.model = model.config  # as in a launch: one object
    folder.mkdir(parents=True)
    torch.save(model.state_dict(), folder / "model.pt")
    Checkpointer._save_config(_Saver(config), folder)


class _Saver:
    def __init__(self, cfg):
        self.cfg = cfg


def test_the_record_is_of_the_model_that_was_built(tmp_path, monkeypatch):
    monkeypatch.setenv("OLMO_LNS_SCHEME", "lns:exponent=0.25")
    model = build(layer_norm_type="lns_rms")
    monkeypatch.setenv("OLMO_LNS_SCHEME", "lns:exponent=0.5")
    monkeypatch.setenv("OLMO_LNS_INITIALIZATION", "upstream")
    save_built(tmp_path / "a", model)
    assert Record.read(tmp_path / "a") == record_of(model) == Record(parse("lns:exponent=0.25"), "rms", "plain")
    assert blocks_of(model)[1].ff_norm.lns_scale == 2**-0.25


def test_a_config_that_is_built_again_has_the_record_of_the_last_model(tmp_path):
    model = build(layer_norm_type="lns_rms")
    model.config.layer_norm_type = type(model.config.layer_norm_type).rms
    OLMo(model.config)
    save_built(tmp_path / "a", model)
    assert Record.read(tmp_path / "a") is None


def test_a_scheme_of_which_no_model_was_built_is_not_recorded(tmp_path):
    """What the weights were trained with would be a guess."""
    config = TrainConfig.new(model={**TINY, "layer_norm_type": "lns_rms"}, save_folder=str(tmp_path))
    with pytest.raises(CheckpointMismatchError, match="no model was built from this config"):
        Checkpointer._save_config(_Saver(config), tmp_path)
    assert not (tmp_path / RECORD_FILE).exists()


def test_stock_checkpoints_are_untouched(tmp_path, monkeypatch):
    model = save(tmp_path / "a", "rms")
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["config.yaml", "model.pt"]
    # Nor does a setting of later change what was built.
    monkeypatch.setenv("OLMO_LNS_INITIALIZATION", "plain")
    save_built(tmp_path / "b", model)
    assert Record.read(tmp_path / "b") is None
    save(tmp_path / "c", "rms")
    assert Record.read(tmp_path / "c") == Record(scaled_init="plain")


def test_a_pickled_stock_model_does_not_need_us():
    data = pickle.dumps(build(layer_norm_type="rms"))
    assert b"olmo_lns." not in data
    assert record_of(pickle.loads(data)) == Record()


def test_from_checkpoint_gives_the_same_logits_or_stops(tmp_path, monkeypatch):
    model = save(tmp_path / "a", "lns_rms")
    assert torch.equal(OLMo.from_checkpoint(str(tmp_path / "a"))(tokens()).logits, model(tokens()).logits)
    monkeypatch.setenv("OLMO_LNS_SCHEME", "lns:exponent=0.25")
    with pytest.raises(CheckpointMismatchError, match=r"exponent=0\.5.*exponent=0\.25.*ALLOW_MISMATCH=exponent"):
        OLMo.from_checkpoint(str(tmp_path / "a"))


#: (saved type, running type, difference, the flag that the error ends with)
CASES = [
    ("lns_rms", "rms", "lns-to-preln", "lns"),
    ("rms", "lns_rms", "preln-to-lns", "rms"),
    ("lns_rms", "lns_rms:exponent=0.4", "exponent", "lns"),
    ("lns_default", "lns_rms", "norm", "lns_default"),
]


class Running:
    """A trainer, as far as ``restore_checkpoint`` looks at it before it loads anything."""

    def __init__(self, kind, **changes):
        self.model = build(layer_norm_type=kind, **changes)
        self.cfg = TrainConfig.new(model=TINY)
        self.loaded = False

    def restore_unsharded_checkpoint(self, *args, **kwargs):
        self.loaded = True


@pytest.mark.parametrize(("saved", "running", "difference", "flag"), CASES)
def test_resuming_with_another_setting_stops(tmp_path, monkeypatch, caplog, saved, running, difference, flag):
    save(tmp_path / "step10-unsharded", saved)
    trainer = Running(running)
    with pytest.raises(CheckpointMismatchError, match=f"OLMO_LNS_ALLOW_MISMATCH={difference} ") as caught:
        Trainer.restore_checkpoint(trainer, tmp_path / "step10-unsharded")
    assert not trainer.loaded and str(caught.value).splitlines()[-1] == f"--model.layer_norm_type={flag}"
    monkeypatch.setenv("OLMO_LNS_ALLOW_MISMATCH", difference)
    Trainer.restore_checkpoint(trainer, tmp_path / "step10-unsharded")
    assert trainer.loaded and f"although it differs ({difference})" in caplog.text


def test_resuming_compares_with_the_built_model_not_with_the_variable(tmp_path, monkeypatch):
    save(tmp_path / "step10-unsharded", "lns_rms")
    monkeypatch.setenv("OLMO_LNS_SCHEME", "lns:exponent=0.25")
    running = Running("lns_rms")
    monkeypatch.delenv("OLMO_LNS_SCHEME")
    with pytest.raises(CheckpointMismatchError, match=r"exponent=0\.5.*this run has lns:exponent=0\.25"):
        Trainer.restore_checkpoint(running, tmp_path / "step10-unsharded")


def tampered(name):
    """A model one of whose blocks was changed after it was built."""
    model = build(layer_norm_type="lns_rms")
    block = blocks_of(model)[2]
    if name == "factor":
        block.ff_norm.lns_scale = 0.9
    elif name == "class":
        block.ff_norm.__class__ = RMSLayerNorm
    elif name == "stock norm":
        block.ff_norm = RMSLayerNorm(model.config)
    elif name == "copy of another":
        block.ff_norm = copy.deepcopy(blocks_of(model)[1].ff_norm)
    else:
        block.lns_initialization = "scaled"
    return model


TAMPERED = {
    "factor": r"ff_norm .block 3, ff. has norm_scale=0\.9 instead of 0\.57735",
    "class": r"ff_norm .block 3, ff. has norm_scale=1\.0 instead of 0\.57735",
    "stock norm": "lns is on 7 sub-layers .*expected the 8 sub-layers of 4 blocks",
    "copy of another": r"\(2, 'ff'\), \(3, 'attn'\), \(2, 'ff'\).*expected the 8 sub-layers",
    "initialization": "one model with the initializations plain, scaled",
}


@pytest.mark.parametrize("name", TAMPERED)
def test_a_model_that_was_changed_after_building_is_found(tmp_path, name):
    save(tmp_path / "step10-unsharded", "lns_rms")
    running = Running("lns_rms")
    running.model = tampered(name)
    with pytest.raises(UpstreamChangedError, match=TAMPERED[name]):
        Trainer.restore_checkpoint(running, tmp_path / "step10-unsharded")
    assert not running.loaded


def test_folded_weights_run_as_preln_but_not_under_lns(tmp_path):
    save(tmp_path / "a", "rms")
    Record(parse("lns"), "rms", "plain", folded=True).write(tmp_path / "a")
    checkpoint.check_checkpoint(tmp_path / "a", record_of(build(layer_norm_type="rms")))
    with pytest.raises(CheckpointMismatchError, match="applied twice"):
        checkpoint.check_checkpoint(tmp_path / "a", record_of(build(layer_norm_type="lns_rms")))


def test_another_initialization_does_not_matter_to_weights_that_are_loaded(tmp_path, monkeypatch):
    monkeypatch.setenv("OLMO_LNS_INITIALIZATION", "upstream")
    save(tmp_path / "a", "lns_rms")
    monkeypatch.delenv("OLMO_LNS_INITIALIZATION")
    running = Running("lns_rms")
    Trainer.restore_checkpoint(running, tmp_path / "a", checkpoint_type="unsharded")
    assert running.loaded


class Restoring(Running):
    """Reads train.pt as OLMo's checkpointers do."""

    def restore_unsharded_checkpoint(self, folder, **kwargs):
        super().restore_unsharded_checkpoint()
        torch.load(folder / "train.pt", weights_only=False)


def test_the_mark_is_compared_where_the_folder_lost_its_files(tmp_path, monkeypatch):
    """Of a checkpoint's files only the ``*.pt`` were copied."""
    lns = Running("lns_rms")
    lns.trainer_state_dict = lambda: {}
    lns.cfg.model = lns.model.config
    from olmo_lns.integrations.olmo.state import wrap_trainer_state

    torch.save(wrap_trainer_state(lambda self: {})(lns), tmp_path / "train.pt")
    with pytest.raises(CheckpointMismatchError, match="without the scheme it was trained with"):
        Trainer.restore_checkpoint(Restoring("rms"), tmp_path, checkpoint_type="unsharded")
    with pytest.raises(CheckpointMismatchError, match=r"neither config\.yaml nor lns\.json.*unknown.*missing-record"):
        Trainer.restore_checkpoint(Restoring("lns_rms"), tmp_path, checkpoint_type="unsharded")
    monkeypatch.setenv("OLMO_LNS_ALLOW_MISMATCH", "missing-record")
    Trainer.restore_checkpoint(Restoring("lns_rms"), tmp_path, checkpoint_type="unsharded")


def test_a_folder_that_is_not_there_is_named_by_olmo(tmp_path):
    running = Restoring("lns_rms")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        Trainer.restore_checkpoint(running, tmp_path / "nowhere", checkpoint_type="unsharded")


def test_a_lost_record_is_what_the_config_says(tmp_path):
    for kind, init_fn, expected in (
        ("lns_default:exponent=0.25", "normal", Record(parse("lns:exponent=0.25"), "default", "plain")),
        ("lns_rms", "normal_scaled", Record(parse("lns"), "rms", "scaled")),
        ("rms", "normal_depth_scaled", Record(scaled_init="depth_scaled")),
        ("rms", "normal", Record()),
    ):
        folder = tmp_path / f"{kind}-{init_fn}"
        save(folder, kind, init_fn=init_fn)
        (folder / RECORD_FILE).unlink(missing_ok=True)
        assert checkpoint.saved_record(folder) == expected


def test_a_type_and_a_variable_that_contradict_each_other_build_nothing(monkeypatch):
    monkeypatch.setenv("OLMO_LNS_SCHEME", "lns:exponent=0.25")
    build(layer_norm_type="lns_rms:exponent=0.25")
    build(layer_norm_type="rms")
    with pytest.raises(
        LNSConfigError, match="layer_norm_type lns_rms:exponent=0.5 and OLMO_LNS_SCHEME=lns:exp.* contra"
    ):
        build(layer_norm_type="lns_rms:exponent=0.5")
    monkeypatch.setenv("OLMO_LNS_SCHEME", "lsn")  # a misspelt one selects nothing, so that stock models do not mind
    build(layer_norm_type="rms")
    with pytest.raises(LNSConfigError, match="OLMO_LNS_SCHEME: unknown scheme 'lsn' .did you mean 'lns'"):
        build(layer_norm_type="lns_rms")


@pytest.fixture
def store(tmp_path):
    """A store on this machine that answers 403 for the record, as one does that hides what is not there."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=str(tmp_path))

        def send_head(self):
            return self.send_error(403) if self.path.endswith("lns.json") else super().send_head()

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield tmp_path, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_a_store_that_refuses_the_record(store, caplog):
    """It does not stop a stock checkpoint, and stops one with a scheme."""
    folder, url = store
    (folder / "config.yaml").write_text("model:\n  layer_norm_type: rms\n")
    assert checkpoint.saved_record(url) == Record()
    assert "lns.json cannot be read" in caplog.text and "403" in caplog.text
    (folder / "lns").mkdir()
    (folder / "lns" / "config.yaml").write_text("model:\n  layer_norm_type: lns_rms\n")
    with pytest.raises(CheckpointMismatchError, match=r"lns\.json cannot be read: .*403"):
        checkpoint.saved_record(f"{url}/lns")


# Weights with a Pre-LN model's names and shapes, trained under another scheme

STOCK_KEYS = [name for name in names() if name not in ("preln", "lns") and parse(name).stock_keys(TINY["n_layers"])]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folders = {name: tmp_path_factory.mktemp(name) / "step1-unsharded" for name in ("rms", "lns", *STOCK_KEYS)}
    for name, folder in folders.items():
        save(folder, name if name == "rms" else f"{name}_rms")
    return folders


def test_they_have_stock_names(saved):
    """Otherwise there would be nothing to guard."""
    assert {"postln", "mixln", "deepnorm"} < set(STOCK_KEYS)
    stock = torch.load(saved["rms"] / "model.pt", weights_only=True)
    for name in STOCK_KEYS:
        state = torch.load(saved[name] / "model.pt", weights_only=True)
        assert {k: v.shape for k, v in state.items()} == {k: v.shape for k, v in stock.items()}


@pytest.mark.parametrize("trained", ["rms", "lns", *STOCK_KEYS])
def test_no_scheme_runs_anothers_weights(saved, trained):
    for running in {"rms", "lns", "mixln", trained}:
        record = record_of(build(layer_norm_type=running if running == "rms" else f"{running}_rms"))
        if running == trained:
            checkpoint.check_checkpoint(saved[trained], record)
        else:
            with pytest.raises(CheckpointMismatchError, match="was saved with"):
                checkpoint.check_checkpoint(saved[trained], record)


@pytest.mark.parametrize("name", STOCK_KEYS)
def test_neither_converter_makes_a_pre_ln_model_of_them(saved, name):
    for keeps_gains in (True, False):  # hf_olmo's, and OLMo's script or transformers' copy of it
        with pytest.raises(CheckpointMismatchError, match=f"was saved with {name}"):
            guards.check_conversion(saved[name], keeps_gains=keeps_gains)
    guards.check_conversion(saved["rms"], keeps_gains=True)


def test_hf_olmo_is_stopped(saved):
    pytest.importorskip("hf_olmo", reason="ai2-olmo without its hf_olmo package")
    guards.install()
    from hf_olmo.convert_olmo_to_hf import write_config

    with pytest.raises(CheckpointMismatchError, match="was saved with postln"):
        write_config(str(saved["postln"]))
    assert not (saved["postln"] / "config.json").exists()


def test_a_config_that_was_given_the_stock_type_does_not_pass(saved):
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
