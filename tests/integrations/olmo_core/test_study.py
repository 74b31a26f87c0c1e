"""A study in OLMo-core: its commands, the logs that it reads, and a real one on the CPU."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("olmo_core.nn", reason="needs ai2-olmo-core 2.5 to 3.0 (make test-olmo-core)")

import yaml

from olmo_lns.errors import LNSConfigError
from olmo_lns.study.collect import collect, read_results
from olmo_lns.study.describe import Study
from olmo_lns.study.logs import read_curve

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
LOG = """\
2026-11-22 01:44:42.964\tvm:0\tolmo_core.train.callbacks.console_logger:71\tINFO\t[step=1/3,epoch=1]
    train/CE loss=5.979
    train/PPL=395.1
2026-11-22 01:44:43.164\tvm:0\tolmo_core.train.callbacks.console_logger:61\tINFO\t[step=3/3,epoch=1]
2026-11-22 01:44:43.164\tvm:0\tolmo_core.train.callbacks.console_logger:71\tINFO\t[step=2/3,epoch=1,eta=1m, 2s]
    train/CE loss=5.956
2026-11-22 01:44:43.164\tvm:0\tolmo_core.train.callbacks.console_logger:71\tINFO\t[step=3/3,epoch=1]
    train/CE loss=1,005.9
"""


def test_losses_are_read_from_a_log_that_prints_them_after_their_step(tmp_path):
    log = tmp_path / "a.log"
    log.write_text(LOG)
    curve = read_curve(tmp_path)
    assert curve.losses == {1: 5.979, 2: 5.956, 3: 1005.9} and curve.total_steps == 3
    log.write_text(LOG[: LOG.index("    train/CE loss=5.956")])  # as a kill leaves it
    assert read_curve(tmp_path).losses == {1: 5.979}


@pytest.fixture
def micro(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    description = yaml.safe_load((CONFIGS / "study" / "tiny-olmo-core.yaml").read_text())
    size = {"model.n_layers": 2, "model.d_model": 32, "model.block.sequence_mixer.n_heads": 2}
    size |= {"trainer.max_duration.value": 60, "train_module.scheduler.warmup": 2}
    size |= {"trainer.callbacks.checkpointer.save_interval": 5}
    description |= {"config": str(CONFIGS / "study" / "tiny-olmo-core-base.yaml"), "sizes": {"s": size}}
    description |= {"arms": ["preln", "lns"], "seeds": [1], "final_fraction": 0.5}
    description["launch"] |= {"command": str(CONFIGS / "olmo_core" / "train.py")}
    path = tmp_path / "micro.yaml"
    path.write_text(yaml.safe_dump(description))
    return path


@pytest.mark.slow
def test_a_killed_study_goes_on_and_is_reported(micro, tmp_path):
    out = tmp_path / "out"
    study = [sys.executable, "-m", "olmo_lns", "study"]
    command = [*study, "launch", str(micro), "--out", str(out), "--run"]
    process = subprocess.Popen(command, start_new_session=True)
    saved = out / "s-lns-s1" / "step5" / "config.json"
    deadline = time.monotonic() + 500
    while not saved.exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGTERM)
    process.wait()
    for words in (command, *([*study, word, str(micro), "--out", str(out)] for word in ("collect", "report"))):
        done = subprocess.run(words, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = {row.arm: row for row in read_results(out / "results.csv").itertuples()}
    assert {arm: (row.status, row.step, row.points) for arm, row in rows.items()} == dict.fromkeys(
        ("preln", "lns"), ("complete", 60, 30)
    )
    assert rows["lns"].loss != rows["preln"].loss
    assert rows["lns"].heldout and rows["preln"].heldout and rows["lns"].heldout != rows["preln"].heldout
    assert (out / "report" / "report.md").is_file()
    # The saved config shows what a run used: another exponent there is found, even if the log does not name it.
    config = out / "s-lns-s1" / "step60" / "config.json"
    text = json.loads(config.read_text())
    text["model"]["block"]["exponent"] = 0.25
    config.write_text(json.dumps(text))
    with pytest.raises(LNSConfigError, match="run s-lns-s1 is not its arm: model.block.scheme="):
        collect(Study.load(micro), out)
