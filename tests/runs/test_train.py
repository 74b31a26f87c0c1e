"""``olmo-lns train`` runs the Trainer of the pip package, here on a CPU; a resumed run is the same to the bit."""

import os
import shutil
import signal
import sys

import numpy as np
import pytest
import torch
from support.launch import environment, torchrun, write_config

from olmo_lns import cli
from olmo_lns.arguments import process_group
from olmo_lns.errors import CheckpointMismatchError, LNSConfigError, LNSError
from olmo_lns.record import Record
from olmo_lns.runs.train import load_config, prepare
from olmo_lns.runs.trainer import LocalTrainer, RunResult, run
from olmo_lns.schemes import parse

DURATION = 6
LNS = Record(parse("lns"), "rms", "plain")
MONITOR = "lns_variance.csv"


class Watcher:
    """Keeps the loss of each step, and sends this process a SIGINT at step ``signal_at``."""

    def __init__(self, signal_at=None):
        self.losses = {}
        self.signal_at = signal_at
        self.first = -1

    def watch(self, patched):
        step = LocalTrainer.train_step

        def train_step(trainer, *args, **kwargs):
            self.first = trainer.global_step - 1 if self.first < 0 else self.first
            metrics = step(trainer, *args, **kwargs)
            self.losses[trainer.global_step] = trainer.cur_train_loss
            if trainer.global_step == self.signal_at:
                os.kill(os.getpid(), signal.SIGINT)
            return metrics

        patched.setattr(LocalTrainer, "train_step", train_step)


def config_file(folder, **changes):
    defaults = {"max_duration": DURATION, "stop_at": None, "save_overwrite": False, "save_interval": 2}
    defaults |= {"no_pre_train_checkpoint": True, "model.layer_norm_type": "lns_rms"}
    return write_config(folder, **(defaults | changes))


def train(folder, *overrides, watcher=None, **changes):
    watcher = watcher or Watcher()
    config = load_config(config_file(folder, **changes), overrides)
    with process_group() as device, pytest.MonkeyPatch.context() as patched:
        watcher.watch(patched)
        prepare(config, device)
        return run(config, device), watcher


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    result, watcher = train(folder)
    assert result == RunResult(step=DURATION, complete=True)
    assert list(watcher.losses) == list(range(1, DURATION + 1)) and watcher.losses[DURATION] < watcher.losses[1]
    assert Record.read(folder / "run" / "step6-unsharded") == LNS
    return folder, watcher


def model_state(folder, step):
    return torch.load(folder / "run" / f"step{step}-unsharded" / "model.pt", weights_only=True)


def test_a_stopped_and_resumed_run_equals_the_uninterrupted_one(uninterrupted, tmp_path):
    whole_folder, whole = uninterrupted
    first, before = train(tmp_path, "--stop_after=3")
    assert first.step == 3
    second, after = train(tmp_path, "--try_load_latest_save")
    assert (second, after.first) == (RunResult(step=DURATION, complete=True), 3)
    assert before.losses | after.losses == whole.losses
    expected = model_state(whole_folder, DURATION)
    for name, value in model_state(tmp_path, DURATION).items():
        assert torch.equal(value, expected[name]), name


def test_ctrl_c_saves_a_checkpoint_and_the_run_goes_on_from_it(uninterrupted, tmp_path):
    handler = signal.getsignal(signal.SIGINT)
    stopped, before = train(tmp_path, watcher=Watcher(signal_at=3))
    assert stopped == RunResult(step=3, complete=False)
    assert (tmp_path / "run" / "step3-unsharded" / "model.pt").is_file()
    assert signal.getsignal(signal.SIGINT) is handler
    result, after = train(tmp_path, "--try_load_latest_save")
    assert result.complete
    assert before.losses | after.losses == uninterrupted[1].losses


def test_a_run_resumes_though_its_load_path_is_gone(uninterrupted, tmp_path):
    """A resumed run saves the ``load_path`` that it started from, and pruning may remove that checkpoint."""
    shutil.copytree(uninterrupted[0] / "run", tmp_path / "run", symlinks=True)
    result, watcher = train(tmp_path, "--load_path=/nowhere/step3", "--try_load_latest_save", "--max_duration=7")
    assert result.complete and min(watcher.losses) == DURATION + 1


def test_a_finished_run_is_neither_trained_further_nor_resumed_without_the_factor(uninterrupted):
    folder, _ = uninterrupted
    before = (folder / "run" / "step6-unsharded" / "model.pt").read_bytes()
    result, watcher = train(folder, "--try_load_latest_save")
    assert result == RunResult(step=DURATION, complete=True) and not watcher.losses
    with pytest.raises(CheckpointMismatchError, match=r"saved with lns:exponent=0.5 over rms .* this run has Pre-LN"):
        train(folder, "--try_load_latest_save", "--max_duration=8", "--model.layer_norm_type=rms")
    assert (folder / "run" / "step6-unsharded" / "model.pt").read_bytes() == before


@pytest.mark.parametrize(
    ("size", "changes", "words"),
    [
        (0, {}, "damaged or of another model: (EOFError|Ran out of input)"),
        (3000, {}, "damaged or of another model: .*(archive|Stream)"),
        (None, {"model.d_model": 64}, r"another model: .*loading state_dict.* size mismatch for .* \(and \d+ more\)$"),
        (None, {"model.n_layers": 3}, r"another model: .*loading state_dict.*: (Unexpected|Missing) key"),
    ],
    ids=["empty", "cut", "width", "layers"],
)
def test_weights_that_cannot_be_restored_give_a_one_line_error(size, changes, words, uninterrupted, tmp_path):
    shutil.copytree(uninterrupted[0] / "run", tmp_path / "run")
    weights = tmp_path / "run" / "step6-unsharded" / "model.pt"
    if size is not None:
        weights.write_bytes(weights.read_bytes()[:size])
    with pytest.raises(LNSError, match=words) as error:
        train(tmp_path, "--try_load_latest_save", "--max_duration=8", **changes)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("--model.layer_norm_type=lsn", "unknown layer_norm_type 'lsn' (did you mean 'lns'?)"),
        ("--model.norm_after=true", "norm_after"),
        ("--max_duration=0", "max_duration: expected steps, tokens ('20e9T') or epochs ('1ep') above 0, got 0"),
        ("--data.paths=[/nowhere/a.npy]", "data.paths: no such file: /nowhere/a.npy"),
        ("--data.paths=null", "data: no data: set paths"),
        ("--global_train_batch_size=400", "data.paths: 256 sequences of 32 tokens, fewer than a batch of 400"),
        ("--steps=0", "steps: Key 'steps' not in 'TrainConfig'"),
        ("--data.paths=${oc.env:LNS_TEST_DATA}/x.npy", "environment variable LNS_TEST_DATA is not set: export LNS_"),
        ("--precision=fp8", "precision 'fp8': expected amp_bf16, amp_fp16 or fp32"),
        ("--model.n_heads=3", "model.n_heads: expected a divisor of d_model"),
        ("--load_path=.", "load_path: . has no config.yaml, as every checkpoint of OLMo has: name a checkpoint folder"),
        ("--distributed_strategy=fsdp --save_interval_unsharded=2", "fsdp on CPU cannot save unsharded"),
    ],
)
def test_a_wrong_setting_gives_a_one_line_error(override, expected, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("olmo.util.prepare_cli_environment", lambda: None)  # it takes over logging for good
    assert expected in refusal(capsys, config_file(tmp_path), *override.split(" "))
    assert not (tmp_path / "run").exists()


def refusal(capsys, *words):
    assert cli.main(["train", *map(str, words)]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and err.startswith("olmo-lns train: ")
    return err


def test_a_used_save_folder_is_refused_with_the_options_that_help(uninterrupted, monkeypatch, capsys):
    monkeypatch.setattr("olmo.util.prepare_cli_environment", lambda: None)
    err = refusal(capsys, config_file(uninterrupted[0]))
    for part in (str(uninterrupted[0] / "run"), "--try_load_latest_save", "--save_overwrite", "--save_folder"):
        assert part in err
    assert "60M-lsn: no such file, and none of the pack (did you mean '60M-lns'?)" in refusal(capsys, "60M-lsn")


@pytest.mark.parametrize(("stop_at", "said"), [(1, True), (3, True), (2, False)])
def test_stop_at_ends_the_run_and_is_logged_where_it_is_not_max_duration(stop_at, said, tmp_path, caplog):
    result, _ = train(tmp_path, max_duration=2, stop_at=stop_at, save_interval=None)
    assert result == RunResult(step=stop_at or 2, complete=True)
    lines = [record.getMessage() for record in caplog.records if "stop_at" in record.getMessage()]
    assert len(lines) == said
    assert not said or lines[0].startswith(f"stop_at={stop_at}, not max_duration (step 2), ends this run")


@pytest.mark.slow
def test_two_ranks_train_and_save_and_one_process_goes_on(uninterrupted, tmp_path, monkeypatch):
    """The monitor pools both ranks. Their mean loss differs from the loss of one process by rounding alone."""
    folder, alone = tmp_path / "two", tmp_path / "one"
    command = ["-m", "olmo_lns", "train", config_file(folder), "--distributed_strategy=ddp", "--stop_after=3"]
    first = torchrun(sys.executable, 2, *command, cwd=folder, env=environment(OLMO_LNS_MONITOR="every=1")).ok()
    two = np.genfromtxt(folder / "run" / MONITOR, delimiter=",", names=True)
    _, second = train(folder, "--try_load_latest_save")
    losses = first.losses() + list(second.losses.values())
    assert losses == pytest.approx(list(uninterrupted[1].losses.values()), abs=2e-3)
    monkeypatch.setenv("OLMO_LNS_MONITOR", "every=1")
    train(alone, "--stop_after=3")
    one = np.genfromtxt(alone / "run" / MONITOR, delimiter=",", names=True)
    assert len(one) == len(two) == 3 * 4 and set(two["tokens"]) == {128.0}
    for name in one.dtype.names:
        np.testing.assert_allclose(two[name], one[name], rtol=1e-3, err_msg=name)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_two_fsdp_ranks_train_and_save_and_refuse_to_resume(uninterrupted, tmp_path):
    """ai2-olmo 0.6.0 cannot read its own sharded checkpoints under the torch of the suite."""
    config = config_file(tmp_path, activation_checkpointing="whole_layer")
    command = ["-m", "olmo_lns", "train", config, "--distributed_strategy=fsdp", "--fsdp.precision=null"]
    command += ["--sharded_checkpointer=torch_new"]
    env = environment(OLMO_LNS_MONITOR="every=2")
    first = torchrun(sys.executable, 2, *command, "--stop_after=3", cwd=tmp_path, env=env).ok()
    rows = np.genfromtxt(tmp_path / "run" / MONITOR, delimiter=",", names=True)
    assert list(rows["tokens"]) == [128.0] * 4, "the monitor finds the blocks under FSDP and pools the ranks"
    # FSDP draws the weights shard by shard from another random stream: the losses are close, not equal.
    assert first.losses() == pytest.approx(list(uninterrupted[1].losses.values())[:3], abs=0.2)
    second = torchrun(sys.executable, 2, *command, "--try_load_latest_save", cwd=tmp_path)
    assert second.code != 0
    assert "this OLMo cannot read sharded checkpoints under torch" in second.text


def test_a_token_outside_the_vocabulary_is_named(tmp_path):
    from olmo_lns.runs.train import _one_line_errors

    sizes = {"model.vocab_size": 8, "model.embedding_size": 8, "model.eos_token_id": 0, "model.pad_token_id": 0}
    with pytest.raises(LNSConfigError, match=r"a token id outside model\.vocab_size"), _one_line_errors():
        train(tmp_path, **sizes)
