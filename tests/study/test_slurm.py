"""The array scripts run under a real Slurm; a test starts its own controller, nodes and munge."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import yaml
from support.studies import REPOSITORY

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun")
SBIN = f"{os.environ['PATH']}:/usr/sbin:/sbin"


def _why_not():
    missing = [name for name in PROGRAMS if shutil.which(name, path=SBIN) is None]
    if missing:
        return f"no {', '.join(missing)} here (apt-get install slurmctld slurmd slurm-client munge)"
    return "" if os.geteuid() == 0 else "slurmd needs root to start jobs"


REASON = _why_not()


def _port():
    with socket.socket() as free:
        free.bind(("", 0))
        return int(free.getsockname()[1])


def _configuration(folder, munge):
    """Return a slurm.conf with two nodes on this machine, each with a slurmd of its own."""
    host = socket.gethostname().partition(".")[0]
    node = f"NodeHostname={host} NodeAddr=127.0.0.1 CPUs=1 State=UNKNOWN"
    return f"""ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={_port()}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={munge}
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
NodeName=node0 Port={_port()} {node}
NodeName=node1 Port={_port()} {node}
PartitionName=short Nodes=ALL Default=NO MaxTime=60 State=UP
PartitionName=other Nodes=ALL Default=YES MaxTime=60 State=UP
"""


@pytest.fixture
def cluster(monkeypatch):
    # Not pytest's folder, whose path may be too long: the path of a socket has 108 bytes at most.
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    for name in ("state", "munge", "spool-node0", "spool-node1"):
        (folder / name).mkdir(parents=True)
        (folder / name).chmod(0o700)
    key = folder / "munge" / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    munge = folder / "munge" / "socket"
    (folder / "slurm.conf").write_text(_configuration(folder, munge))
    monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
    monkeypatch.setenv("PATH", SBIN)
    words = [f"--{name}-file={folder}/munge/{name}" for name in ("key", "log", "pid", "seed")]
    daemons = [
        subprocess.Popen(["munged", "--foreground", "--force", f"--socket={munge}", *words], stderr=subprocess.DEVNULL)
    ]
    try:
        _wait(munge.exists, "munged's socket")
        for command in (["slurmctld"], ["slurmd", "-N", "node0"], ["slurmd", "-N", "node1"]):
            log = (folder / f"{command[-1]}.out").open("wb")
            daemons.append(subprocess.Popen([*command, "-D"], stdout=log, stderr=log))
        states = ["sinfo", "-h", "-N", "-p", "short", "-o", "%T"]
        _wait(
            lambda: subprocess.run(states, capture_output=True, text=True).stdout.split() == ["idle", "idle"], "nodes"
        )
        yield folder
    finally:
        for process in reversed(daemons):
            process.terminate()
            process.wait(timeout=30)
        shutil.rmtree(folder)


def _wait(ready, what, seconds=60):
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, f"{what} did not come in {seconds} s"
        time.sleep(0.2)


def _study(work):
    """Describe two short runs whose training script prints where it runs, and return the Slurm script of their size."""
    from olmo_lns.study.data import corpora

    corpora.build(work.parent / "data")
    work.mkdir()
    (work / "activate").write_text(f'export PATH="{Path(sys.executable).parent}:$PATH" FROM_ACTIVATE=$UNSET_IS_FINE\n')
    size = {"model.n_layers": 2, "model.d_model": 32, "model.n_heads": 2, "max_duration": 4, "scheduler.t_warmup": 2}
    launch = {"command": "train.py", "threads": 1, "setup": [f"source {work}/activate"], "nodes": 2}
    description = {
        "name": "micro",
        "config": os.path.relpath(REPOSITORY, work) + "/configs/study/tiny-base.yaml",
        "sizes": {"s": size | {"distributed_strategy": "ddp"}},
        "arms": ["preln", "lns"],
        "seeds": [1],
        "launch": launch | {"sbatch": {"gpus-per-node": None, "cpus-per-task": 1}},
    }
    (work / "study.yaml").write_text(yaml.safe_dump(description))
    (work / "train.py").write_text(
        "import os, sys\nfrom olmo_lns import cli\n"
        "print('rank', os.environ.get('RANK'), 'on', os.environ['SLURMD_NODENAME'], flush=True)\n"
        "sys.exit(cli.main(['train', *sys.argv[1:]]))\n"
    )
    words = ["launch", "study.yaml", "--out", "runs", "--slurm", "jobs"]
    command = [sys.executable, "-m", "olmo_lns", "study", *words]
    said = subprocess.run(command, cwd=work, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    return work / "jobs" / "s.sbatch"


def _submit(script, folder):
    """Submit from another folder, wait for the tasks, and check that ``study collect`` has both.

    :returns: the logs of the runs.
    """
    work = script.parents[1]
    environment = {**os.environ, "OLMO_DATA_DIR": str(folder / "data")}
    submitted = ["sbatch", "--wait", "--partition=short", "--time=10", str(script)]
    done = subprocess.run(submitted, cwd=folder, env=environment, capture_output=True, text=True, timeout=540)
    output = "".join(path.read_text() for path in (work / "runs").glob("slurm-micro-s-*.out"))
    found = [path.read_text() for path in (work / "runs").glob("*/attempt-01.log")]
    assert done.returncode == 0, (done.stderr, output, found)
    collected = [sys.executable, "-m", "olmo_lns", "study", "collect", "study.yaml", "--out", "runs"]
    shown = subprocess.run(collected, cwd=work, env=environment, capture_output=True, text=True)
    assert shown.returncode == 0 and shown.stdout.count(" 4/4 ") == 2, shown.stdout + shown.stderr
    return found


@pytest.mark.slow
@pytest.mark.skipif(bool(REASON), reason=REASON)
def test_real_slurm_runs_a_script_from_another_folder_with_a_rank_on_each_of_two_nodes(cluster, tmp_path):
    """Each of two slurmd starts one process, and torchrun connects them under the name of the first node.

    Paths are relative, and out does not exist yet.
    """
    pytest.importorskip("olmo", reason="needs ai2-olmo")
    for log in _submit(_study(tmp_path / "work"), tmp_path):
        ranks = sorted(line for line in set(log.splitlines()) if line.startswith("rank ") and " on node" in line)
        # The rendezvous gives the ranks to the nodes as they come.
        assert ranks in (["rank 0 on node0", "rank 1 on node1"], ["rank 0 on node1", "rank 1 on node0"])
        assert "[step=4/4" in log
