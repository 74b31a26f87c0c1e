"""Launching a study: commands, stamps, Slurm scripts, and a killed study that continues to the same losses."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time

import pytest
from support.studies import REPOSITORY

from olmo_lns.errors import LNSConfigError, LNSError
from olmo_lns.study import cli
from olmo_lns.study.collect import folder as logs
from olmo_lns.study.launch import slurm
from olmo_lns.study.launch import start as launch
from olmo_lns.study.launch.start import only_one
from olmo_lns.study.plan.spec import Study


def test_a_command_names_the_launcher_the_config_the_seed_and_the_folders(tmp_path, capsys):
    paper = Study.load(REPOSITORY / "configs" / "study" / "paper.yaml")
    words = launch.command(paper, paper.runs[2], tmp_path)
    assert paper.runs[2].name == "60M-lns-s6198"
    assert words[:6] == ["torchrun", "--nproc-per-node", "8", "--standalone", "-m", "olmo_lns"]
    assert words[6] == "train" and words[7].endswith("60M-lns.yaml")
    assert {"--seed=6198", f"--save_folder={tmp_path}/60M-lns-s6198", "--try_load_latest_save=true"} <= set(words)
    megatron = Study.load(REPOSITORY / "configs" / "study" / "paper-megatron.yaml")
    run = next(run for run in megatron.runs if run.name == "7B-lns-s6198")
    with pytest.raises(LNSConfigError, match="asks for 4 nodes: write Slurm scripts"):
        cli.main(["launch", "paper-megatron", "--out", str(tmp_path)])
    assert capsys.readouterr().out == ""  # all commands are printed, or none
    text = shlex.join(launch.command(megatron, run, tmp_path, slurm=True))
    assert "--nnodes 4" in text and "-m olmo_lns pretrain_gpt.py --lns-config" in text
    assert "7B-lns.yaml --seed 6198" in text  # TP 2 is in the file
    assert f"--load {tmp_path}/7B-lns-s6198 --tensorboard-dir {tmp_path}/7B-lns-s6198/tensorboard" in text


def test_a_plan_shows_data_command_cost_and_published_losses(capsys):
    pytest.importorskip("olmo", reason="needs ai2-olmo")
    pair = ["--only", "1B-preln-s6198", "1B-lns-s6198"]
    assert cli.main(["plan", "paper", *pair, "--gpus", "8", "--gpu", "H100", "--time", "12:00:00"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.split("All 2 runs")[0].splitlines())) <= 80
    said = " ".join(text.split())
    for part in (
        "1B 2 1.28B 20B 38,147 110 8 13.8 h 43 15.4 GB",
        "--time is 12:00:00: about 2 jobs one after the other",
        "data: 20B tokens in $OLMO_DATA_DIR; have none? olmo-lns data fetch dolma -o FOLDER",
        f"command: olmo-lns study launch paper --out RUNS {' '.join(pair)} --run, or --slurm JOBS",
        "1B: Pre-LN, OLMo's mitchell init 2.96, Pre-LN + LNS 2.85",
    ):
        assert part in said, part


@pytest.mark.slow
def test_an_array_task_of_a_slurm_script_starts_its_own_run(built, tmp_path):
    """bash executes the scripts with stand-ins for srun and torchrun; an array task stamps its run and starts it."""
    built.description["launch"] = {"nproc": 2, "nodes": {"b": 2}, "sbatch": {"time": "1:00:00"}}
    built.save()
    scripts = slurm.write(built.study, built.study.runs, built.out, tmp_path / "jobs", python=sys.executable)
    assert [path.name for path in scripts] == ["a.sbatch", "b.sbatch"]
    assert "#SBATCH --array=0-3" in scripts[0].read_text() and "#SBATCH --nodes=2" in scripts[1].read_text()
    fake = tmp_path / "bin"
    fake.mkdir()
    (fake / "srun").write_text('#!/bin/sh\nexec "$@"\n')
    (fake / "torchrun").write_text('#!/bin/sh\necho "torchrun $@"\n')
    for path in fake.iterdir():
        path.chmod(0o755)
    path_variable = f"{fake}:{os.environ['PATH']}"
    for script, task, name in ((scripts[0], "3", "a-lns-s2"), (scripts[1], "1", "b-lns-s1")):
        env = {**os.environ, "PATH": path_variable, "SLURM_ARRAY_TASK_ID": task, "SLURM_JOB_ID": "7"}
        env["SLURM_CPUS_ON_NODE"] = "1"
        subprocess.run(["bash", str(script)], env=env, check=True)
        log = (built.out / name / "attempt-01.log").read_text()
        assert f"--run_name={name}" in log and "--nproc-per-node 2" in log
        assert json.loads((built.out / name / "run.json").read_text())["name"] == name
    assert "--rdzv-id 7" in log and "--nnodes 2" in log
    assert sorted(path.name for path in built.out.iterdir()) == ["a-lns-s2", "b-lns-s1"]
    del env["OLMO_DATA_DIR"]
    refused = subprocess.run(["bash", str(scripts[0])], env=env, capture_output=True, text=True)
    assert refused.returncode != 0 and "OLMO_DATA_DIR" in refused.stderr


def test_a_folder_of_another_run_is_refused(built, tmp_path):
    run = built.study.runs[0]
    logs.stamp(built.study, run, built.out)
    logs.stamp(built.study, run, built.out)
    (tmp_path / "data" / "train.npy").write_bytes(b"\1\0" * 9)
    with pytest.raises(LNSConfigError, match="was started with other data"):
        logs.stamp(built.study, run, built.out)
    built.description["sizes"]["a"]["max_duration"] = 21
    built.save()
    with pytest.raises(LNSConfigError, match="was started with other settings: max_duration: 20 then, 21 now"):
        logs.stamp(built.study, built.study.runs[0], built.out)


def test_a_missing_data_file_is_named(built, tmp_path):
    (tmp_path / "data" / "train.npy").unlink()
    with pytest.raises(LNSConfigError, match=r"train.npy does not exist: set OLMO_DATA_DIR"):
        launch.run_here(built.study, built.study.runs, built.out)


def test_two_launches_of_one_study_exclude_each_other(built):
    built.out.mkdir()
    with only_one(built.out), pytest.raises(LNSError, match="another launch of this study is running"):
        launch.run_here(built.study, built.study.runs, built.out)


def test_printing_the_commands_runs_nothing(built, capsys):
    assert cli.main(["launch", str(built.path), "--out", str(built.out), "--only", "b-lns-s1"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "olmo_lns" in line]
    assert line.startswith("python -m olmo_lns train ") and "--model.layer_norm_type=lns_rms" in line
    assert not (built.out / "b-lns-s1").exists()
    with pytest.raises(LNSConfigError, match="'c' is no run of study synthetic"):
        cli.main(["launch", str(built.path), "--out", str(built.out), "--only", "c"])


def micro(tmp_path, steps=12):
    """Write the description of a study that is smaller than the tiny one."""
    path = tmp_path / "micro.yaml"
    sizes = f"{{s: {{model.n_layers: 2, model.d_model: 32, model.n_heads: 2, max_duration: {steps}, "
    sizes += "scheduler.t_warmup: 2, save_interval_unsharded: 5}}"
    path.write_text(
        f"name: micro\nconfig: {REPOSITORY}/configs/study/tiny-base.yaml\ndata: demo\nsizes: {sizes}\n"
        "arms: [preln, lns]\nseeds: [1]\nlaunch: {threads: 1, workers: 2}\n"
    )
    return path


def losses(out, name):
    return logs.merge(logs.read(path) for path in logs.attempts(out / name)).losses


def study(path, out, *words):
    command = [sys.executable, "-m", "olmo_lns", "study", "launch", str(path), "--out", str(out), "--run", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGTERM, id="SIGTERM"),
        pytest.param(signal.SIGKILL, id="SIGKILL", marks=pytest.mark.exhaustive),
    ],
)
def test_a_killed_study_continues_to_the_same_losses(tmp_path, number):
    pytest.importorskip("olmo", reason="needs ai2-olmo")
    path, steps = micro(tmp_path, steps=40), 40
    assert cli.main(["launch", str(path), "--out", str(tmp_path / "whole"), "--run", "--only", "s-lns-s1"]) == 0
    out = tmp_path / "killed"
    process = study(path, out, "--only", "s-lns-s1")
    deadline = time.time() + 600
    while launch.steps_done(out / "s-lns-s1") < 10 and time.time() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    process.communicate()
    reached = launch.steps_done(out / "s-lns-s1")
    assert 10 <= reached < steps
    # A run that outlived a SIGKILLed launcher holds the study's lock until it ends.
    while (again := study(path, out, "--only", "s-lns-s1")).wait(timeout=900) != 0:
        assert "another launch" in again.communicate()[0]
        time.sleep(1)
    assert losses(out, "s-lns-s1") == losses(tmp_path / "whole", "s-lns-s1")
    cost = json.loads((tmp_path / "whole" / "s-lns-s1" / "attempt-01.json").read_text())
    assert cost["exit"] == 0 and cost["cpu_s"] > 1
    if number == signal.SIGTERM:
        assert len(logs.attempts(out / "s-lns-s1")) == 2
