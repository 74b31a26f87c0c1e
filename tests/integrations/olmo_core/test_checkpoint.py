"""OLMo-core's own checkpointer under the guard: what is written, what is refused, what is let through."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("olmo_core.nn", reason="needs ai2-olmo-core 2.5 to 3.0 (make test-olmo-core)")

import torch
from olmo_core.distributed.checkpoint import load_model_and_optim_state, save_model_and_optim_state
from olmo_core.optim import AdamWConfig
from olmo_core.train.checkpoint import Checkpointer
from olmo_core.train.train_module import TransformerTrainModuleConfig
from support import olmo_core_models as small

from olmo_lns.errors import CheckpointMismatchError
from olmo_lns.integrations.olmo_core import register
from olmo_lns.integrations.olmo_core.record import from_config, record_of, saved_record
from olmo_lns.integrations.patching import is_patched
from olmo_lns.olmo_core import apply
from olmo_lns.record import Record
from olmo_lns.schemes import Scheme


def _train_module(made):
    settings = TransformerTrainModuleConfig(
        rank_microbatch_size=48, max_sequence_length=12, optim=AdamWConfig(lr=1e-3), z_loss_multiplier=None
    )
    return settings.build(made.build(init_device="meta"), device=torch.device("cpu"))


def _save(tmp_path, made, *, config=True, record=True):
    checkpointer, folder = Checkpointer(work_dir=tmp_path / "work"), tmp_path / "step1"
    checkpointer.save(folder, _train_module(made), {"step": 1})
    if config:  # as ConfigSaverCallback does after every save
        checkpointer.write_file(folder, "config.json", json.dumps({"model": made.as_config_dict()}))
    if not record:
        (folder / "lns.json").unlink(missing_ok=True)
    return checkpointer, folder


def test_guards_are_on_in_an_interpreter_nobody_told():
    for name in ("load", "save", "save_async", "_save_train_state"):
        assert is_patched(getattr(Checkpointer, name))
    register()  # idempotent


def test_record_lies_in_the_checkpoint_from_its_first_moment(tmp_path):
    made = apply(small.config(), exponent=0.25)
    _, folder = _save(tmp_path, made, config=False)
    assert Record.read(folder) == Record(Scheme.of("lns", exponent=0.25), "rms", "plain")
    assert Checkpointer.dir_is_checkpoint(folder)


def test_nothing_is_added_to_a_stock_checkpoint(tmp_path):
    _, folder = _save(tmp_path, small.config(), config=False)
    assert sorted(path.name for path in folder.iterdir()) == [".metadata.json", "model_and_optim", "train"]


@pytest.mark.parametrize("record", [True, False])
def test_resumed_without_the_flags_it_is_refused(tmp_path, record):
    checkpointer, folder = _save(tmp_path, apply(small.config()), record=record)
    with pytest.raises(CheckpointMismatchError, match="its blocks would run without the scheme it was trained with"):
        checkpointer.load(folder, _train_module(small.config()))
    checkpointer.load(folder, _train_module(apply(small.config())))


def test_stock_checkpoint_under_the_flags_is_refused_unless_it_is_allowed(tmp_path, monkeypatch):
    checkpointer, folder = _save(tmp_path, small.config())
    with pytest.raises(CheckpointMismatchError, match="preln-to-lns"):
        checkpointer.load(folder, _train_module(apply(small.config())))
    monkeypatch.setenv("OLMO_LNS_ALLOW_MISMATCH", "preln-to-lns")
    checkpointer.load(folder, _train_module(apply(small.config())))


def test_another_exponent_is_refused(tmp_path):
    checkpointer, folder = _save(tmp_path, apply(small.config()))
    with pytest.raises(CheckpointMismatchError, match="every block would run with another exponent"):
        checkpointer.load(folder, _train_module(apply(small.config(), exponent=0.25)))


def test_stock_resume_is_left_alone(tmp_path):
    checkpointer, folder = _save(tmp_path, small.config())
    assert checkpointer.load(folder, _train_module(small.config()))["step"] == 1


def test_weights_alone(tmp_path):
    _, folder = _save(tmp_path, apply(small.config()))
    with pytest.raises(CheckpointMismatchError, match="lns-to-preln"):
        load_model_and_optim_state(folder / "model_and_optim", small.config().build())
    model = apply(small.config()).build()
    load_model_and_optim_state(folder / "model_and_optim", model)
    save_model_and_optim_state(tmp_path / "plain", small.config().build())
    load_model_and_optim_state(tmp_path / "plain", small.config().build())


@pytest.mark.parametrize("block", small.SCHEMES)
def test_record_of_config_and_of_model_agree(block):
    made = small.with_scheme(small.config(block), exponent=0.25)
    expected = Record(Scheme.of(small.SCHEMES[block][0], exponent=0.25), "rms", "plain")
    assert from_config({"model": made.as_config_dict()}, source="x") == expected
    assert record_of(made.build(init_device="meta")) == expected


def test_record_of_overrides_that_have_lost_the_scheme():
    made = apply(small.config()).as_config_dict()
    made["block_overrides"] = {"1": small.config().block.as_config_dict()}
    with pytest.raises(CheckpointMismatchError, match="different schemes"):
        from_config(made, source="x")


def test_factors_of_one_sub_layer_that_disagree_are_found():
    built = small.with_scheme(small.config("moe_hybrid")).build(init_device="meta")
    built.blocks["1"].feed_forward_moe_norm.lns_scale = 1.0
    with pytest.raises(
        ImportError, match="block 1: feed_forward_norm and feed_forward_moe_norm have different factors"
    ):
        record_of(built)


def test_damaged_record_is_named(tmp_path):
    checkpointer, folder = _save(tmp_path, apply(small.config()))
    (folder / "lns.json").write_text("{")
    with pytest.raises(CheckpointMismatchError, match="lns.json: not valid JSON"):
        checkpointer.load(folder, _train_module(apply(small.config())))


def test_saved_record_of_a_folder_that_says_nothing(tmp_path):
    assert saved_record(tmp_path) == Record()


@pytest.mark.parametrize("block", ["reordered_norm", "default"])
def test_converter_that_would_drop_the_factor_is_stopped(block, tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    from olmo_core.nn.hf import save_hf_model

    made = small.config(block, qk_norm=True)
    built = small.model(small.with_scheme(made))
    with pytest.raises(CheckpointMismatchError, match="OLMo-core's converter drops the factor.*olmo-lns export"):
        save_hf_model(tmp_path / "hf", built.state_dict(), built)
    if block == "default":
        return  # which the converter refuses of itself
    stock = small.model(made)
    save_hf_model(tmp_path / "stock", stock.state_dict(), stock)
    monkeypatch.setenv("OLMO_LNS_ALLOW_MISMATCH", "branchln_depth-to-preln")
    save_hf_model(tmp_path / "hf", built.state_dict(), built)


def test_doctor_knows_the_integration(capsys):
    from olmo_lns.doctor import examine

    (row,) = [row for row in examine() if row.what == "OLMo-core"]
    assert row.state == "ok" and "olmo_lns.olmo_core.BlockConfig" in row.detail
