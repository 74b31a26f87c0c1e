"""``olmo-lns train`` runs the Trainer of the pip package, here on a CPU; a resumed run is the same to the bit."""

import signal

import numpy as np
import pytest
import torch

pytest.importorskip("olmo", reason="needs ai2-olmo")

from support import forked, training
from support.launch import Result, environment, torchrun, write_config

from olmo_lns import cli
from olmo_lns.errors import CheckpointMismatchError, LNSConfigError

DURATION = 6
MONITOR = "lns_variance.csv"


def config_file(folder, **changes):
    defaults = {"max_duration": DURATION, "stop_at": None, "save_overwrite": False, "save_interval": 2}
    defaults |= {"no_pre_train_checkpoint": True, "model.layer_norm_type": "lns_rms"}
    return write_config(folder, **(defaults | changes))


def train(folder, *overrides, signal_at=None):
    """Train; return the result and the loss of each step."""
    done = training.train(config_file(folder), *overrides, signal_at=signal_at)
    return done.result, done.losses


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    result, losses = train(folder)
    assert result == (DURATION, True)
    assert list(losses) == list(range(1, DURATION + 1)) and losses[DURATION] < losses[1]
    return folder, losses


@pytest.mark.parametrize("how", ["stop_after", "ctrl-c"])
def test_a_stopped_and_resumed_run_equals_the_uninterrupted_one(how, uninterrupted, tmp_path):
    handler = signal.getsignal(signal.SIGINT)
    first, before = train(tmp_path, signal_at=3) if how == "ctrl-c" else train(tmp_path, "--stop_after=3")
    assert first == (3, how == "stop_after") and signal.getsignal(signal.SIGINT) is handler
    second, after = train(tmp_path, "--try_load_latest_save")
    assert second == (DURATION, True) and min(after) == 4
    assert before | after == uninterrupted[1]
    paths = [folder / "run" / f"step{DURATION}-unsharded" / "model.pt" for folder in (uninterrupted[0], tmp_path)]
    expected, found = (torch.load(path, weights_only=True) for path in paths)
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


def test_a_finished_run_is_neither_trained_further_nor_resumed_without_the_factor(uninterrupted):
    folder, _ = uninterrupted
    assert train(folder, "--try_load_latest_save") == ((DURATION, True), {})
    with pytest.raises(CheckpointMismatchError, match="this run has preln"):
        train(folder, "--try_load_latest_save", "--max_duration=8", "--model.layer_norm_type=rms")


def test_under_ddp_the_model_is_built_on_the_device(tmp_path):
    from olmo_lns.train import load_config, prepare

    cfg = load_config(config_file(tmp_path), ["--distributed_strategy=ddp", "--model.init_device=meta"])
    prepare(cfg, torch.device("cuda"))
    assert cfg.model.init_device == "cuda"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("--model.layer_norm_type=lsn", "did you mean 'lns'"),
        ("--steps=0", "Key 'steps' not in 'TrainConfig'"),
        ("--data.paths=[/nowhere/a.npy]", "/nowhere/a.npy"),
        ("--data.paths=${oc.env:LNS_TEST_DATA}/x.npy", "LNS_TEST_DATA"),
        ("--run_name=null", "run_name is not set"),
        ("", "already has a run. Add --try_load_latest_save to continue it"),
        ("megatron/60M-lns", "OLMo could not load megatron/60M-lns"),
    ],
)
def test_a_wrong_setting_gives_a_one_line_error(override, expected, tmp_path, uninterrupted, monkeypatch, capsys):
    monkeypatch.setattr("olmo_lns.train.prepare_cli_environment", lambda: None)  # it takes over logging for good
    config = config_file(tmp_path if override else uninterrupted[0])
    words = [override] if override.startswith("megatron") else [str(config), *override.split()]
    assert cli.main(["train", *words]) == 1
    err = capsys.readouterr().err
    assert expected in err and err.count("\n") == 1 and err.startswith("olmo-lns train: ")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_two_ranks_train_and_save_and_one_process_goes_on(uninterrupted, tmp_path, monkeypatch):
    """The monitor pools both ranks. Their mean loss differs from the loss of one process by rounding alone."""
    folder, alone = tmp_path / "two", tmp_path / "one"
    command = ["-m", "olmo_lns", "train", config_file(folder), "--distributed_strategy=ddp", "--stop_after=3"]
    done = forked.torchrun(2, *command, imports="olmo.train", cwd=folder, **environment(OLMO_LNS_MONITOR="every=1"))
    first = Result(done.returncode, done.stdout + done.stderr).ok()
    two = np.genfromtxt(folder / "run" / MONITOR, delimiter=",", names=True)
    _, second = train(folder, "--try_load_latest_save")
    assert first.losses() + list(second.values()) == pytest.approx(list(uninterrupted[1].values()), abs=2e-3)
    monkeypatch.setenv("OLMO_LNS_MONITOR", "every=1")
    train(alone, "--stop_after=3")
    one = np.genfromtxt(alone / "run" / MONITOR, delimiter=",", names=True)
    assert len(one) == len(two) == 3 * 4 and set(two["tokens"]) == {128.0}
    for name in one.dtype.names:
        np.testing.assert_allclose(two[name], one[name], rtol=1e-3, err_msg=name)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_two_fsdp_ranks_train_and_save_and_the_monitor_pools_them(uninterrupted, tmp_path):
    config = config_file(tmp_path, activation_checkpointing="whole_layer")
    command = ["-m", "olmo_lns", "train", config, "--distributed_strategy=fsdp", "--fsdp.precision=null"]
    command += ["--sharded_checkpointer=torch_new", "--stop_after=3"]
    first = torchrun(2, *command, cwd=tmp_path, env=environment(OLMO_LNS_MONITOR="every=2")).ok()
    rows = np.genfromtxt(tmp_path / "run" / MONITOR, delimiter=",", names=True)
    assert list(rows["tokens"]) == [128.0] * 4
    # FSDP draws the weights shard by shard from another random stream: the losses are close, not equal.
    assert first.losses() == pytest.approx(list(uninterrupted[1].values())[:3], abs=0.2)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--model.layer_norm_type", "lns"], "'lns' has no equals sign.* Type --model.layer_norm_type=lns"),
        (["--model.layer_norm_type"], "--model.layer_norm_type has no value. Type it with an equals sign"),
        (["--model.layer_norm_type=lsn"], r"unknown norm type \(did you mean 'lns'\?\). docs/schemes.md"),
        (["--max_duration=4", "7"], "'7' has no equals sign.* Type --KEY=7"),
    ],
)
def test_a_mistyped_override_is_named_with_the_right_spelling(tmp_path, overrides, message):
    from olmo_lns.train import load_config

    with pytest.raises(LNSConfigError, match=message):
        load_config(config_file(tmp_path), overrides)


def test_missing_data_of_a_pack_config_are_named_with_the_page_that_makes_them(tmp_path, monkeypatch):
    from olmo_lns.train import load_config

    monkeypatch.setenv("OLMO_SAVE_DIR", str(tmp_path))
    monkeypatch.delenv("OLMO_DATA_DIR", raising=False)
    with pytest.raises(LNSConfigError, match="'OLMO_DATA_DIR' not found.*docs/data.md has the commands"):
        load_config("60M-lns")
    monkeypatch.setenv("OLMO_DATA_DIR", str(tmp_path))
    (tmp_path / "a.npy").touch()
    with pytest.raises(LNSConfigError, match="heldout/.*does not match any files.*docs/data.md"):
        load_config("60M-lns")
