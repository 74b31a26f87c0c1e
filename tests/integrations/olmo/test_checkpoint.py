"""A checkpoint's config.yaml is its record: no resume loses the scheme, and nothing of ours is in the folder."""

import re

import pytest
import torch
from olmo.checkpoint import FullCheckpointer
from olmo.config import TrainConfig
from olmo.train import Trainer
from support.olmo_models import TINY, build, tokens
from torch.nn.parallel import DistributedDataParallel

import olmo_lns
from olmo_lns.errors import CheckpointMismatchError
from olmo_lns.integrations.olmo import register
from olmo_lns.processes import process_group
from olmo_lns.scaled import ScaledGainNorm

register()


@pytest.fixture(scope="module", autouse=True)
def one_process():
    """OLMo's checkpointers need a process group."""
    with process_group():
        yield


def save(folder, kind):
    """Build a model and save it, unsharded, with OLMo's own checkpointer."""
    model = build(layer_norm_type=kind)
    return save_model(folder, model)


def save_model(folder, model):
    config = TrainConfig.new(model=TINY, save_folder=str(folder.parent))
    config.model = model.config  # as in a launch: one object
    optimizer = torch.optim.AdamW(model.parameters())
    FullCheckpointer(config).save_checkpoint(folder, DistributedDataParallel(model), optimizer, {})
    return model


class Running(Trainer):
    """A Trainer with a model and no data."""

    def __init__(self, kind):
        self.cfg, self.model = TrainConfig.new(model=TINY), build(seed=7, layer_norm_type=kind)
        self.dist_model, self.optim = DistributedDataParallel(self.model), torch.optim.AdamW(self.model.parameters())
        self.before = self.model.transformer.wte.weight.clone()

    @property
    def loaded(self):
        return not torch.equal(self.before, self.model.transformer.wte.weight)

    def load_trainer_state_dict(self, state):
        pass


@pytest.mark.parametrize(
    ("saved", "running", "flag"),
    [
        ("lns_rms", "rms", "lns_rms"),
        ("rms", "lns_rms", "rms"),
        ("lns_rms", "lns_rms:exponent=0.4", "lns_rms"),
        ("lns_default", "lns_rms", "lns_default"),
        ("mixln_rms:alpha=0.5", "mixln_rms", "mixln_rms:alpha=0.5"),
    ],
)
def test_resuming_with_another_setting_is_refused(tmp_path, monkeypatch, caplog, saved, running, flag):
    folder = tmp_path / "step10-unsharded"
    save(folder, saved)
    trainer = Running(running)
    with pytest.raises(
        CheckpointMismatchError, match=rf"setting \(--model.layer_norm_type={flag}\)\. To load .*MISMATCH=1"
    ):
        trainer.restore_checkpoint(folder, load_optimizer_state=False)
    assert not trainer.loaded
    monkeypatch.setenv("OLMO_LNS_ALLOW_MISMATCH", "1")
    trainer.restore_checkpoint(folder, load_optimizer_state=False)
    assert trainer.loaded and "Loading it anyway" in caplog.text


@pytest.mark.parametrize(
    ("base", "scheme", "kind"),
    [
        ("rms", "lns:exponent=0.25", "lns_rms:exponent=0.25"),
        ("default", "lns", "lns_default"),
        ("low_precision", "lns:exponent=0.75", "lns_low_precision:exponent=0.75"),
    ],
)
def test_apply_in_a_loop_of_ones_own_is_named_in_the_saved_config_and_compared(base, scheme, kind, tmp_path):
    folder = tmp_path / "step1-unsharded"
    save_model(folder, olmo_lns.apply(build(layer_norm_type=base), scheme, trained=True))
    assert TrainConfig.load(str(folder / "config.yaml")).model.layer_norm_type == kind
    with pytest.raises(CheckpointMismatchError, match=rf"its config says {re.escape(scheme)}, but this run has preln"):
        Running(base).restore_checkpoint(folder, load_optimizer_state=False)
    (running := Running(kind)).restore_checkpoint(folder, load_optimizer_state=False)
    assert running.loaded


def test_apply_to_a_built_model_uses_olmos_arithmetic_as_the_flag_does():
    model = olmo_lns.apply(build(perturb=False, layer_norm_type="rms"), "lns")
    flag = build(perturb=False, layer_norm_type="lns_rms")
    blocks = zip(model.transformer.blocks, flag.transformer.blocks, strict=True)
    assert all(type(a.ff_norm) is type(b.ff_norm) and isinstance(a.ff_norm, ScaledGainNorm) for a, b in blocks)


def test_a_folded_model_and_its_config_are_stock(tmp_path):
    """Otherwise a model built from the saved config would apply the factor to weights that hold it."""
    model = build(layer_norm_type="lns_rms", init_fn="normal_scaled")
    save_model(tmp_path / "step1-unsharded", olmo_lns.fold(model, example=tokens()))
    (running := Running("rms")).restore_checkpoint(tmp_path / "step1-unsharded", load_optimizer_state=False)
    assert running.loaded and str(model.config.init_fn) == "normal"


def test_the_files_of_a_checkpoint_are_olmos_and_a_sharded_folder_is_compared_too(tmp_path):
    folder = tmp_path / "step10"
    save(folder, "lns_rms")
    assert sorted(p.name for p in folder.iterdir()) == ["config.yaml", "model.pt", "optim.pt", "train.pt"]
    assert b"olmo_lns" not in b"".join(path.read_bytes() for path in folder.glob("*.pt"))
    with pytest.raises(CheckpointMismatchError, match="lns_rms"):
        Running("rms").restore_checkpoint(folder)


def test_a_folder_without_config_is_refused_under_a_scheme_and_loaded_under_pre_ln(tmp_path, monkeypatch):
    folder = tmp_path / "step10-unsharded"
    save(folder, "lns_rms")
    (folder / "config.yaml").unlink()
    with pytest.raises(
        CheckpointMismatchError, match="no config was found beside its weights, so their scheme is not known"
    ):
        Running("lns_rms").restore_checkpoint(folder)
    for kind, allow in (("rms", ""), ("lns_rms", "1")):
        monkeypatch.setenv("OLMO_LNS_ALLOW_MISMATCH", allow)
        (trainer := Running(kind)).restore_checkpoint(folder, load_optimizer_state=False)
        assert trainer.loaded
