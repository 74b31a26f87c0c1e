"""How far a study's runs are, and what ended those that failed: read from their folders, while they go or after."""

from __future__ import annotations

import fcntl
import os
import re
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Iterator, Sequence

from olmo_lns.study.collect.stamp import attempts, record
from olmo_lns.study.engines.base import ANSI
from olmo_lns.study.plan.cost import duration
from olmo_lns.study.plan.spec import Run

__all__ = ["Status", "cause", "describe", "examine", "known", "locked", "reported", "reported_line"]

TAIL = 1 << 18
#: Seconds between the lines that a launch prints while its runs go.
EVERY = 30.0
_RANK = re.compile(r"^\[(?:rank|default)?\d+\]:\s?")
_ERROR = re.compile(r"(?:^|\s|\()((?:\w+\.)*\w*(?:Error|Exception|Interrupt|OutOfMemory|SystemExit)): \S.*")
_SAID = re.compile(r"^(?:olmo-lns \S+|olmo_lns|\S+\.py|srun|slurmstepd|torchrun|/\S+): .*\S")
_BOILERPLATE = ("ChildFailedError", "torch.distributed.elastic", "SignalException", "Root Cause", "exitcode")
_STEP = re.compile(r"\[step=(\d+)/(\d+)|iteration\s+(\d+)\s*/\s*(\d+)\s*\|")


def _tail(path: Path) -> list[str]:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL))
        return [_RANK.sub("", line) for line in ANSI.sub("", file.read().decode(errors="replace")).splitlines()]


def cause(log: Path) -> str:
    """The line of a failed run's log that names the reason, not torchrun's account of which process failed.

    The last error of the first process that raised one; without any, the last line that is not empty.
    """
    lines = _tail(log)
    starts = [n for n, line in enumerate(lines) if any(word in line for word in _BOILERPLATE[:2])]
    own = lines[: starts[0]] if starts and starts[0] else lines
    own = [line for line in own if not any(word in line for word in _BOILERPLATE)]
    for line in reversed(own):
        if match := _ERROR.search(line):
            return line[match.start(1) :].strip()
    said = [line.strip() for line in own if _SAID.match(line)] or [line.strip() for line in own if line.strip()]
    return said[-1] if said else "the log is empty"


@dataclass(frozen=True)
class Status:
    """:param state: ``finished``, ``failed``, ``running``, ``stopped`` (may be continued) or ``not started``.

    :param seconds_left: None where it cannot be told. :param reason: of a failure.
    """

    run: str
    state: str
    step: int
    steps: int
    seconds_left: float | None = None
    reason: str = ""


def examine(run: Run, out: Path, *, held: bool, steps: int | None = None) -> Status:
    """:param held: whether a launch holds the study: then a run whose end was not recorded is running."""
    folder, steps = out / run.name, steps or run.shape.steps
    logs = attempts(folder)
    if not logs:
        return Status(run.name, "not started", 0, steps)
    log, step, before = logs[-1], 0, run.first_step
    for path in logs:
        before, step = max(before, step), max(step, _last_step(path))
    if step >= steps:
        return Status(run.name, "finished", step, steps)
    if (end := log.with_suffix(".json")).is_file():
        code = int(record(end, "exit")["exit"])
        if code > 0:
            return Status(run.name, "failed", step, steps, reason=f"exit {code}: {cause(log)}")
        text = f"ended by signal {-code}" if code else ""
        return Status(run.name, "stopped", step, steps, reason=text)
    if not (held or time.time() - log.stat().st_mtime < 2 * EVERY):
        return Status(run.name, "stopped", step, steps, reason=f"no end was recorded; its log ends: {cause(log)}")
    return Status(run.name, "running", step, steps, _left(log, before, step, steps))


def _last_step(log: Path) -> int:
    found = _STEP.findall("\n".join(_tail(log)))
    return int(found[-1][0] or found[-1][2]) if found else 0


def _left(log: Path, before: int, step: int, steps: int) -> float | None:
    """By the speed of this attempt, which started when the launcher opened its log."""
    try:
        started = float(log.with_suffix(".started").read_text())
    except (FileNotFoundError, ValueError):
        return None
    return (steps - step) * (time.time() - started) / (step - before) if step > before else None


def known(status: Status, table: Path | None) -> Status:
    """The same run, which was finished elsewhere."""
    return replace(status, state="finished", step=status.steps, reason=f"in {table}")


def describe(status: Status) -> str:
    """One line."""
    left = "" if status.seconds_left is None else f", about {duration(status.seconds_left)} left"
    reason = f": {status.reason}" if status.reason else ""
    return f"{status.run:<32} {status.state:<11} step {status.step:,} of {status.steps:,}{left}{reason}"


def locked(out: Path) -> bool:
    """Whether a launch (or a run that outlived it) holds the study in ``out``."""
    try:
        with (out / ".lock").open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            return False
    except FileNotFoundError:
        return False


def reported_line(statuses: Sequence[Status]) -> str | None:
    """What goes now, in one line; None when nothing does."""
    going = [status for status in statuses if status.state == "running"]
    parts = [
        f"{s.run} {s.step}/{s.steps}" + (f" ({duration(s.seconds_left)} left)" if s.seconds_left is not None else "")
        for s in going
    ]
    done = sum(status.state == "finished" for status in statuses)
    return f"[{done} of {len(statuses)} finished] {', '.join(parts)}" if parts else None


@contextmanager
def reported(runs: Sequence[Run], out: Path, every: float = EVERY) -> Iterator[None]:
    """Print a line about the running runs every ``every`` seconds while the body goes."""
    ended = threading.Event()
    steps = {run.name: run.shape.steps for run in runs}

    def report() -> None:
        while not ended.wait(every):
            line = reported_line([examine(run, out, held=True, steps=steps[run.name]) for run in runs])
            if line:
                print(line, flush=True)

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def record_start(log: Path) -> None:
    """Note when an attempt began, beside its log."""
    temporary = log.with_suffix(".started.tmp")
    temporary.write_text(f"{time.time():.1f}\n")
    os.replace(temporary, log.with_suffix(".started"))
