"""Start a study's runs: print the commands, run them here, or write Slurm array scripts.

The distributed engine is OLMo's or Megatron's own; this module only starts it, stamps each run's
folder with what it was started with, and leaves out what is finished.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Sequence

from olmo_lns.errors import LNSConfigError
from olmo_lns.study import pack
from olmo_lns.study.collect import logs
from olmo_lns.study.collect.finished import Finished
from olmo_lns.study.collect.stamp import attempts, prepare_data, stamp, write_whole
from olmo_lns.study.data.corpora import BUILT
from olmo_lns.study.engines.olmo_config import ENVIRONMENT
from olmo_lns.study.launch import progress
from olmo_lns.study.launch.children import Children, only_one
from olmo_lns.study.plan.spec import Run, Study

__all__ = ["check", "command", "environment", "run_here", "steps_done"]

#: Words of a command that the shell of a Slurm job expands.
JOB, ENDPOINT = "$SLURM_JOB_ID", "$HEAD:29500"


def command(study: Study, run: Run, out: Path, *, python: str = sys.executable, slurm: bool = False) -> list[str]:
    """The command line of one run; it starts the run or resumes it from its last checkpoint."""
    folder, options = (out / run.name).resolve(), study.launch
    words = ["-m", "olmo_lns", script(options.command), *run.engine.words(run, folder), *options.args]
    nodes = options.nodes_of(run.size)
    if options.nproc == 1 and nodes == 1:
        return [python, *words]
    torchrun = ["torchrun", "--nproc-per-node", str(options.nproc)]
    if nodes == 1:
        return [*torchrun, "--standalone", *words]
    if not slurm:
        raise LNSConfigError(
            f"run {run.name} asks for {nodes} nodes: write Slurm scripts with --slurm FOLDER, or name the others with "
            "--only"
        )
    torchrun += ["--nnodes", str(nodes), "--rdzv-backend", "c10d", "--rdzv-id", JOB, "--rdzv-endpoint", ENDPOINT]
    return [*torchrun, *words]


def script(word: str) -> str:
    """A training script by its path here, or in the pack (``configs/olmo_core/train.py``); other words as they are."""
    here = [path for path in (Path(word), pack.folder().parent / word) if path.is_file()]
    return os.path.abspath(here[0]) if here else word


def check(study: Study, runs: Sequence[Run], out: Path, *, slurm: bool = False) -> None:
    """Everything that a launch can know beforehand, of every run, before the first one starts.

    :raises LNSConfigError: the run, what is wrong, and what to set.
    """
    command_word = study.launch.command
    if command_word != "train" and not os.path.isfile(script(command_word)):
        raise LNSConfigError(
            f"{study.path}: launch.command {command_word!r} is no file here: call this in the framework's checkout, "
            "or name the script with its path"
        )
    given = {**os.environ, **environment(study, out)}
    for run in runs:
        words = command(study, run, out, slurm=slurm)
        if slurm:
            continue
        if shutil.which(words[0]) is None:
            raise LNSConfigError(f"run {run.name}: {words[0]} is not on PATH: activate the environment that has torch")
        named = dict.fromkeys(ENVIRONMENT.findall(run.config.read_text()))
        if missing := [name for name in named if not given.get(name)]:
            names, verb = " and ".join(missing), "is" if len(missing) == 1 else "are"
            raise LNSConfigError(
                f"run {run.name}: {run.config} reads {names}, which {verb} not set: export {missing[0]}=…"
            )


def environment(study: Study, out: Path) -> dict[str, str]:
    """What the config files and the launch read from the environment, on top of the present one."""
    extra = {study.engine.save_variable: str(out.resolve())}
    if study.launch.threads:
        extra["OMP_NUM_THREADS"] = str(study.launch.threads)
    if study.data:
        data = out / "data" if study.data in BUILT else study.path.parent / study.data
        extra[study.engine.data_variable] = str(data.resolve())
    return extra


def make_folder(path: Path) -> None:
    """:raises LNSConfigError: it cannot be made or written to."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LNSConfigError(f"{path}: cannot be made: {error.strerror}") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise LNSConfigError(f"{path}: no permission to write there")


def steps_done(folder: Path) -> int:
    """The last step the run's logs show; 0 for none."""
    return max((logs.read(path).last for path in attempts(folder)), default=0)


def run_here(study: Study, runs: Sequence[Run], out: Path, *, workers: int | None = None) -> int:
    """Run what is not finished, ``workers`` at a time. A killed study continues with the same call.

    :returns: the number of runs that failed; each is named on stderr with the line of its log that says why.
    """
    check(study, runs, out)
    make_folder(out)
    with only_one(out) as lock:
        prepare_data(study, out)
        todo, failed = _unfinished(study, runs, out, Finished(study)), 0
        pool = ThreadPoolExecutor(workers or study.launch.workers)
        with Children(lock) as children, progress.reported(todo, out), pool:
            for wave in ([run for run in todo if run.start is None], [run for run in todo if run.start is not None]):
                failed += sum(pool.map(lambda run: _run_one(study, run, out, children), wave))
        return failed


def _unfinished(study: Study, runs: Sequence[Run], out: Path, table: Finished) -> list[Run]:
    """The runs to make, stamped: also a finished trunk whose checkpoint an unfinished branch misses."""
    finished = {run.name for run in runs if table.result(run) is not None}
    missed = {
        run.start[0].name
        for run in runs
        if run.start and run.start_checkpoint and run.name not in finished and not (out / run.start_checkpoint).exists()
    }
    todo = []
    for run in runs:
        if run.name in finished - missed:
            print(f"{run.name}: finished, as {table.path} has it", flush=True)
            continue
        stamp(study, run, out)
        done, steps = steps_done(out / run.name), run.shape.steps
        if done < steps:
            todo.append(run)
        print(f"{run.name}: {'finished' if done >= steps else f'at step {done} of {steps}'}", flush=True)
    return todo


def _run_one(study: Study, run: Run, out: Path, children: Children) -> int:
    folder = out / run.name
    if run.start and run.start_checkpoint and not (out / run.start_checkpoint).exists() and not children.stopping:
        print(f"{run.name} failed: it goes on from {run.start_checkpoint}, which is not in {out}: launch "
              f"{run.start[0].name} too", file=sys.stderr, flush=True)  # fmt: skip
        return 1
    log = folder / f"attempt-{len(attempts(folder)) + 1:02d}.log"
    known = {"started": round(time.time(), 1)}
    write_whole(log.with_suffix(".json"), json.dumps(known) + "\n")
    with log.open("wb") as file:
        process = children.start(command(study, run, out), file)
        if process is None:
            return 0
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = code = os.waitstatus_to_exitcode(status)
    seconds, cpu = time.time() - known["started"], usage.ru_utime + usage.ru_stime
    known |= {"exit": code, "wall_s": round(seconds, 1), "cpu_s": round(cpu, 1)}
    write_whole(log.with_suffix(".json"), json.dumps(known) + "\n")
    if children.stopping:
        return 0
    print(f"{run.name}: exit {code}, {known['wall_s']} s, {known['cpu_s']} s of CPU", flush=True)
    if code:
        print(f"{run.name} failed: {progress.cause(log)}\n  the whole log: {log}", file=sys.stderr, flush=True)
    return int(code != 0)
