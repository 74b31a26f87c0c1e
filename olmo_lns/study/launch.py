"""Start a study's runs on this machine, or print their commands; ``study.slurm`` writes array scripts.

The training loop and its restart are the framework's own. A run whose log is complete is skipped.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Sequence

from olmo_lns.errors import LNSConfigError
from olmo_lns.study import files
from olmo_lns.study.arms import check_environment
from olmo_lns.study.collect import attempts, curve_of, other_run
from olmo_lns.study.data.corpora import CORPUS_BUILDERS
from olmo_lns.study.describe import Run, Study

#: Number of lines that a launch shows of a failed run's log.
TAIL = 12
#: Words of a command that the shell expands.
JOB, ENDPOINT = "$SLURM_JOB_ID", "$HEAD:29500"


def command(study: Study, run: Run, out: Path, *, python: str = sys.executable, job: str = "") -> list[str]:
    """Return the command line that starts a run or resumes it from its last checkpoint.

    :param job: a name, the same on all nodes of a run.
    :raises LNSConfigError: the run's GPUs do not divide its batch.
    """
    nodes, nproc = study.layout(run)
    if problem := run.shape.batch_problem(nodes * nproc):
        raise LNSConfigError(f"run {run.name}: {problem}")
    own = run.engine.arguments(run, (out / run.name).resolve())
    words = ["-m", "olmo_lns", files.script_path(study.launch.command), *own, *study.launch.args]
    if nproc == nodes == 1:
        return [python, *words]
    torchrun = [python, "-m", "torch.distributed.run", "--nproc-per-node", str(nproc)]
    if nodes == 1:
        return [*torchrun, "--standalone", *words]
    torchrun += ["--nnodes", str(nodes), "--rdzv-backend", "c10d", "--rdzv-id", job or f"{study.name}-{run.name}"]
    return [*torchrun, "--rdzv-endpoint", ENDPOINT, *words]


def quoted(words: Sequence[str]) -> str:
    """Quote a command for a shell, except :data:`JOB` and :data:`ENDPOINT`."""
    return " ".join(f'"{word}"' if word in (JOB, ENDPOINT) else shlex.quote(word) for word in words)


def environment(study: Study, out: Path) -> dict[str, str]:
    """Return the variables that config files and launch read besides the current environment."""
    extra = {study.engine.save_variable: str(out.resolve())}
    if study.launch.threads:
        extra["OMP_NUM_THREADS"] = str(study.launch.threads)
    if study.data:
        data = out / "data" if study.data in CORPUS_BUILDERS else study.path.parent / study.data
        extra[study.engine.data_variable] = str(data.resolve())
    return extra


def print_commands(study: Study, runs: Sequence[Run], out: Path) -> None:
    """Print one command per run; a run over several nodes starts it on each node."""
    check_environment()
    lines = [f"export {name}={shlex.quote(value)}" for name, value in environment(study, out).items()]
    for run in runs:
        if (nodes := study.layout(run)[0]) > 1:
            lines.append(f"# on each of {nodes} nodes, with HEAD set to the host name of one of them:")
        own = [f"{name}={value}" for name, value in run.engine.variables(run).items()]
        lines.append(" ".join([*own, quoted(command(study, run, out, python="python"))]))
    print("\n".join(lines))  # after all commands, which may raise


def check(study: Study) -> None:
    """Check the environment and the training script of a study.

    :raises LNSConfigError: a variable that would change the arms, or no such script.
    """
    check_environment()
    script = study.launch.command
    if script != "train" and not os.path.isfile(files.script_path(script)):
        raise LNSConfigError(
            f"{study.path}: launch.command {script!r} is not a file here: run the command in the framework's checkout, "
            "or give the script's path"
        )


def run_here(study: Study, runs: Sequence[Run], out: Path) -> int:
    """Run the unfinished runs one after the other. The same call continues a killed study.

    SIGINT and SIGTERM also end the run; a run that survives a killed launcher keeps the study locked.

    :returns: the number of failed runs; the end of each failed log is printed.
    :raises LNSConfigError: before the first run starts: its requirements are not met.
    """

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    check(study)
    given = {**os.environ, **environment(study, out)}
    for run in runs:
        command(study, run, out)
        if (nodes := study.layout(run)[0]) > 1:
            raise LNSConfigError(
                f"run {run.name} needs {nodes} nodes: omit --run to print the commands, write Slurm scripts with "
                "--slurm FOLDER, or give --nodes 1"
            )
        if missing := [name for name in files.required_variables(run.config) if not given.get(name)]:
            raise LNSConfigError(f"run {run.name}: {run.config} reads {missing[0]}, not set: export {missing[0]}=…")
    out.mkdir(parents=True, exist_ok=True)
    with files.exclusive_lock(out / ".lock", f"{out}: another launch of this study is running") as lock:
        if study.data in CORPUS_BUILDERS:
            CORPUS_BUILDERS[study.data](out / "data")
        todo, before = _unfinished(runs, out), signal.signal(signal.SIGTERM, stop)
        try:
            return sum(_failed(study, run, out, lock) for run in todo)
        finally:
            signal.signal(signal.SIGTERM, before)


def _unfinished(runs: Sequence[Run], out: Path) -> list[Run]:
    """Return the unfinished runs. :raises LNSConfigError: a run's folder has a run with other settings."""
    todo = []
    for run in runs:
        if problem := other_run(run, out / run.name):
            raise LNSConfigError(f"{problem}; use another --out, or remove the folder to start again")
        curve = curve_of(out / run.name)
        if curve is not None and curve.is_done:
            print(f"{run.name}: done", flush=True)
        else:
            todo.append(run)
    return todo


def start(study: Study, run: Run, out: Path, lock: int) -> tuple[Path, subprocess.Popen[bytes]]:
    """Start a run, or resume it from its last checkpoint; return its log and its process.

    :param lock: file descriptor of the study's lock, which stays taken while the run lives.
    """
    folder = out / run.name
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"attempt-{len(attempts(folder)) + 1:02d}.log"
    env = {**os.environ, **environment(study, out), **run.engine.variables(run)}
    with log.open("wb") as file:
        return log, subprocess.Popen(
            command(study, run, out), stdout=file, stderr=subprocess.STDOUT, env=env, start_new_session=True,
            stdin=subprocess.DEVNULL, pass_fds=(lock,),
        )  # fmt: skip


def _failed(study: Study, run: Run, out: Path, lock: int) -> bool:
    """Run one run to its end; return true if it failed."""
    log, process = start(study, run, out, lock)
    print(f"{run.name}: {log}", flush=True)
    try:
        code = process.wait()
    except BaseException:
        with suppress(ProcessLookupError):  # the run has just ended
            os.killpg(process.pid, signal.SIGTERM)
        process.wait()
        raise
    print(f"{run.name}: exit {code}", flush=True)
    if code:
        end = log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL:]
        print("\n  ".join([f"{run.name} failed; {log} ends:", *end]), file=sys.stderr, flush=True)
    return code != 0
