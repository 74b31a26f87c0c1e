import logging
from types import SimpleNamespace

import numpy as np
import pandas
import pytest
import torch
from support import launch
from support.diagnostic_models import Linear, Toy, ids, matrices, olmo_states

from olmo_lns import train
from olmo_lns.diagnostics.monitor import COLUMNS, Monitor, parse_setting, start_file
from olmo_lns.errors import LNSConfigError
from olmo_lns.processes import process_group


def run(config, steps=()):
    """Train, and return the trainer, {step: (its batch, the weights before it)} and the losses."""
    seen, losses, found = {}, [], []

    def watch(trainer):
        step_function = trainer.train_step

        def train_step(batch, **kwargs):
            if trainer.global_step in steps:
                weights = {k: v.clone() for k, v in trainer.model.state_dict().items()}
                seen[trainer.global_step] = (batch["input_ids"].clone(), weights)
            metrics = step_function(batch, **kwargs)
            losses.append(trainer.cur_train_loss)
            return metrics

        trainer.train_step = train_step
        found.append(trainer)

    cfg = train.load_config(str(config))
    with process_group() as device:
        train.prepare(cfg, device)
        fit = train.LocalTrainer.fit
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(train.LocalTrainer, "fit", lambda self: (watch(self), fit(self)))
            train.run(cfg, device)
    return found[0], seen, losses


def read(path):
    return pandas.read_csv(path).to_dict("records")


VARIANTS = {
    "grouped": {"model.block_group_size": 2, "activation_checkpointing": "whole_layer"},
    "compiled": {"compile": {"mode": None, "backend": "eager"}, "activation_checkpointing": "one_in_two"},
    "preln": {"model.layer_norm_type": "rms"},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_rows_of_the_monitor_equal_the_fp64_formula(variant, tmp_path, monkeypatch):
    monkeypatch.setenv("OLMO_LNS_MONITOR", "every=2")
    changes = {"model.layer_norm_type": "lns_rms", "no_pre_train_checkpoint": True, **VARIANTS[variant]}
    trainer, seen, _ = run(launch.write_config(tmp_path, **changes), (2, 4))
    rows = read(tmp_path / "run" / "lns_variance.csv")
    assert [(row["step"], row["block"]) for row in rows] == [(s, b) for s in (2, 4) for b in (1, 2, 3, 4)]
    assert all(row["tokens"] == 4 * 32 for row in rows), "every micro-batch counts once"
    for step, (batch, weights) in seen.items():
        trainer.model.load_state_dict(weights)
        states = olmo_states(trainer.model, batch, lns=variant != "preln")
        for row, state in zip([row for row in rows if row["step"] == step], states[1:], strict=True):
            assert row["variance"] == pytest.approx(state.var(-1).mean(), rel=1e-4)
            assert row["rms"] == pytest.approx(np.sqrt((state**2).mean()), rel=1e-4)
            assert row["max"] == pytest.approx(np.abs(state).max(), rel=1e-4)


def test_training_under_the_monitor_is_bit_for_bit_the_same(tmp_path, monkeypatch):
    config = launch.write_config(tmp_path, **{"model.layer_norm_type": "lns_rms", "no_pre_train_checkpoint": True})
    monkeypatch.delenv("OLMO_LNS_MONITOR", raising=False)
    plain, _, losses = run(config)
    monkeypatch.setenv("OLMO_LNS_MONITOR", f"every=1,path={tmp_path / 'rows.csv'}")
    watched, _, same = run(config)
    assert same == losses
    assert len(read(tmp_path / "rows.csv")) == 4 * 4
    for one, two in zip(plain.model.parameters(), watched.model.parameters(), strict=True):
        assert torch.equal(one, two)


class FakeTrainer(SimpleNamespace):
    """Has what the monitor reads of a Trainer, and a step that fails on demand."""

    def __init__(self, folder, model):
        super().__init__(model=model, global_step=0, cfg=SimpleNamespace(save_folder=str(folder)), fail=False)

    def train_step(self, batch):
        self.model_forward(batch)
        if self.fail:
            raise ValueError("nan loss encountered")
        return {"ok": 1}

    def model_forward(self, batch):
        return self.model(batch["input_ids"])

    def step(self, batch):
        self.global_step += 1
        return self.train_step(batch)


@pytest.fixture
def trainer(tmp_path):
    return FakeTrainer(tmp_path, Toy([Linear(m) for m in matrices(3)]))


def test_no_hook_is_left_between_samples_or_after_a_failure(trainer, tmp_path):
    monitor = Monitor(trainer, 3, tmp_path / "rows.csv")
    batch = {"input_ids": ids()}

    def hooks():
        return sum(len(block._forward_hooks) + len(block._forward_pre_hooks) for block in trainer.model.stack)

    during = []
    trainer.model.head.register_forward_hook(lambda *_: during.append(hooks()))
    for _ in range(6):
        assert trainer.step(batch) == {"ok": 1}
    assert during == [0, 0, 3, 0, 0, 3] and hooks() == 0
    trainer.global_step, trainer.fail = 8, True
    with pytest.raises(ValueError, match="nan loss"):
        trainer.step(batch)
    trainer.model_forward(batch)
    assert hooks() == 0 and {row["step"] for row in read(monitor.path)} == {3, 6}


def test_padding_is_excluded_and_nan_is_written_and_logged_but_does_not_stop_training(trainer, tmp_path, caplog):
    monitor = Monitor(trainer, 1, tmp_path / "rows.csv")
    with torch.no_grad():
        trainer.model.stack[1].proj[0, 0] = float("nan")
    with caplog.at_level(logging.WARNING):
        trainer.step({"input_ids": ids(), "attention_mask": torch.ones(3, 12).tril()})
    rows = read(monitor.path)
    assert [row["tokens"] for row in rows] == [6] * 3
    assert np.isfinite(rows[0]["variance"]) and np.isnan(rows[1]["variance"]) and np.isnan(rows[2]["variance"])
    assert "step 1: the output of block 2 is the first that is not finite" in caplog.text


def test_a_resumed_run_drops_only_the_rows_of_later_steps(tmp_path, trainer):
    path = tmp_path / "lns_variance.csv"
    path.write_text(",".join(COLUMNS) + "\n" + "".join(f"{s},1,0.5,0.7,2,10\n" for s in (5, 10, 15)))
    trainer.global_step = 10
    Monitor(trainer, 5, path)
    assert [row["step"] for row in read(path)] == [5, 10]


def test_a_file_of_something_else_is_refused_at_the_start(tmp_path):
    path = tmp_path / "rows.csv"
    for text in ("a,b\n1,2\n", f"{','.join(COLUMNS)}\nx,1\n"):
        path.write_text(text)
        with pytest.raises(LNSConfigError, match="not a file of the monitor"):
            start_file(path, 0)


def test_settings_of_the_monitor_are_parsed_or_refused():
    assert parse_setting("every=7") == (7, None)
    assert parse_setting(" every=5 , path=a/b.csv ") == (5, "a/b.csv")
    for bad in ("100", "every=0", "every=-1", "every=x", "every=", "every=1,every=2", "evry=1", "path="):
        with pytest.raises(LNSConfigError, match=f"OLMO_LNS_MONITOR={bad}: expected every="):
            parse_setting(bad)
