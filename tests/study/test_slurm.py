"""The written array scripts under a real Slurm: a controller, a node and munge of this test's own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Iterator

import pytest
from support.studies import REPOSITORY

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun")
SBIN = f"{os.environ['PATH']}:/usr/sbin:/sbin"


def _why_not() -> str:
    missing = [name for name in PROGRAMS if shutil.which(name, path=SBIN) is None]
    if missing:
        return f"no {', '.join(missing)} here (apt-get install slurmctld slurmd slurm-client munge)"
    return "" if os.geteuid() == 0 else "slurmd needs root to start jobs"


REASON = _why_not()


def _port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        return int(free.getsockname()[1])


def _configuration(folder: Path, munge: Path) -> str:
    host = socket.gethostname().partition(".")[0]
    return f"""ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={_port()}
SlurmdPort={_port()}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={munge}
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs={os.cpu_count()} State=UNKNOWN
PartitionName=short Nodes={host} Default=NO MaxTime=60 State=UP
PartitionName=other Nodes={host} Default=YES MaxTime=60 State=UP
"""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "slurm"
    for name in ("state", "spool", "munge"):
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
        for name in ("slurmctld", "slurmd"):
            log = (folder / f"{name}.out").open("wb")
            daemons.append(subprocess.Popen([name, "-D"], stdout=log, stderr=log))
        _wait(
            lambda: "idle" in subprocess.run(["sinfo", "-h", "-o", "%T"], capture_output=True, text=True).stdout, "node"
        )
        yield folder
    finally:
        for process in reversed(daemons):
            process.terminate()
            process.wait(timeout=30)


def _wait(ready, what: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, f"{what} did not come in {seconds} s"
        time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.skipif(bool(REASON), reason=REASON)
def test_real_slurm_runs_the_scripts_from_another_folder(cluster: Path, tmp_path: Path) -> None:
    """As a user would: relative paths, out not made yet, jobs submitted from elsewhere; the log is in out."""
    pytest.importorskip("olmo", reason="needs ai2-olmo")
    from olmo_lns.study.data import text

    text.build(tmp_path / "data")
    work = tmp_path / "work"
    work.mkdir()
    (work / "activate").write_text(f'export PATH="{Path(sys.executable).parent}:$PATH" FROM_ACTIVATE=$UNSET_IS_FINE\n')
    sizes = "{s: {model.n_layers: 2, model.d_model: 32, model.n_heads: 2, max_duration: 4, scheduler.t_warmup: 2}}"
    (work / "train.py").write_text(
        "import os, sys\nfrom olmo_lns import cli\nprint('cores', len(os.sched_getaffinity(0)), flush=True)\n"
        "sys.exit(cli.main(['train', *sys.argv[1:]]))\n"
    )
    (work / "study.yaml").write_text(
        f"name: micro\nconfig: {os.path.relpath(REPOSITORY, work)}/configs/study/tiny-base.yaml\nsizes: {sizes}\n"
        "arms: [preln, lns]\nseeds: [1]\n"
        "launch: {command: train.py, threads: 1, sbatch: {gpus-per-node: null, cpus-per-task: 2}}\n"
    )
    words = ["launch", "study.yaml", "--out", "runs", "--slurm", "jobs", "--activate", "activate"]
    words += ["--partition", "short", "--time", "10"]
    command = [sys.executable, "-m", "olmo_lns", "study", *words]
    said = subprocess.run(command, cwd=work, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    script = work / "jobs" / "s.sbatch"
    assert {"#SBATCH --partition=short", "#SBATCH --time=10"} <= set(script.read_text().splitlines())
    environment = {**os.environ, "OLMO_DATA_DIR": str(tmp_path / "data")}
    submitted = ["sbatch", "--wait", str(script)]
    done = subprocess.run(submitted, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=540)
    output = "".join(path.read_text() for path in (work / "runs").glob("slurm-*.out"))
    assert done.returncode == 0, (done.stderr, output)
    assert len(list((work / "runs").glob("slurm-micro-s-*.out"))) == 2
    for log in (work / "runs").glob("*/attempt-01.log"):
        assert "cores 2\n" in log.read_text(), log
    status = [sys.executable, "-m", "olmo_lns", "study", "status", "study.yaml", "--out", "runs"]
    shown = subprocess.run(status, cwd=work, env=environment, capture_output=True, text=True)
    assert shown.returncode == 0 and "2 finished" in shown.stdout, shown.stdout + shown.stderr
