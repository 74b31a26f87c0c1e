"""Start a study's runs on this machine, and say how far each is and why one failed.

The training loop is the framework's own. This module writes its command line, records in each run's folder what the
run was started with, and leaves out what is finished. ``launch.slurm`` writes the same commands as array scripts.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator, Sequence

from olmo_lns.errors import LNSConfigError, LNSError
from olmo_lns.study import files
from olmo_lns.study.collect.folder import attempts, prepare_data, read, record, stamp
from olmo_lns.study.collect.gather import Finished
from olmo_lns.study.data.corpora import BUILT
from olmo_lns.study.engines.base import ANSI
from olmo_lns.study.plan.cost import duration
from olmo_lns.study.plan.spec import Run, Study

TAIL = 1 << 18
#: Seconds between the lines that a launch prints while its runs go.
EVERY = 30.0
_RANK = re.compile(r"^\[(?:rank|default)?\d+\]:\s?")
_ERROR = re.compile(r"(?:^|\s|\()((?:\w+\.)*\w*(?:Error|Exception|Interrupt|OutOfMemory|SystemExit)): \S.*")
_SAID = re.compile(r"^(?:olmo-lns \S+|olmo_lns|\S+\.py|srun|slurmstepd|torchrun|/\S+): .*\S")
_TORCHRUN = re.compile(r"ChildFailedError|torch\.distributed\.elastic")
_BOILERPLATE = re.compile(r"ChildFailedError|torch\.distributed\.elastic|SignalException|Root Cause|exitcode")
_STEP = re.compile(r"\[step=(\d+)/|iteration\s+(\d+)\s*/\s*\d+\s*\|")


def _tail(path: Path) -> list[str]:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL))
        return [_RANK.sub("", line) for line in ANSI.sub("", file.read().decode(errors="replace")).splitlines()]


def cause(log: Path) -> str:
    """The line of a failed run's log that names the reason, not torchrun's account of which process failed.

    The last error of the first process that raised one; without any, the last line that is not empty.
    """
    lines = _tail(log)
    torchrun = next((n for n, line in enumerate(lines) if n and _TORCHRUN.search(line)), None)
    own = [line for line in lines[:torchrun] if line.strip() and not _BOILERPLATE.search(line)]
    for line in reversed(own):
        if match := _ERROR.search(line):
            return line[match.start(1) :].strip()
    said = [line for line in own if _SAID.match(line)] or own
    return said[-1].strip() if said else "the log is empty"


@dataclass(frozen=True)
class Status:
    """How far a run is: ``finished``, ``failed``, ``running``, ``stopped`` (may be continued) or ``not started``.

    :param seconds_left: None where it cannot be told. :param reason: of a failure.
    """

    run: str
    state: str
    step: int
    steps: int
    seconds_left: float | None = None
    reason: str = ""

    def __str__(self) -> str:
        left = "" if self.seconds_left is None else f", about {duration(self.seconds_left)} left"
        reason = f": {self.reason}" if self.reason else ""
        return f"{self.run:<32} {self.state:<11} step {self.step:,} of {self.steps:,}{left}{reason}"


def examine(run: Run, out: Path, *, held: bool) -> Status:
    """:param held: whether a launch holds the study: then a run whose end was not recorded is running."""
    folder, steps = out / run.name, run.shape.steps
    logs = attempts(folder)
    if not logs:
        return Status(run.name, "not started", 0, steps)
    reached = [run.first_step, *map(_last_step, logs)]
    before, step, log = max(reached[:-1]), max(reached[1:]), logs[-1]
    if step >= steps:
        return Status(run.name, "finished", step, steps)
    known = record(log.with_suffix(".json")) if log.with_suffix(".json").is_file() else {}
    if (code := known.get("exit")) is not None:
        if code > 0:
            return Status(run.name, "failed", step, steps, reason=f"exit {code}: {cause(log)}")
        return Status(run.name, "stopped", step, steps, reason=f"ended by signal {-code}" if code else "")
    if not (held or time.time() - log.stat().st_mtime < 2 * EVERY):
        return Status(run.name, "stopped", step, steps, reason=f"no end was recorded; its log ends: {cause(log)}")
    left = None
    if step > before and "started" in known:  # by the speed of this attempt
        left = (steps - step) * (time.time() - known["started"]) / (step - before)
    return Status(run.name, "running", step, steps, left)


def _last_step(log: Path) -> int:
    found = _STEP.findall("\n".join(_tail(log)))
    return int("".join(found[-1])) if found else 0


def locked(out: Path) -> bool:
    """Whether a launch (or a run that outlived it) holds the study in ``out``."""
    try:
        with (out / ".lock").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def line(runs: Sequence[Run], out: Path) -> str:
    """One line: which runs of a launch are running now, and how far they are."""
    found = [examine(run, out, held=True) for run in runs]
    parts = [
        f"{s.run} {s.step}/{s.steps}" + (f" ({duration(s.seconds_left)} left)" if s.seconds_left is not None else "")
        for s in found
        if s.state == "running"
    ]
    return f"[{sum(s.state == 'finished' for s in found)} of {len(found)} finished] {', '.join(parts)}"


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
    here = [path for path in (Path(word), files.pack_folder().parent / word) if path.is_file()]
    return os.path.abspath(here[0]) if here else word


def check(study: Study, runs: Sequence[Run], out: Path, *, slurm: bool = False) -> None:
    """Check every run before the first one starts.

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
        if missing := [name for name in files.needed(run.config) if not given.get(name)]:
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
    return max((read(path).last for path in attempts(folder)), default=0)


@contextmanager
def only_one(out: Path) -> Iterator[int]:
    """The descriptor of the folder's lock.

    :raises LNSError: another launch holds it.
    """
    with (out / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LNSError(f"{out}: another launch of this study is running (it holds {out}/.lock)") from None
        yield file.fileno()


def run_here(study: Study, runs: Sequence[Run], out: Path, *, workers: int | None = None) -> int:
    """Run what is not finished, ``workers`` at a time. A killed study continues with the same call.

    SIGINT and SIGTERM end the runs too; a run that outlives a killed launcher keeps the study locked.

    :returns: the number of runs that failed; each is named on stderr with the line of its log that says why.
    """
    check(study, runs, out)
    make_folder(out)
    with only_one(out) as lock:
        prepare_data(study, out)
        todo, failed, said = _unfinished(study, runs, out, Finished(study)), 0, time.monotonic()
        waiting, going = list(todo), list[_Running]()

        def stop(*_: Any) -> None:
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGTERM, stop)
        try:
            while waiting or going:
                ahead = {run.name for run in [*waiting, *(each.run for each in going)]}
                ready = [run for run in waiting if run.start is None or run.start[0].name not in ahead]
                for run in ready[: (workers or study.launch.workers) - len(going)]:
                    waiting.remove(run)
                    if (started := _Running.begin(study, run, out, lock)) is None:
                        failed += 1
                    else:
                        going.append(started)
                time.sleep(0.1)
                failed += sum(each.failed() for each in going if each.ended())
                going = [each for each in going if each.process.returncode is None]
                if time.monotonic() - said >= EVERY:
                    said = time.monotonic()
                    print(line(todo, out), flush=True)
        finally:
            signal.signal(signal.SIGTERM, before)
            going = [each for each in going if each.process.returncode is None]
            for each in going:
                with suppress(ProcessLookupError):  # it has just ended by itself
                    os.killpg(each.process.pid, signal.SIGTERM)
            for each in going:
                each.ended(wait=True)
        return failed


def _unfinished(study: Study, runs: Sequence[Run], out: Path, table: Finished) -> list[Run]:
    """Write each ``run.json``. :returns: the runs to make, a trunk too whose checkpoint an unfinished branch needs."""
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


class _Running:
    """A run's process and its record ``attempt-NN.json``: when it started, and how it ended at what cost."""

    def __init__(self, run: Run, log: Path, process: subprocess.Popen[bytes], started: float) -> None:
        self.run, self.log, self.process = run, log, process
        self.known: dict[str, float] = {"started": round(started, 1)}
        self._write()

    @classmethod
    def begin(cls, study: Study, run: Run, out: Path, lock: int) -> _Running | None:
        """Start it. None, with a message, where the checkpoint that it goes on from is missing."""
        if run.start and run.start_checkpoint and not (out / run.start_checkpoint).exists():
            where = f"{run.start_checkpoint}, which is not in {out}: launch {run.start[0].name} too"
            print(f"{run.name} failed: it goes on from {where}", file=sys.stderr, flush=True)
            return None
        log, started = out / run.name / f"attempt-{len(attempts(out / run.name)) + 1:02d}.log", time.time()
        with log.open("wb") as file:
            words = command(study, run, out)
            process = subprocess.Popen(
                words, stdout=file, stderr=subprocess.STDOUT, start_new_session=True, pass_fds=(lock,)
            )
        return cls(run, log, process, started)

    def ended(self, *, wait: bool = False) -> bool:
        pid, status, usage = os.wait4(self.process.pid, 0 if wait else os.WNOHANG)
        if pid:
            self.process.returncode = code = os.waitstatus_to_exitcode(status)
            self.known |= {"exit": code, "wall_s": round(time.time() - self.known["started"], 1)}
            self.known["cpu_s"] = round(usage.ru_utime + usage.ru_stime, 1)
            self._write()
        return bool(pid)

    def failed(self) -> bool:
        """Print how the run ended. :returns: whether it failed."""
        code = self.process.returncode
        print(f"{self.run.name}: exit {code}, {self.known['wall_s']} s, {self.known['cpu_s']} s of CPU", flush=True)
        if code:
            why = f"{cause(self.log)}\n  the whole log: {self.log}"
            print(f"{self.run.name} failed: {why}", file=sys.stderr, flush=True)
        return bool(code)

    def _write(self) -> None:
        files.write_whole(self.log.with_suffix(".json"), json.dumps(self.known) + "\n")
