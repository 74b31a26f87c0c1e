"""The monitor in OLMo's Trainer: its rows equal fp64, and the training is the same to the bit."""

import logging
import time
from types import SimpleNamespace

import numpy as np
import pandas
import pytest
import torch

pytest.importorskip("olmo", reason="needs ai2-olmo")

from support import launch, olmo_models
from support.olmo_models import reference_states
from support.training import train

from olmo_lns.diagnostics.monitor import COLUMNS, Monitor, parse_setting
from olmo_lns.errors import LNSConfigError


def read(path):
    return pandas.read_csv(path).to_dict("records")


VARIANTS = {
    "grouped": {"model.block_group_size": 2, "activation_checkpointing": "whole_layer"},
    "compiled": {"compile": {"mode": None, "backend": "eager"}, "activation_checkpointing": "one_in_two"},
    "preln": {"model.layer_norm_type": "rms"},
}


@pytest.mark.parametrize("variant", ["grouped", pytest.param("compiled", marks=pytest.mark.slow), "preln"])
def test_rows_equal_the_fp64_formula_and_training_is_the_same_to_the_bit(variant, tmp_path, monkeypatch):
    changes = {"model.layer_norm_type": "lns_rms", "no_pre_train_checkpoint": True, **VARIANTS[variant]}
    config = launch.write_config(tmp_path, **changes)
    monkeypatch.delenv("OLMO_LNS_MONITOR", raising=False)
    plain = train(config)
    monkeypatch.setenv("OLMO_LNS_MONITOR", "every=2")
    watched = train(config)
    assert watched.losses == plain.losses
    assert all(torch.equal(value, plain.before[4][1][name]) for name, value in watched.before[4][1].items())
    rows = read(tmp_path / "run" / "lns_variance.csv")
    assert [(row["step"], row["block"]) for row in rows] == [(s, b) for s in (2, 4) for b in (1, 2, 3, 4)]
    assert all(row["tokens"] == 4 * 32 for row in rows), "every micro-batch counts once"
    for step in (2, 4):
        batch, weights = watched.before[step]
        watched.model.load_state_dict(weights)
        states = reference_states(watched.model, batch, lns=variant != "preln")
        for row, state in zip([row for row in rows if row["step"] == step], states[1:], strict=True):
            expected = (state.var(-1).mean(), np.sqrt((state**2).mean()), np.abs(state).max())
            assert (row["variance"], row["rms"], row["max"]) == pytest.approx(expected, rel=1e-4)


class FakeTrainer(SimpleNamespace):
    """Has what the monitor reads of a Trainer, and a step that fails on demand."""

    def train_step(self, batch):
        self.model_forward(batch)
        if self.fail:
            raise ValueError("nan loss encountered")

    def model_forward(self, batch):
        return self.model(batch["input_ids"])

    def step(self, batch):
        self.global_step += 1
        return self.train_step(batch)


@pytest.fixture
def trainer():
    return FakeTrainer(model=olmo_models.build(n_layers=3), global_step=0, fail=False)


def test_no_block_is_observed_between_samples_or_after_a_failure(trainer, tmp_path):
    def observed():
        return sum("_compiled_call_impl" in vars(block) for block in trainer.model.transformer.blocks)

    Monitor(trainer, 3, tmp_path / "rows.csv")
    during = []
    trainer.model.transformer.ln_f.register_forward_hook(lambda *_: during.append(observed()))
    for _ in range(6):
        trainer.step({"input_ids": olmo_models.tokens(3)})
    assert during == [0, 0, 3, 0, 0, 3] and observed() == 0
    trainer.global_step, trainer.fail = 8, True
    with pytest.raises(ValueError, match="nan loss"):
        trainer.step({"input_ids": olmo_models.tokens(3)})
    assert observed() == 0 and {row["step"] for row in read(tmp_path / "rows.csv")} == {3, 6}


def test_padding_is_excluded_and_nan_is_written_and_logged_but_does_not_stop_training(trainer, tmp_path, caplog):
    Monitor(trainer, 1, tmp_path / "rows.csv")
    with torch.no_grad():
        trainer.model.transformer.blocks[1].attn_out.weight[0, 0] = float("nan")
    with caplog.at_level(logging.WARNING):
        trainer.step({"input_ids": olmo_models.tokens(3), "attention_mask": torch.ones(3, 12).tril()})
    rows = read(tmp_path / "rows.csv")
    assert [row["tokens"] for row in rows] == [6] * 3
    assert [bool(np.isfinite(row["variance"])) for row in rows] == [True, False, False]
    assert "Block 2 is the first block with an output that is not finite, at step 1" in caplog.text


def test_a_resumed_run_drops_only_the_rows_of_later_steps_and_no_other_file(tmp_path, trainer):
    path, head = tmp_path / "lns_variance.csv", ",".join(COLUMNS)
    path.write_text(f"{head}\n" + "".join(f"{step},1,0.5,0.7,2,10\n" for step in (5, 10, 15)))
    trainer.global_step = 10
    Monitor(trainer, 5, path)
    assert [row["step"] for row in read(path)] == [5, 10]
    path.write_text("a,b\n1,2\n")
    with pytest.raises(LNSConfigError, match="not a file of the monitor"):
        Monitor(trainer, 5, path)


@pytest.mark.parametrize(
    "end",
    [
        "2",
        "200,1,0.5,0.7,2,1",
        "200,1,0.5,0.7,2,10\n",
        "200,1,0.5,0.7,2,10\n200,2,0.5\n",
        "\0\0\0\n",
        "100,1,0.5,0.7100,1",
    ],
)
def test_a_resumed_run_drops_rows_and_samples_that_were_cut(tmp_path, trainer, end):
    """The last row, a last number, the last block, a row in the middle, a crash of the machine, two rows in one."""
    path, whole = tmp_path / "lns_variance.csv", [f"100,{block},0.5,0.7,2,10" for block in (1, 2)]
    path.write_text("\n".join([",".join(COLUMNS), *whole, end]))
    trainer.global_step = 300
    Monitor(trainer, 100, path)
    assert path.read_text().splitlines()[1:] == whole


def test_equal_rows_of_two_attempts_are_kept_once_and_in_order(tmp_path, trainer):
    """Two headers, Windows' line ends, a sample that was written twice, and one whose attempts wrote a block each."""
    path, head = tmp_path / "lns_variance.csv", ",".join(COLUMNS)
    rows = [f"{step},{block},0.5,0.7,2,10" for step in (100, 200) for block in (1, 2)]
    written = [head, *rows[2:], head, *rows[:2], "200,1,0.6,0.7,2,10", "200,2,0.6,0.7,2,10", "300,1,0.5,0.7,2,10", ""]
    path.write_text("\r\n".join(written))
    trainer.global_step = 300
    Monitor(trainer, 100, path)
    again = [row.replace("0.5", "0.6") for row in rows[2:]]
    assert path.read_text() == "\n".join([head, *rows[:2], *again, ""])


def test_a_long_file_is_resumed_in_linear_time(tmp_path, trainer):
    path, head = tmp_path / "lns_variance.csv", ",".join(COLUMNS)
    rows = [f"{step},{block},0.5,0.7,2,10" for step in range(1, 20_001) for block in (1, 2)]
    path.write_text("\n".join([head, *rows, *rows[10_000:], ""]))
    trainer.global_step, begun = 15_000, time.process_time()
    Monitor(trainer, 1, path)
    assert time.process_time() - begun < 2
    assert path.read_text() == "\n".join([head, *rows[:30_000], ""])


@pytest.mark.parametrize("content", ["", "\0" * 512, "step,blo"])
def test_a_file_that_a_crash_left_without_its_header_starts_anew(tmp_path, trainer, content):
    path = tmp_path / "lns_variance.csv"
    path.write_text(content)
    Monitor(trainer, 100, path)
    assert path.read_text() == ",".join(COLUMNS) + "\n"


def test_a_wrong_setting_is_refused():
    for bad in ("100", "every=0", "every=x", "evry=1", "every=5,path=x"):
        with pytest.raises(LNSConfigError, match=f"OLMO_LNS_MONITOR is '{bad}'. Expected every="):
            parse_setting(bad)
