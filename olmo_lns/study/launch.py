"""Start a study's runs: print the commands, run them here, or write Slurm array scripts.

The distributed engine is OLMo's or Megatron's own; this module only starts it, stamps each run's
folder with what it was started with, and leaves out what is finished.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Mapping, Sequence

from olmo_lns import __version__
from olmo_lns.environment import INITIALIZATION, SCHEME
from olmo_lns.errors import LNSConfigError
from olmo_lns.study import logs, processes, progress
from olmo_lns.study.corpora import BUILT
from olmo_lns.study.files import write_whole
from olmo_lns.study.processes import Children
from olmo_lns.study.spec import Run, Study

if TYPE_CHECKING:
    from olmo_lns.study.finished import Finished

__all__ = ["attempts", "check", "command", "environment", "fingerprint", "run_here", "stamp", "steps_done"]

STAMP = "run.json"
SAMPLE = 1 << 20
LNS_VARIABLES = (SCHEME, INITIALIZATION)


def command(study: Study, run: Run, out: Path, *, python: str = sys.executable, slurm: bool = False) -> list[str]:
    """The command line of one run; it starts the run or resumes it from its last checkpoint."""
    folder, options = (out / run.name).resolve(), study.launch
    script = os.path.abspath(options.command) if os.path.isfile(options.command) else options.command
    words = [script, *run.engine.words(run, folder), *options.args]
    nodes = options.nodes_of(run.size)
    if options.nproc == 1 and nodes == 1:
        return [python, "-m", "olmo_lns", *words]
    torchrun = ["torchrun", "--nproc-per-node", str(options.nproc)]
    if nodes > 1 and not slurm:
        raise LNSConfigError(
            f"run {run.name} asks for {nodes} nodes: write Slurm scripts with --slurm FOLDER, or name the others with "
            "--only"
        )
    if nodes > 1:
        torchrun += ["--nnodes", str(nodes), "--rdzv-backend", "c10d"]
        torchrun += ["--rdzv-id", "$SLURM_JOB_ID", "--rdzv-endpoint", "$HEAD:29500"]
    else:
        torchrun += ["--standalone"]
    return [*torchrun, "-m", "olmo_lns", *words]


def check(study: Study, runs: Sequence[Run], out: Path, *, slurm: bool = False) -> None:
    """Everything that a launch can know beforehand, of every run, before the first one starts.

    :raises LNSConfigError: the run, what is wrong, and what to set.
    """
    command_word = study.launch.command
    if command_word != "train" and not os.path.isfile(command_word):
        raise LNSConfigError(
            f"{study.path}: launch.command {command_word!r} is no file here: call this in the framework's checkout, "
            "or name the script with its path"
        )
    given = os.environ if slurm else {**os.environ, **environment(study, out)}
    for run in runs:
        words = command(study, run, out, slurm=slurm)
        if not slurm and shutil.which(words[0]) is None:
            raise LNSConfigError(f"run {run.name}: {words[0]} is not on PATH: activate the environment that has torch")
        if not slurm and (missing := unset_variables(run.config, given)):
            names = " and ".join(missing)
            raise LNSConfigError(
                f"run {run.name}: {run.config} reads {names}, which {'is' if len(missing) == 1 else 'are'} not set: "
                f"export {missing[0]}=…"
            )


def unset_variables(config: Path, given: Mapping[str, str]) -> list[str]:
    """The variables without a default that a config file names and ``given`` lacks or has empty."""
    from olmo_lns.study.olmo_config import ENVIRONMENT

    return [name for name in dict.fromkeys(ENVIRONMENT.findall(config.read_text())) if not given.get(name)]


def environment(study: Study, out: Path) -> dict[str, str]:
    """What the config files and the launch read from the environment, on top of the present one."""
    data = study.engine.data_variable
    extra = {study.engine.save_variable: str(out.resolve())}
    if study.launch.threads:
        extra["OMP_NUM_THREADS"] = str(study.launch.threads)
    if study.data in BUILT:
        extra[data] = str((out / "data").resolve())
    elif study.data:
        extra[data] = str((study.path.parent / study.data).resolve())
    return extra


def environment_of() -> dict[str, str]:
    """What is set here and would change a run."""
    return {name: os.environ[name] for name in LNS_VARIABLES if os.environ.get(name)}


def prepare_data(study: Study, out: Path) -> None:
    """Build the corpus where the study names one that is built here; a no-op otherwise, and when it is there."""
    if study.data in BUILT:
        BUILT[study.data].build(out / "data")


def make_folder(path: Path) -> None:
    """:raises LNSConfigError: it cannot be made or written to."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LNSConfigError(f"{path}: cannot be made: {error.strerror}") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise LNSConfigError(f"{path}: no permission to write there")


def fingerprint(paths: Sequence[str]) -> list[dict[str, Any]]:
    """Name, bytes and a hash of the first and last MiB of each data file; the same data give the same list."""
    found = []
    for path in map(Path, paths):
        if not path.is_file():
            raise LNSConfigError(f"data file {path} does not exist: set OLMO_DATA_DIR to the folder of the .npy files")
        size = path.stat().st_size
        with path.open("rb") as file:
            digest = hashlib.sha256(file.read(SAMPLE))
            file.seek(max(0, size - SAMPLE))
            digest.update(file.read(SAMPLE))
        found.append({"name": path.name, "bytes": size, "sha256": digest.hexdigest()[:16]})
    return found


def stamp(study: Study, run: Run, out: Path) -> Path:
    """Write ``run.json``: the identity the run is started with. A stamp that is there must agree.

    :raises LNSConfigError: the folder holds a run started with other settings or data.
    """
    settings = json.loads(json.dumps(run.settings, default=str))
    data = run.engine.data_files(settings)
    record = {
        "study": study.name,
        "name": run.name,
        "size": run.size,
        "arm": run.arm,
        "seed": run.seed,
        "framework": run.engine.name,
        "settings": settings,
        "data": fingerprint(data) if data else None,
        "environment": environment_of(),
        "version": __version__,
    }
    if run.start_checkpoint:
        record["start"] = run.start_checkpoint
    folder = out / run.name
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / STAMP
    if path.is_file():
        found = json.loads(path.read_text())
        for key in ("settings", "data", "environment", "start"):
            if found.get(key) != record.get(key):
                raise LNSConfigError(
                    f"{path}: was started with other {key}: {_first_difference(found.get(key), record.get(key))}; "
                    "use another --out, or remove the folder to start it anew"
                )
    else:
        write_whole(path, json.dumps(record, indent=1) + "\n")
    return path


def _first_difference(old: Any, new: Any) -> str:
    if isinstance(old, dict) and isinstance(new, dict):
        key = next(k for k in sorted({*old, *new}) if old.get(k) != new.get(k))
        return f"{key}: {old.get(key)!r} then, {new.get(key)!r} now"
    return f"{old!r} then, {new!r} now"


def attempts(folder: Path) -> list[Path]:
    """The console logs of a run folder, oldest first."""
    return sorted(folder.glob("attempt-*.log"))


def steps_done(folder: Path) -> int:
    """The last step the run's logs show; 0 for none."""
    return max((logs.read(path).last for path in attempts(folder)), default=0)


def run_here(study: Study, runs: Sequence[Run], out: Path, *, workers: int | None = None) -> int:
    """Run what is not finished, ``workers`` at a time. A killed study continues with the same call.

    :returns: the number of runs that failed; each is named on stderr with the line of its log that says why.
    """
    from olmo_lns.study.finished import Finished

    check(study, runs, out)
    make_folder(out)
    with processes.only_one(out) as lock:
        prepare_data(study, out)
        todo = _unfinished(study, runs, out, Finished(study))
        with (
            processes.children(lock) as children,
            progress.reported(todo, out),
            ThreadPoolExecutor(workers or study.launch.workers) as pool,
        ):
            failed = 0
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
    started = time.time()
    progress.record_start(log)
    with log.open("wb") as file:
        process = children.start(command(study, run, out), file)
        if process is None:
            return 0
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = code = os.waitstatus_to_exitcode(status)
    cost = {"exit": code, "wall_s": round(time.time() - started, 1), "cpu_s": round(usage.ru_utime + usage.ru_stime, 1)}
    write_whole(log.with_suffix(".json"), json.dumps(cost) + "\n")
    if children.stopping:
        return 0
    print(f"{run.name}: exit {code}, {cost['wall_s']} s, {cost['cpu_s']} s of CPU", flush=True)
    if code:
        print(f"{run.name} failed: {progress.cause(log)}\n  the whole log: {log}", file=sys.stderr, flush=True)
    return int(code != 0)
