"""How far a study's runs are, and what ended those that failed: read from their folders, while they go or after."""

from __future__ import annotations

import fcntl
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Sequence

from olmo_lns.study.collect.stamp import attempts, record
from olmo_lns.study.engines.base import ANSI
from olmo_lns.study.plan.cost import duration
from olmo_lns.study.plan.spec import Run

__all__ = ["Status", "cause", "examine", "line", "locked"]

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
    """:param state: ``finished``, ``failed``, ``running``, ``stopped`` (may be continued) or ``not started``.

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
    """What goes now, of a launch's runs."""
    found = [examine(run, out, held=True) for run in runs]
    parts = [
        f"{s.run} {s.step}/{s.steps}" + (f" ({duration(s.seconds_left)} left)" if s.seconds_left is not None else "")
        for s in found
        if s.state == "running"
    ]
    return f"[{sum(s.state == 'finished' for s in found)} of {len(found)} finished] {', '.join(parts)}"
