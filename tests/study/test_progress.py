"""The checks before a launch, the cause that it gives for a failure, and ``study status``."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.studies import REPOSITORY, olmo_log

from olmo_lns.errors import LNSConfigError
from olmo_lns.study import cli
from olmo_lns.study.launch import slurm
from olmo_lns.study.launch import start as launch
from olmo_lns.study.launch.start import only_one
from olmo_lns.study.plan.spec import Study


def test_the_cause_of_a_failure_is_the_error_of_the_script_and_not_that_of_torchrun(tmp_path):
    """A real torchrun with two processes writes the log."""
    script, log = tmp_path / "script.py", tmp_path / "attempt-01.log"
    body = "import os\nif os.environ['RANK'] == '1':\n    raise ValueError('vocab_size 7: expected 50280')\n"
    script.write_text(body)
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", str(script)]
    with log.open("wb") as file:
        assert subprocess.run(words, stdout=file, stderr=subprocess.STDOUT).returncode
    assert "ChildFailedError" in log.read_text()
    assert launch.cause(log) == "ValueError: vocab_size 7: expected 50280"


@pytest.mark.parametrize("value", [None, ""])
def test_a_launch_stops_before_the_first_run_if_a_variable_is_not_set(built, monkeypatch, value):
    monkeypatch.delenv("OLMO_DATA_DIR") if value is None else monkeypatch.setenv("OLMO_DATA_DIR", value)
    with pytest.raises(LNSConfigError, match=r"reads OLMO_DATA_DIR, which is not set: export OLMO_DATA_DIR="):
        cli.main(["launch", str(built.path), "--out", str(built.out), "--run"])
    assert not built.out.exists()


def test_paths_in_slurm_scripts_are_absolute_and_out_is_created(built, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    built.description["config"] = "../" * len(tmp_path.parts[1:]) + built.description["config"].lstrip("/")
    built.save()
    study = Study.load("study.yaml")
    (script, _) = slurm.write(study, study.runs, Path("runs"), Path("jobs"), job=slurm.Job(modules=("cuda", "nccl")))
    text = script.read_text()
    assert (tmp_path / "runs").is_dir() and "module load cuda nccl || exit 1" in text
    assert f"{REPOSITORY}/configs/study/tiny-base.yaml" in text and "../" not in text
    with pytest.raises(LNSConfigError, match="--activate nowhere: .*nowhere does not exist"):
        slurm.Job(activate="nowhere").lines()


def test_status_shows_the_step_of_each_run_and_the_cause_of_a_failure(built, capsys):
    names = [run.name for run in built.study.runs]
    for name, steps, end in ((names[0], 20, 0), (names[1], 7, 1), (names[2], 5, None)):
        folder = built.out / name
        folder.mkdir(parents=True)
        log = folder / "attempt-01.log"
        known = {"started": time.time() - 60} | ({} if end is None else {"exit": end, "wall_s": 1.0, "cpu_s": 1.0})
        log.with_suffix(".json").write_text(json.dumps(known))
        text = olmo_log({step: 3.0 for step in range(1, steps + 1)}, total=20)
        log.write_text(text + ("Traceback (most recent call last):\nValueError: a bad shard\n" if end else ""))
    with only_one(built.out):
        assert cli.main(["status", str(built.path), "--out", str(built.out)]) == 1
        out = capsys.readouterr().out
        line = launch.line(built.study.runs, built.out)
    lines = out.splitlines()
    assert "finished    step 20 of 20" in lines[0]
    assert "failed      step 7 of 20: exit 1: ValueError: a bad shard" in lines[1]
    assert "running     step 5 of 20, about " in lines[2] and "not started" in lines[3]
    assert lines[-1] == f"1 finished, 1 failed, 1 running, {len(names) - 3} not started"
    assert line.startswith(f"[1 of {len(names)} finished] {names[2]} 5/20 (") and line.endswith(" left)")
