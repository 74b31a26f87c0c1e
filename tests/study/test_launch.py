"""Launching a study: commands, Slurm scripts, and a killed study that continues to the same losses."""

import os
import shlex
import signal
import subprocess
import sys
import time

import pytest
import yaml
from support import forked, megatron_launch
from support import launch as support_launch
from support.studies import REPOSITORY

from olmo_lns.errors import LNSConfigError, LNSError
from olmo_lns.study import cli, launch
from olmo_lns.study.collect import collect
from olmo_lns.study.describe import Study
from olmo_lns.study.locking import exclusive_lock
from olmo_lns.study.logs import find_logs, read_curve


def description(folder, sizes="[60M]", **launch):
    """A description of one arm in Megatron, which is not started."""
    path = folder / "s.yaml"
    keys = {"name": "s", "framework": "megatron", "config": f"{REPOSITORY}/configs/megatron/60M-{{arm}}.yaml"}
    text = yaml.safe_dump({**keys, "arms": ["lns"], "launch": {"command": "/bin/sh", **launch}}, allow_unicode=True)
    path.write_text(f"{text}sizes: {sizes}\n", encoding="utf-8")
    return path


def test_a_command_names_the_launcher_the_config_the_seed_and_the_folders(tmp_path):
    paper = Study.load("paper")
    words = launch.command(paper, paper.runs[2], tmp_path)
    assert paper.runs[2].name == "60M-lns-s6198"
    assert words[1:8] == ["-m", "torch.distributed.run", "--nproc-per-node", "8", "--standalone", "-m", "olmo_lns"]
    assert words[8] == "train" and words[9].endswith("60M-lns.yaml")
    assert {"--seed=6198", f"--save_folder={tmp_path}/60M-lns-s6198", "--try_load_latest_save=true"} <= set(words)


@pytest.mark.parametrize("out", ["with blank", "a #b", "a: b", "{a}, [b]", "größe='x'"])
def test_the_folder_of_a_run_reaches_olmo_as_it_is(built, out):
    run = built.study.runs[0]
    words = [word.removeprefix("--") for word in launch.command(built.study, run, built.out / out) if word[:2] == "--"]
    from olmo.config import TrainConfig

    assert TrainConfig.load(str(run.config), words).save_folder == f"{built.out}/{out}/{run.name}"


def test_a_run_over_several_nodes_prints_its_command_and_is_not_run_here(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pretrain_gpt.py").touch()
    words = ["launch", "paper-megatron", "--out", "runs", "--only", "7B-lns"]
    assert cli.main(words) == 0
    text = capsys.readouterr().out
    assert "# on each of 4 nodes, with HEAD set to" in text and '--rdzv-endpoint "$HEAD:29500"' in text
    command = text.splitlines()[-1]
    assert command.startswith(
        "CUDA_DEVICE_MAX_CONNECTIONS=1 python -m torch.distributed.run --nproc-per-node 8 --nnodes 4 --rdzv-backend c10d"
    )
    assert "-m olmo_lns pretrain_gpt.py --lns-config" in command.replace(f"{tmp_path}/", "")
    assert f"--load {tmp_path}/runs/7B-lns-s6198 --tensorboard-dir" in command and "7B-lns.yaml --seed 6198" in command
    with pytest.raises(LNSConfigError, match="needs 4 nodes, but .*--nodes 1"):
        cli.main([*words, "--run"])
    assert cli.main([*words, "--gpus", "8"]) == 0 and "--standalone" in capsys.readouterr().out
    with pytest.raises(LNSConfigError, match="6 GPUs, 2 for each copy of the model, cannot share a batch"):
        cli.main([*words, "--gpus", "6"])


@pytest.mark.slow
def test_a_printed_command_over_two_nodes_runs_on_both(tmp_path, capsys, monkeypatch):
    """Two shells here stand for two nodes; the training script prints its rank and its arguments."""
    line = "f'rank {os.environ[\"RANK\"]} {sys.argv[-1]}\\n'"  # in one piece: the ranks share a pipe
    (tmp_path / "s.py").write_text(f"import os, sys, time\nsys.stdout.write({line})\ntime.sleep(3)\n")
    path = description(tmp_path, command=f"{tmp_path}/s.py", nproc=2, args=["two words"])
    monkeypatch.setenv("MEGATRON_DATA", "/data/x")
    out = ["--out", str(tmp_path / "with blank"), "--nodes", "2"]
    assert cli.main(["launch", str(path), *out]) == 0
    script = capsys.readouterr().out.replace(":29500", f":{29500 + os.getpid() % 1000}")
    env = {**os.environ, "HEAD": "localhost", "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"}
    nodes = [subprocess.Popen(["bash", "-c", script], env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = "".join(node.communicate(timeout=300)[0] for node in nodes)
    assert sorted(line for line in said.splitlines() if "rank" in line) == [f"rank {n} two words" for n in range(4)]


@pytest.mark.slow
def test_an_array_task_of_a_slurm_script_starts_its_own_run(built, tmp_path):
    """bash executes the scripts with stand-ins for srun and python."""
    built.description["launch"] = {"nproc": 2, "nodes": {"b": 2}, "setup": ["export A=b"]}
    built.save()
    assert cli.main(["launch", str(built.path), "--out", str(built.out), "--slurm", str(tmp_path / "jobs")]) == 0
    scripts = sorted((tmp_path / "jobs").iterdir())
    assert [path.name for path in scripts] == ["a.sbatch", "b.sbatch"]
    assert "#SBATCH --array=0-3" in scripts[0].read_text() and "#SBATCH --nodes=2" in scripts[1].read_text()
    fake = tmp_path / "bin"
    fake.mkdir()
    (fake / "srun").write_text('#!/bin/sh\nexec "$@"\n')
    (fake / "python").write_text('#!/bin/sh\necho "python $@ A=$A"\n')
    for path in fake.iterdir():
        path.chmod(0o755)
    (built.out / "b-lns-s1").mkdir()
    for name in ("attempt-09.log", "attempt-9-copy.log"):
        (built.out / "b-lns-s1" / name).write_text("an earlier attempt\n")
    for script, task, name, number in ((scripts[0], "3", "a-lns-s2", "01"), (scripts[1], "1", "b-lns-s1", "10")):
        env = {**os.environ, "PATH": f"{fake}:{os.environ['PATH']}", "SLURM_ARRAY_TASK_ID": task, "SLURM_JOB_ID": "7"}
        env["SLURM_CPUS_ON_NODE"] = "1"
        subprocess.run(["bash", str(script)], env=env, check=True)
        log = (built.out / name / f"attempt-{number}.log").read_text()
        assert f"--run_name={name}" in log and "--nproc-per-node 2" in log and "A=b" in log
    assert "--rdzv-id 7" in log and "--nnodes 2" in log
    assert sorted(path.name for path in built.out.iterdir()) == ["a-lns-s2", "b-lns-s1"]
    del env["OLMO_DATA_DIR"]
    refused = subprocess.run(["bash", str(scripts[0])], env=env, capture_output=True, text=True)
    assert refused.returncode != 0 and "OLMO_DATA_DIR" in refused.stderr


@pytest.mark.parametrize(
    ("container", "expected"),
    [
        ({"image": "nvcr.io#nvidia/pytorch:24.05"}, "--container-image=nvcr.io#nvidia/pytorch:24.05"),
        ({"image": "/images/lns.sif"}, "apptainer exec --nv --bind"),
    ],
)
def test_a_slurm_script_runs_in_the_container_of_the_description(tmp_path, container, expected):
    path = description(tmp_path, container={**container, "mounts": ["/data", "/my b:/b"]})
    for out in ("out", "out;$x'y"):
        words = ["launch", str(path), "--out", str(tmp_path / out), "--slurm", str(tmp_path / "jobs")]
        assert cli.main(words) == 0
        (line,) = [line for line in (tmp_path / "jobs" / "60M.sbatch").read_text().splitlines() if line[:5] == "srun "]
        words = shlex.split(line)
        assert expected in " ".join(words) and container["image"] in " ".join(words)
        (mounts,) = [word.partition("mounts=")[2] or word for word in words if "/my b:/b" in word]
        assert {"/data", "/my b:/b", str(tmp_path / out), f"{REPOSITORY}/configs/megatron"} <= {*mounts.split(",")}


def test_a_folder_that_a_container_cannot_mount_is_refused(tmp_path):
    (tmp_path / "a,b").mkdir()
    path = description(tmp_path / "a,b", container={"image": "x.sif"})
    with pytest.raises(LNSConfigError, match="mounts are split at ',' and ':'"):
        cli.main(["launch", str(path), "--out", str(tmp_path / "a,b" / "o"), "--slurm", str(tmp_path / "jobs")])


def test_no_script_is_written_where_one_cannot_be(tmp_path):
    words = ["launch", str(description(tmp_path, sizes="{a: {}, b: {bf16: null}}")), "--out", str(tmp_path / "out")]
    with pytest.raises(LNSError, match="cannot be written as a Megatron flag"):
        cli.main([*words, "--slurm", str(tmp_path / "none")])
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("OLMO_DATA_DIR", None, "variable OLMO_DATA_DIR, which is not set. Export OLMO_DATA_DIR"),
        ("OLMO_LNS_INITIALIZATION", "upstream", "would change the initialization of the arms"),
    ],
)
def test_a_launch_stops_before_the_first_run_for_a_variable(built, monkeypatch, variable, value, message):
    monkeypatch.delenv(variable) if value is None else monkeypatch.setenv(variable, value)
    with pytest.raises(LNSConfigError, match=message):
        cli.main(["launch", str(built.path), "--out", str(built.out), "--run"])
    assert not built.out.exists()


def test_a_launch_stops_before_the_first_run_without_its_data_or_its_held_out_text(tmp_path, monkeypatch, capsys):
    pytest.importorskip("olmo", reason="needs ai2-olmo")
    monkeypatch.setenv("OLMO_DATA_DIR", str(tmp_path / "data"))
    (path := tmp_path / "s.yaml").write_text(
        f"name: s\nconfig: {REPOSITORY}/configs/olmo/{{size}}-{{arm}}.yaml\nsizes: [60M]\narms: [lns]\nseeds: [1]\n"
    )
    words = ["launch", str(path), "--out", str(tmp_path / "out"), "--run"]
    for present, missing in (([], "data.paths"), (["a.npy"], "evaluator heldout")):
        for name in present:
            (tmp_path / "data").mkdir()
            (tmp_path / "data" / name).touch()
        with pytest.raises(LNSConfigError, match=f"{missing} matches no file. docs/data.md has the commands"):
            cli.main(words)
    assert not (tmp_path / "out").exists()


def test_the_commands_of_a_study_with_local_text_find_their_data(tmp_path, capsys):
    pytest.importorskip("olmo", reason="needs ai2-olmo")
    (path := tmp_path / "s.yaml").write_text(
        f"name: s\nconfig: {REPOSITORY}/configs/study/tiny-base.yaml\ndata: demo\nsizes: [s]\narms: [lns]\nseeds: [1]\n"
    )
    assert cli.main(["launch", str(path), "--out", str(tmp_path)]) == 0
    data, *exports, command = capsys.readouterr().out.splitlines()
    assert data == f"# data: {tmp_path}/data" and f"export OLMO_DATA_DIR={tmp_path}/data" in exports
    assert (tmp_path / "data" / "train.npy").stat().st_size and "-m olmo_lns train" in command


def test_a_slurm_script_requests_the_time_on_the_gpu_of_the_plan(tmp_path, capsys):
    """The same GPU from the command line or from the description; an A100 has about a third of an H100's FLOP/s."""
    hours = {}
    for name, keys, words in (
        ("default", {}, []),
        ("option", {}, ["--gpu", "H100"]),
        ("key", {"gpu": "H100"}, []),
        ("both", {"gpu": "H200"}, ["--gpu", "A100"]),
    ):
        (folder := tmp_path / name).mkdir()
        path = description(folder, **keys)
        assert cli.main(["launch", str(path), "--out", str(folder), "--slurm", str(folder / "jobs"), *words]) == 0
        hours[name] = (folder / "jobs" / "60M.sbatch").read_text().partition("--time=")[2].partition(":")[0]
        cli.main(["plan", str(path), *words])
        gpu = "H100" if name in ("option", "key") else "A100"
        assert f"requested times are for {gpu} GPUs" in (text := capsys.readouterr().out) and f"{gpu} h GPUs" in text
    assert hours["option"] == hours["key"] < hours["default"] == hours["both"]


def test_a_finished_run_is_left_out_and_a_folder_of_another_run_is_refused(built, capsys):
    for run in built.study.runs:
        built.finish(run.name, 3.0)
    words = ["launch", str(built.path), "--out", str(built.out), "--run"]
    assert cli.main(words) == 0 and capsys.readouterr().out.count(": done") == 6
    with exclusive_lock(built.out / ".lock", ""), pytest.raises(LNSError, match="Another launch of this study"):
        cli.main(words)
    built.description["sizes"]["a"]["max_duration"] = 21
    built.save()
    with pytest.raises(
        LNSConfigError, match="has a run with other settings. max_duration is 20 in the folder and 21 in this study"
    ):
        cli.main(words)


def test_a_failed_run_shows_the_end_of_its_log(built, capsys, tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text("raise ValueError('a bad shard')\n")
    monkeypatch.setattr(launch, "STANDALONE", (str(tmp_path / "train.py"),))  # torchrun would take seconds to start
    built.description["launch"] = {"command": str(tmp_path / "train.py")}
    built.save()
    assert cli.main(["launch", str(built.path), "--out", str(built.out), "--run", "--only", "a-lns-s1"]) == 1
    assert "ValueError: a bad shard" in capsys.readouterr().err


@pytest.mark.slow
def test_a_study_of_megatron_is_launched_resumed_and_collected(tmp_path):
    """By an unmodified pretrain_gpt.py. Its log interval does not divide the number of steps."""
    tree = megatron_launch.checkout()
    megatron_launch.build_helpers(tree)
    options = [words.split() for words in megatron_launch.MODEL.split("--")[1:]]
    settings = {name: value[0] if value else True for name, *value in options}
    settings |= {"train-iters": 37, "lr-decay-iters": 37, "log-interval": 5, "save-interval": 10, "split": "90,10,0"}
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(settings | {"eval-iters": 1, "eval-interval": 10}))
    keys = {"name": "m", "framework": "megatron", "config": "base.yaml", "arms": ["preln_scaled_init", "lns"]}
    keys |= {"final_fraction": 0.5, "launch": {"command": "pretrain_gpt.py"}}
    expected = {"exit": ("incomplete", 20), "resume": ("complete", 35)}
    for name, size in (("exit", {"exit-interval": 20}), ("resume", {})):
        (tmp_path / "s.yaml").write_text(yaml.safe_dump({**keys, "sizes": {"s": size}}))
        words = ["study", "launch", str(tmp_path / "s.yaml"), "--out", str(tmp_path / "out"), "--run"]
        command = [sys.executable, "-m", "olmo_lns", *words]
        done = support_launch.run(command, cwd=tree, env=megatron_launch.environment())
        assert done.code == 0, done.text[-3000:]
        table = collect(Study.load(tmp_path / "s.yaml"), tmp_path / "out")
        assert [(row.status, row.step) for row in table.itertuples()] == [expected[name]] * 2
    assert [*table.points] == [4, 4] and table.loss.nunique() == 2 and table.heldout.notna().all()
    again = support_launch.run(command, cwd=tree, env=megatron_launch.environment())
    assert again.code == 0 and again.text.count(": done") == 2


def losses(out, name):
    return read_curve(out / name).losses if (out / name).exists() and find_logs(out / name) else {}


def trained_without_a_launcher(study, data):
    """Run the printed command of LNS in one piece; return the folder of its run and log."""
    (run,) = study.select_runs(["s-lns"])
    out = data.parent.with_name("whole")
    (out / run.name).mkdir(parents=True)
    variables = launch.variables_of_launch(study, out) | {study.engine.data_variable: str(data)}
    _, *program = launch.command(study, run, out)
    assert program[:2] == ["-m", "olmo_lns"]
    code = "import runpy; runpy.run_module('olmo_lns', run_name='__main__', alter_sys=True)"
    done = forked.run(code, *program[2:], **variables)
    assert done.returncode == 0, done.stderr[-4000:]
    (out / run.name / "attempt-01.log").write_text(done.stdout)
    return out


@pytest.mark.slow
def test_a_killed_study_continues_to_the_same_losses(tmp_path):
    pytest.importorskip("olmo", reason="needs ai2-olmo")
    size = {"model.n_layers": 2, "model.d_model": 32, "model.n_heads": 2, "max_duration": 96, "scheduler.t_warmup": 2}
    keys = {"name": "micro", "config": f"{REPOSITORY}/configs/study/tiny-base.yaml", "data": "demo", "seeds": [1]}
    keys |= {"sizes": {"s": size | {"save_interval_unsharded": 8}}, "arms": ["preln", "lns"], "launch": {"threads": 1}}
    (path := tmp_path / "micro.yaml").write_text(yaml.safe_dump(keys))

    def start(out):
        words = ["study", "launch", str(path), "--out", str(out), "--run", "--only", "s-lns"]
        return support_launch.fork_command(words, tmp_path / "printed")

    out = tmp_path / "killed"
    for number in (signal.SIGTERM, signal.SIGKILL):
        process, begun, deadline = start(out), max(losses(out, "s-lns-s1"), default=0), time.time() + 600
        while max(losses(out, "s-lns-s1"), default=0) < begun + 3 and time.time() < deadline:
            time.sleep(0.05)
        os.kill(process.pid, number)
        process.join()
        assert begun + 3 <= max(losses(out, "s-lns-s1")) < 96
    # A run that outlived a SIGKILLed launcher holds the study's lock until it ends.
    while not (process := start(out)).join(timeout=900) and process.exitcode:
        assert "Another launch" in (tmp_path / "printed").read_text()
        time.sleep(1)
    assert "[step=1/" not in (out / "s-lns-s1" / "attempt-02.log").read_text(), "the second launch did not resume"
    assert losses(out, "s-lns-s1") == losses(trained_without_a_launcher(Study.load(path), out / "data"), "s-lns-s1")
