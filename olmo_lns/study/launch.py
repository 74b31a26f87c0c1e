"""Start a study's runs: print the commands, run them here, or write Slurm array scripts.

The distributed engine is OLMo's or Megatron's own; this module only starts it, stamps each run's
folder with what it was started with, and leaves out what is finished.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator, Sequence

from olmo_lns import __version__
from olmo_lns.errors import LNSConfigError, LNSError
from olmo_lns.study import logs
from olmo_lns.study.spec import Run, Study

__all__ = ["attempts", "command", "environment", "fingerprint", "run_here", "stamp", "steps_done"]

STAMP = "run.json"
SAMPLE = 1 << 20
LNS_VARIABLES = ("OLMO_LNS_EXPONENT", "OLMO_LNS_SCALED_INIT")


def command(study: Study, run: Run, out: Path, *, python: str = sys.executable, slurm: bool = False) -> list[str]:
    """The command line of one run; it starts the run or resumes it from its last checkpoint."""
    folder, options = (out / run.name).resolve(), study.launch
    if run.framework == "olmo":
        from olmo_lns.study.olmo_config import overrides_to_args

        settings = {**run.overrides, "save_folder": str(folder), "try_load_latest_save": True, "save_overwrite": True}
        words = [options.command, str(run.config), *(f"--{word}" for word in overrides_to_args(settings))]
    else:
        words = [options.command, "--lns-config", str(run.config)]
        for key, value in run.overrides.items():
            words += [f"--{key}"] if value is True else [f"--{key}", str(value)]
        words += ["--save", str(folder), "--load", str(folder), "--tensorboard-dir", str(folder / "tensorboard")]
    words += options.args
    nodes = options.nodes_of(run.size)
    if options.nproc == 1 and nodes == 1:
        return [python, "-m", "olmo_lns", *words]
    torchrun = ["torchrun", "--nproc-per-node", str(options.nproc)]
    if nodes > 1 and not slurm:
        raise LNSConfigError(f"run {run.name} asks for {nodes} nodes: write Slurm scripts with --slurm FOLDER")
    if nodes > 1:
        torchrun += ["--nnodes", str(nodes), "--rdzv-backend", "c10d"]
        torchrun += ["--rdzv-id", "$SLURM_JOB_ID", "--rdzv-endpoint", "$HEAD:29500"]
    else:
        torchrun += ["--standalone"]
    return [*torchrun, "-m", "olmo_lns", *words]


def environment(study: Study, out: Path) -> dict[str, str]:
    """What the config files and the launch read from the environment, on top of the present one."""
    save, data = ("OLMO_SAVE_DIR", "OLMO_DATA_DIR")
    if study.framework == "megatron":
        save, data = ("MEGATRON_SAVE_DIR", "MEGATRON_DATA")
    extra = {save: str(out.resolve())}
    if study.launch.threads:
        extra["OMP_NUM_THREADS"] = str(study.launch.threads)
    if study.data == "demo":
        extra[data] = str((out / "data").resolve())
    elif study.data:
        extra[data] = str((study.path.parent / study.data).resolve())
    return extra


def prepare_data(study: Study, out: Path) -> None:
    """Build the demo's data where the study asks for them; a no-op otherwise, and when they are there."""
    if study.data == "demo":
        from olmo_lns.demo import data

        data.build(out / "data")


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
    data = settings.get("data.paths")
    record = {
        "study": study.name,
        "name": run.name,
        "size": run.size,
        "arm": run.arm,
        "seed": run.seed,
        "framework": run.framework,
        "settings": settings,
        "data": fingerprint(data) if data else None,
        "environment": {name: os.environ[name] for name in LNS_VARIABLES if os.environ.get(name)},
        "version": __version__,
    }
    folder = out / run.name
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / STAMP
    if path.is_file():
        found = json.loads(path.read_text())
        for key in ("settings", "data", "environment"):
            if found.get(key) != record[key]:
                raise LNSConfigError(
                    f"{path}: was started with other {key}: {_first_difference(found.get(key), record[key])}; "
                    "use another --out, or remove the folder to start it anew"
                )
    else:
        path.write_text(json.dumps(record, indent=1) + "\n")
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

    :returns: the number of runs that failed; each is named on stderr with the end of its log.
    """
    out.mkdir(parents=True, exist_ok=True)
    with _only_one(out) as lock:
        prepare_data(study, out)
        todo = []
        for run in runs:
            stamp(study, run, out)
            done, steps = steps_done(out / run.name), run.shape.steps
            if done < steps:
                todo.append(run)
            print(f"{run.name}: {'finished' if done >= steps else f'at step {done} of {steps}'}", flush=True)
        with _children(lock) as children, ThreadPoolExecutor(workers or study.launch.workers) as pool:
            return sum(pool.map(lambda run: _run_one(study, run, out, children), todo))


def _run_one(study: Study, run: Run, out: Path, children: _Children) -> int:
    folder = out / run.name
    log = folder / f"attempt-{len(attempts(folder)) + 1:02d}.log"
    started = time.time()
    with log.open("wb") as file:
        process = children.start(command(study, run, out), file)
        if process is None:
            return 0
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = code = os.waitstatus_to_exitcode(status)
    cost = {"exit": code, "wall_s": round(time.time() - started, 1), "cpu_s": round(usage.ru_utime + usage.ru_stime, 1)}
    log.with_suffix(".json").write_text(json.dumps(cost) + "\n")
    if children.stopping:
        return 0
    print(f"{run.name}: exit {code}, {cost['wall_s']} s, {cost['cpu_s']} s of CPU", flush=True)
    if code:
        tail = "\n  ".join(log.read_text(errors="replace").splitlines()[-5:])
        print(f"{run.name} failed ({log}):\n  {tail}", file=sys.stderr, flush=True)
    return int(code != 0)


class _Children:
    """The running processes, ended together when the launcher is."""

    def __init__(self, lock_file: int) -> None:
        self.lock_file = lock_file  # inherited: a run that outlives a killed launcher keeps the study locked
        self.running: list[subprocess.Popen[bytes]] = []
        self.stopping = False
        self.lock = threading.Lock()

    def start(self, words: list[str], file: Any) -> subprocess.Popen[bytes] | None:
        with self.lock:
            if self.stopping:
                return None
            process = subprocess.Popen(
                words, stdout=file, stderr=subprocess.STDOUT, start_new_session=True, pass_fds=(self.lock_file,)
            )
            self.running.append(process)
            return process

    def stop(self) -> None:
        with self.lock:
            self.stopping = True
            for process in self.running:
                if process.returncode is None:
                    try:
                        os.killpg(process.pid, signal.SIGTERM)
                    except ProcessLookupError:
                        continue  # it ended by itself meanwhile


@contextmanager
def _children(lock_file: int) -> Iterator[_Children]:
    children = _Children(lock_file)

    def stop(*_: Any) -> None:
        children.stop()
        raise KeyboardInterrupt

    previous = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield children
    finally:
        children.stop()
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def _only_one(out: Path) -> Iterator[int]:
    with (out / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LNSError(f"{out}: another launch of this study is running (it holds {out}/.lock)") from None
        yield file.fileno()
