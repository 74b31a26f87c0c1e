"""The record of an OLMo checkpoint and the mark in its trainer's state: no save and no resume loses the scheme."""

import copy
import pickle
import pickletools
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import olmo.checkpoint
import olmo.util
import pytest
import torch
from olmo.checkpoint import Checkpointer, FullCheckpointer
from olmo.config import LayerNormType, TrainConfig
from olmo.model import OLMo, RMSLayerNorm
from olmo.train import Trainer
from support.launch import environment, write_config
from support.launch import run as launch
from support.olmo_models import TINY, build, tokens
from torch.nn.parallel import DistributedDataParallel

from olmo_lns import cli
from olmo_lns.errors import CheckpointMismatchError, LNSConfigError, UpstreamChangedError
from olmo_lns.export import guards
from olmo_lns.export.olmo import mark
from olmo_lns.integrations import patching
from olmo_lns.integrations.olmo import register
from olmo_lns.integrations.olmo.model import blocks_of, record_of
from olmo_lns.integrations.olmo.state import KEY, Mark, check_checkpoint, saved_record, wrap_trainer_state
from olmo_lns.processes import process_group
from olmo_lns.record import RECORD_FILE, Record
from olmo_lns.runs.train import load_config, prepare
from olmo_lns.runs.trainer import run
from olmo_lns.schemes import names, parse

register()

LNS = Record(parse("lns"), "rms", "plain")
REFUSED = "this checkpoint was saved with lns:exponent=0.5 over rms"


@pytest.fixture(scope="module", autouse=True)
def one_process():
    """OLMo's checkpointers need a process group."""
    with process_group():
        yield


def save(folder, kind, **changes):
    """Build a model and save it, unsharded, with OLMo's own checkpointer."""
    model = build(layer_norm_type=kind, **changes)
    save_built(folder, model)
    return model


def save_built(folder, model, config=None, **state):
    """The checkpointer has ``config``; without one it has the config of the model."""
    if config is None:
        config = TrainConfig.new(model=TINY, save_folder=str(folder.parent))
        config.model = model.config  # as in a launch: one object
    optimizer = torch.optim.AdamW(model.parameters())
    FullCheckpointer(config).save_checkpoint(folder, DistributedDataParallel(model), optimizer, state)


def test_record_and_resume_follow_the_built_model_and_not_the_variables(tmp_path, monkeypatch):
    monkeypatch.setenv("OLMO_LNS_SCHEME", "lns:exponent=0.25")
    model, running = build(layer_norm_type="lns_rms"), Running("lns_rms")
    monkeypatch.setenv("OLMO_LNS_SCHEME", "lns:exponent=0.5")
    monkeypatch.setenv("OLMO_LNS_INITIALIZATION", "upstream")
    save_built(tmp_path / "a", model)
    assert Record.read(tmp_path / "a") == record_of(model) == Record(parse("lns:exponent=0.25"), "rms", "plain")
    assert blocks_of(model)[1].ff_norm.lns_scale == 2**-0.25
    save(tmp_path / "b", "lns_rms")
    with pytest.raises(CheckpointMismatchError, match=r"exponent=0\.5.*this run has lns:exponent=0\.25"):
        running.restore(tmp_path / "b")


@pytest.mark.parametrize(
    ("kind", "built"),
    [("rms", "lns_rms"), ("lns_rms", "rms"), ("lns_rms", "lns_default"), ("lns_rms", "lns_rms:exponent=0.4")],
)
def test_a_model_is_not_saved_with_a_config_of_another_scheme(tmp_path, kind, built):
    config = TrainConfig.new(model={**TINY, "layer_norm_type": kind}, save_folder=str(tmp_path))
    model = OLMo(config.model.update_with(layer_norm_type=LayerNormType[built]))
    with pytest.raises(CheckpointMismatchError, match=f"names layer_norm_type {kind}. Give the checkpointer the conf"):
        save_built(tmp_path / "a", model, config)
    assert not (tmp_path / "a").exists()


def test_a_stock_checkpoint_has_no_record_unless_an_initialization_was_chosen(tmp_path, monkeypatch):
    model = save(tmp_path / "a", "rms")
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["config.yaml", "model.pt", "optim.pt", "train.pt"]
    # A variable that is set after the build does not change the record.
    monkeypatch.setenv("OLMO_LNS_INITIALIZATION", "plain")
    save_built(tmp_path / "b", model)
    assert Record.read(tmp_path / "b") is None
    save(tmp_path / "c", "rms")
    assert Record.read(tmp_path / "c") == Record(scaled_init="plain")


def test_a_pickled_stock_model_does_not_refer_to_olmo_lns():
    data = pickle.dumps(build(layer_norm_type="rms"))
    assert b"olmo_lns." not in data
    assert record_of(pickle.loads(data)) == Record()


def test_from_checkpoint_gives_the_same_logits_and_refuses_another_exponent(tmp_path, monkeypatch):
    config = TrainConfig.new(model={**TINY, "layer_norm_type": "lns_rms"}, save_folder=str(tmp_path))
    model = OLMo(config.model.update_with(init_device="cpu")).eval()  # update_with makes a copy
    save_built(tmp_path / "a", model, config)
    assert Record.read(tmp_path / "a") == record_of(model) == Record(parse("lns"), "rms", "plain")
    assert torch.equal(OLMo.from_checkpoint(str(tmp_path / "a"))(tokens()).logits, model(tokens()).logits)
    monkeypatch.setenv("OLMO_LNS_SCHEME", "lns:exponent=0.25")
    with pytest.raises(CheckpointMismatchError, match=r"exponent=0\.5.*exponent=0\.25.*ALLOW_MISMATCH=exponent"):
        OLMo.from_checkpoint(str(tmp_path / "a"))


#: Saved type, type of the run, difference, type in the error's last line. test_record.py checks the other words.
CASES = [
    ("lns_rms", "rms", "lns-to-preln", "lns"),
    ("rms", "lns_rms", "preln-to-lns", "rms"),
    ("lns_rms", "lns_rms:exponent=0.4", "exponent", "lns"),
    ("lns_default", "lns_rms", "norm", "lns_default"),
]


class Running:
    """A model that resumes through OLMo's own checkpointer."""

    def __init__(self, kind):
        self.model = build(seed=7, layer_norm_type=kind)
        self.before = self.model.transformer.wte.weight.clone()

    @property
    def loaded(self):
        return not torch.equal(self.before, self.model.transformer.wte.weight)

    def restore(self, folder):
        optimizer = torch.optim.AdamW(self.model.parameters())
        checkpointer = FullCheckpointer(TrainConfig.new(model=TINY))
        checkpointer.restore_checkpoint(
            folder, DistributedDataParallel(self.model), optimizer, load_optimizer_state=False
        )


def test_every_checkpointer_is_guarded():
    kinds = [
        kind for kind in vars(olmo.checkpoint).values() if isinstance(kind, type) and issubclass(kind, Checkpointer)
    ]
    assert len(kinds) == 6
    for kind in set(kinds) - {Checkpointer}:
        assert patching.is_patched(kind.save_checkpoint) and patching.is_patched(kind.restore_checkpoint)


@pytest.mark.parametrize(("saved", "running", "difference", "flag"), CASES)
def test_resuming_with_another_setting_is_refused(tmp_path, monkeypatch, caplog, saved, running, difference, flag):
    save(tmp_path / "step10-unsharded", saved)
    trainer = Running(running)
    with pytest.raises(CheckpointMismatchError, match=f"OLMO_LNS_ALLOW_MISMATCH={difference} ") as caught:
        trainer.restore(tmp_path / "step10-unsharded")
    assert not trainer.loaded and str(caught.value).splitlines()[-1] == f"--model.layer_norm_type={flag}"
    monkeypatch.setenv("OLMO_LNS_ALLOW_MISMATCH", difference)
    trainer.restore(tmp_path / "step10-unsharded")
    assert trainer.loaded and f"although it differs ({difference})" in caplog.text


def test_folded_weights_run_only_as_preln_and_stay_folded_in_the_record(tmp_path, monkeypatch):
    """Without the record, ``export --unfold`` would take them for a model that never had LNS."""
    for name in ("folded", "stock"):
        save(tmp_path / name, "rms")
    folded = Record(parse("lns"), "rms", "plain", folded=True)
    folded.write(tmp_path / "folded")
    with pytest.raises(CheckpointMismatchError, match="applied twice"):
        Running("lns_rms").restore(tmp_path / "folded")
    running = Running("rms")
    for name, expected in (("folded", folded), ("stock", None)):
        running.restore(tmp_path / name)
        save_built(tmp_path / f"{name} again", running.model)
        assert Record.read(tmp_path / f"{name} again") == expected
    monkeypatch.setenv("OLMO_LNS_ALLOW_MISMATCH", "folded-to-lns")
    running = Running("lns_rms")
    running.restore(tmp_path / "folded")
    save_built(tmp_path / "applied twice", running.model)
    assert Record.read(tmp_path / "applied twice") == record_of(running.model)


def exchange(blocks):
    blocks[1], blocks[2] = blocks[2], blocks[1]


def stock_norm(name):
    return lambda blocks: setattr(blocks[2], name, RMSLayerNorm(blocks[2].config))


#: A change to the blocks of a built model, and the error that it causes.
TAMPERED = {
    "exchanged": (exchange, "block 2 was built as block 3"),
    "factor": (
        lambda blocks: setattr(blocks[2].ff_norm, "lns_scale", 0.9),
        r"ff_norm .block 3, ff. has norm_scale=0\.9 instead of 0\.57735",
    ),
    "class": (
        lambda blocks: setattr(blocks[2].ff_norm, "__class__", RMSLayerNorm),
        r"ff_norm .block 3, ff. has norm_scale=1\.0 instead of 0\.57735",
    ),
    "stock norm": (stock_norm("ff_norm"), "lns is on 7 sub-layers .*expected the 8 sub-layers of 4 blocks"),
    "sandwich_depth": (stock_norm("ff_norm_out"), "block 3, .*branch_scale=1.0 instead of 0.57"),
    "groupln": (stock_norm("attn_norm"), "block 3, .*groups=1 instead of 8"),
    "copy of another": (
        lambda blocks: setattr(blocks[2], "ff_norm", copy.deepcopy(blocks[1].ff_norm)),
        r"\(2, 'ff'\), \(3, 'attn'\), \(2, 'ff'\).*expected the 8 sub-layers",
    ),
    "initialization": (
        lambda blocks: setattr(blocks[2], "lns_initialization", "scaled"),
        "one model with the initializations plain, scaled",
    ),
}


@pytest.mark.parametrize("name", TAMPERED)
def test_a_model_that_was_changed_after_building_is_neither_resumed_nor_saved(tmp_path, name):
    kind = f"{name}_rms" if name in names() else "lns_rms"
    save(tmp_path / "step10-unsharded", kind)
    running, (tamper, message) = Running(kind), TAMPERED[name]
    tamper(running.model.transformer.blocks)
    with pytest.raises(UpstreamChangedError, match=message):
        running.restore(tmp_path / "step10-unsharded")
    assert not running.loaded
    with pytest.raises(UpstreamChangedError, match=message):
        save_built(tmp_path / "saved", running.model)
    assert not (tmp_path / "saved").exists()


def test_the_mark_is_compared_where_config_and_record_are_lost(tmp_path, monkeypatch):
    """Somebody copied only the ``*.pt`` files of the checkpoint."""
    model = build(layer_norm_type="lns_rms")
    trainer = Trainer.__new__(Trainer)
    trainer.model = model
    state = wrap_trainer_state(lambda self: {})(trainer)
    save_built(tmp_path / "a", model, **state)
    for name in ("config.yaml", RECORD_FILE):
        (tmp_path / "a" / name).unlink()
    with pytest.raises(CheckpointMismatchError, match="without the scheme it was trained with"):
        Running("rms").restore(tmp_path / "a")
    with pytest.raises(CheckpointMismatchError, match=r"neither config\.yaml nor lns\.json.*unknown.*missing-record"):
        Running("lns_rms").restore(tmp_path / "a")
    monkeypatch.setenv("OLMO_LNS_ALLOW_MISMATCH", "missing-record")
    running = Running("lns_rms")
    running.restore(tmp_path / "a")
    assert running.loaded


def test_a_checkpoint_without_its_record_has_the_scheme_of_its_config(tmp_path):
    for kind, init_fn, expected in (
        ("lns_default:exponent=0.25", "normal", Record(parse("lns:exponent=0.25"), "default", "plain")),
        ("lns_rms", "normal_scaled", Record(parse("lns"), "rms", "scaled")),
        ("rms", "normal_depth_scaled", Record(scaled_init="depth_scaled")),
        ("rms", "normal", Record()),
    ):
        folder = tmp_path / f"{kind}-{init_fn}"
        save(folder, kind, init_fn=init_fn)
        (folder / RECORD_FILE).unlink(missing_ok=True)
        assert saved_record(folder) == expected


def test_an_unreadable_record_is_a_warning_for_stock_and_an_error_under_a_scheme(tmp_path, monkeypatch, caplog):
    """The store answers 403, as some stores do for a file that does not exist."""

    def resource(folder, name, **_):
        if name == RECORD_FILE:
            raise OSError("403")
        (tmp_path / name).write_text(f"model:\n  layer_norm_type: {folder.removeprefix('s3://')}\n")
        return tmp_path / name

    monkeypatch.setattr(olmo.util, "resource_path", resource)
    assert saved_record("s3://rms") == Record()
    assert "lns.json cannot be read" in caplog.text and "403" in caplog.text
    with pytest.raises(CheckpointMismatchError, match=r"lns\.json cannot be read: .*403"):
        saved_record("s3://lns_rms")


STOCK_KEYS = [name for name in names() if name != "preln" and parse(name).stock_keys(TINY["n_layers"])]
assert {"lns", "postln", "mixln", "deepnorm"} < set(STOCK_KEYS)


@pytest.mark.parametrize("trained", STOCK_KEYS)
def test_weights_with_names_and_shapes_of_pre_ln_run_only_under_their_own_scheme(trained, tmp_path):
    folder, stock = tmp_path / "step1-unsharded", build(layer_norm_type="rms")
    model = save(folder, f"{trained}_rms")
    shapes = [{key: value.shape for key, value in each.state_dict().items()} for each in (model, stock)]
    assert shapes[0] == shapes[1], "other keys or shapes than Pre-LN: this scheme is not one of STOCK_KEYS"
    check_checkpoint(folder, record_of(model))
    # Somebody may change the config so that stock OLMo opens it; the record still names the scheme.
    text = (folder / "config.yaml").read_text()
    for written in (text, text.replace(f"{trained}_rms", "rms")):
        (folder / "config.yaml").write_text(written)
        for running in {"lnsstart" if trained == "lns" else "lns", "preln"}:
            with pytest.raises(CheckpointMismatchError, match=f"was saved with {trained}"):
                check_checkpoint(folder, replace(LNS, scheme=parse(running)))
        for keeps_gains in (True, False):  # hf_olmo's converter does; OLMo's script and transformers' copy do not
            with pytest.raises(CheckpointMismatchError, match=f"was saved with {trained}"):
                guards.check_conversion(folder, keeps_gains=keeps_gains)


# The mark in the trainer's state: an OLMo without the plugin cannot resume what was trained under a scheme

#: Runs OLMo's Trainer on a CPU. With OLMO_LNS_DISABLE=1 that is stock OLMo.
STOCK = """
import sys
from olmo.config import TrainConfig
from olmo.util import clean_opt, prepare_cli_environment
from olmo_lns.runs.train import prepare
from olmo_lns.processes import process_group
prepare_cli_environment()
config = TrainConfig.load(sys.argv[1], [clean_opt(text) for text in sys.argv[2:]])
with process_group() as device:
    prepare(config, device)
    from olmo_lns.runs.trainer import run
    run(config, device)
"""


def config_file(folder, **changes):
    values = {"max_duration": 4, "stop_at": None, "save_interval": 2, "no_pre_train_checkpoint": True}
    return write_config(folder, **(values | {"model.layer_norm_type": "rms"} | changes))


def train(folder, *overrides):
    """Train in this process, with the plugin."""
    config = load_config(config_file(folder), overrides)
    with process_group() as device:
        prepare(config, device)
        run(config, device)


def stock(folder, *overrides):
    command = [sys.executable, "-c", STOCK, config_file(folder), *overrides]
    return launch(command, cwd=folder, env=environment(OLMO_LNS_DISABLE="1"))


@pytest.fixture(scope="module")
def lns(tmp_path_factory):
    """A checkpoint of an LNS run after two steps."""
    folder = tmp_path_factory.mktemp("lns")
    train(folder, "--model.layer_norm_type=lns", "--max_duration=2")
    return folder / "run" / "step2-unsharded"


@pytest.mark.slow
def test_without_the_plugin_an_lns_checkpoint_is_not_resumed_as_preln(lns, tmp_path):
    """tests/runs/test_train.py resumes with the plugin and the flag."""
    result = stock(tmp_path, f"--load_path={lns}")
    assert result.code != 0 and not result.losses()
    assert REFUSED in result.text and "unset OLMO_LNS_DISABLE" in result.text


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_folded_export_is_resumed_by_stock_olmo_and_an_unfolded_one_is_not(lns, tmp_path):
    folded, again = tmp_path / "folded-unsharded", tmp_path / "again-unsharded"
    assert cli.main(["export", str(lns), str(folded)]) == 0
    resumed = stock(tmp_path / "stock", f"--load_path={folded}", "--reset_optimizer_state=true").ok()
    assert len(resumed.losses()) == 2, "the trainer's state was not restored"
    assert cli.main(["export", str(folded), str(again), "--unfold", "--drop-optimizer"]) == 0
    load = (f"--load_path={again}", "--reset_optimizer_state=true")
    refused = stock(tmp_path / "refused", *load)
    assert refused.code != 0 and REFUSED in refused.text
    train(tmp_path / "accepted", *load, "--model.layer_norm_type=lns")
    train(tmp_path / "more", f"--load_path={folded}", "--reset_optimizer_state=true")
    unfolded = tmp_path / "unfolded-unsharded"
    assert cli.main(["export", str(tmp_path / "more" / "run" / "step4-unsharded"), str(unfolded), "--unfold"]) == 0


@pytest.mark.slow
def test_stock_checkpoints_have_no_mark_and_marking_them_as_stock_changes_no_bit(tmp_path):
    train(tmp_path, "--max_duration=2")
    path = tmp_path / "run" / "step2-unsharded" / "train.pt"
    with zipfile.ZipFile(path) as archive:
        assert not any(b"olmo_lns" in archive.read(name) for name in archive.namelist())
    before = path.read_bytes()
    mark(path, Record())
    assert path.read_bytes() == before


def test_the_mark_can_be_removed_added_and_saved_again(tmp_path):
    path = tmp_path / "train.pt"
    path.write_bytes(b"opaque")
    with pytest.raises(LNSConfigError, match=r"train\.pt is truncated or not a file of torch\.save"):
        mark(path, LNS)
    shared = ["a", Path("olmo_lns")]  # objects that refer to each other
    torch.save({"first": shared, "again": shared, "rng": torch.arange(3), KEY: Mark(str(LNS))}, path)
    torch.save(torch.load(path, weights_only=False), path)  # OLMo's ``unshard.py`` does so
    for record in (LNS, Record(), LNS, LNS, Record(), LNS):
        mark(path, record)
        found = torch.load(path, weights_only=False)
        assert (KEY in found) == record.active and (not record.active or found[KEY].record == str(LNS))
        assert found["first"] == shared and found["first"] is found["again"]
        assert torch.equal(found["rng"], torch.arange(3))
    with zipfile.ZipFile(path) as archive:
        pickled = archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))
    functions = [value for code, value, _ in pickletools.genops(pickled) if code.name == "GLOBAL"]
    assert "olmo_lns.integrations.olmo.state needs_olmo_lns" in functions, "checkpoints hold this name for good"
