"""Read the logs and saved settings of runs, and write the table of their results."""

from __future__ import annotations

import math
import re
import statistics
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd

from olmo_lns.errors import LNSConfigError
from olmo_lns.study.describe import Run, Study
from olmo_lns.study.files import attempts
from olmo_lns.study.planning import arm_problems, compare_arms
from olmo_lns.text import write_whole

COMPLETE, INCOMPLETE, MISSING = "complete", "incomplete", "missing"
ANSI = re.compile(r"\x1b\[[0-9;]*m")
#: OLMo and OLMo-core print a line with the step, then a line for each metric of the step.
STEP = re.compile(r"\[step=(\d+)/(\d+|\?\?\?)(?:,epoch=\d+)?(?:,eta=[^\]]*)?\]\s*$")
METRIC = re.compile(r"^ {4,}(\S.*?)=(\S+)\s*$")
LOSSES = ("train/CrossEntropyLoss", "train/CE loss")
HELDOUT = ("eval/heldout/CrossEntropyLoss", "eval/lm/heldout/CE loss")
#: Megatron prints one line with the step and its loss.
ITERATION = re.compile(r"iteration\s+(\d+)\s*/\s*(\d+)\s*\|(?:.*?lm loss:\s*(\S+))?")
ENDED = "[after training is done]"
VALIDATION = re.compile(r"validation loss at iteration (\d+)(?: on validation set)? \| lm loss value: (\S+)")


@dataclass
class Curve:
    """Losses of a run, in nats per token, by optimizer step.

    :param losses: training loss. :param heldout: loss on held-out data after the step.
    :param logged: steps in the log, also those without a loss: Megatron has none for a step that it skips.
    :param total_steps: planned steps of the run; None if unknown.
    :param has_ended: True if Megatron's training loop has ended after the last loss, not by a signal or an exit option.
    """

    losses: dict[int, float] = field(default_factory=dict)
    heldout: dict[int, float] = field(default_factory=dict)
    logged: list[int] = field(default_factory=list)
    total_steps: int | None = None
    has_ended: bool = False

    @property
    def last(self) -> int:
        """The last step with a loss. The steps are in order."""
        return next(reversed(self.losses), 0)

    @property
    def interval(self) -> int:
        """The most frequent number of steps between two logged steps; 1 for fewer than two."""
        distances = [after - before for before, after in pairwise(self.logged)]
        return max(statistics.multimode(distances), default=1)

    @property
    def is_done(self) -> bool:
        """True if the loss of the last planned step is known, or if Megatron has ended; it logs no loss between."""
        return self.has_ended or (self.total_steps is not None and self.last >= self.total_steps)

    def final(self, fraction: float) -> tuple[float, int]:
        """Return the mean and the number of the losses in the last ``fraction`` of a finished run.

        Megatron also logs the first step after a restart. That loss is omitted: the next loss includes it.
        """
        start = self.last - max(1, round(fraction * self.last))
        tail = {step: loss for step, loss in self.losses.items() if step > start}
        regular = [loss for step, loss in tail.items() if step % self.interval == 0] or [*tail.values()]
        return statistics.fmean(regular), len(regular)

    def add_line(self, line: str, step: int) -> int:
        """Add the loss in a log line of any framework, and return the step of the next lines.

        After a restart, a repeated step replaces the earlier loss and the losses of all later steps.

        :param step: step of the latest line with a step; 0 before the first.
        :raises LNSConfigError: a loss that is not a finite number, or another number of total steps.
        """
        loss, heldout_loss, total = "", "", ""
        self.has_ended |= ENDED in line
        if match := STEP.search(line):
            step, total = int(match[1]), match[2].strip("?")
        elif match := ITERATION.search(line):
            step, total, loss = int(match[1]), match[2], match[3] or ""
        elif match := VALIDATION.search(line):
            step, heldout_loss = int(match[1]), match[2]
        elif step and (match := METRIC.match(line)):
            if match[1] in LOSSES:
                loss = match[2]
            elif match[1] in HELDOUT:
                heldout_loss = match[2]
        if total:
            if self.total_steps not in (None, int(total)):
                raise LNSConfigError(f"{total} total steps at step {step}, {self.total_steps} before")
            self.total_steps = int(total)
            while self.logged and self.logged[-1] >= step:
                self.logged.pop()
            self.logged.append(step)
        if loss:
            if step <= self.last:
                self.losses = {earlier: value for earlier, value in self.losses.items() if earlier < step}
                self.heldout = {earlier: value for earlier, value in self.heldout.items() if earlier < step}
            self.losses[step], self.has_ended = _parse_loss(loss, step), False
        if heldout_loss:
            self.heldout[step] = _parse_loss(heldout_loss, step)
        return step


def _parse_loss(text: str, step: int) -> float:
    try:
        loss = float(text.replace(",", ""))
    except ValueError:
        raise LNSConfigError(f"damaged log: loss {text!r} at step {step} is not a number") from None
    if not math.isfinite(loss):
        raise LNSConfigError(f"loss is {loss} at step {step}: the run diverged and has no final loss")
    return loss


def curve_of(folder: Path) -> Curve | None:
    """Return the losses of all attempts of a run; None without a log.

    A log is read up to its last complete line, because a kill may cut a number.

    :raises LNSConfigError: errors of :meth:`Curve.add_line`, with the log's name, or a gap between the logged steps.
    """
    curve, logs = Curve(), attempts(folder)
    if not all(path.name.startswith("attempt-") for path in logs):  # logs by hand, before or after the attempts
        logs.sort(key=_first_step)
    for path in logs:
        step = 0
        try:
            for line in _whole_lines(path):
                step = curve.add_line(line, step)
        except LNSConfigError as error:
            raise LNSConfigError(f"{path}: {error}") from None
    _check_gaps(curve, folder)
    return curve if logs else None


def _whole_lines(path: Path) -> list[str]:
    content, _, _ = path.read_bytes().rpartition(b"\n")
    if b"\0" in content:
        raise LNSConfigError("damaged log: it has NUL bytes, which a crash of the machine leaves")
    return ANSI.sub("", content.decode(errors="replace")).splitlines()


def _first_step(path: Path) -> int:
    """Return the first step in a log; 0 without one."""
    text = ANSI.sub("", path.read_text(encoding="utf-8", errors="replace"))
    match = re.search(STEP.pattern, text, re.MULTILINE) or ITERATION.search(text)
    return int(match[1]) if match else 0


def _check_gaps(curve: Curve, folder: Path) -> None:
    """Raise an error for missing steps: a log is missing or damaged, and a mean over the rest would be wrong."""
    interval = curve.interval
    distances = [after - before for before, after in pairwise(curve.logged)]
    neighbours = distances[1:] + distances[-2:-1]  # the next distance, or the one before the last
    for step, distance, neighbour in zip(curve.logged, distances, neighbours, strict=False):
        if distance > 2 * max(interval, neighbour):  # a run may be resumed with another log interval
            raise LNSConfigError(
                f"{folder}: no log line between the steps {step} and {step + distance}, where the usual distance is "
                f"{interval}: restore the missing log, or remove the folder to run again"
            )


def difference_from_saved(run: Run, folder: Path) -> str | None:
    """Describe a difference between ``run`` and the config saved in ``folder``; return None if they agree."""
    engine, saved = run.engine, run.engine.saved_settings(folder)
    if not saved:
        return None
    if problems := arm_problems(run.arm, saved, engine):
        return f"run {run.name} is not its arm: {problems[0]}"
    for key in (*engine.shape_keys.values(), *engine.rate_keys, *run.overrides):
        value = run.settings.get(key)
        if key in saved and engine.compared_keys.match(key) and str(saved[key]) != str(value):
            difference = f"{key} is {saved[key]!r} in the folder, {value!r} in this study"
            return f"{folder}: found a run with other settings: {difference}"
    return None


def read_results(path: Path) -> pd.DataFrame:
    """Read ``results.csv``. :raises LNSConfigError: ``study collect`` has not written it."""
    if not path.is_file():
        raise LNSConfigError(f"{path}: no such file; run `olmo-lns study collect` first")
    return pd.read_csv(path, dtype={"run": str, "size": str, "arm": str})


def collect(study: Study, out: Path, *, allow_missing: bool = False) -> pd.DataFrame:
    """Read every run of a study from ``<out>/<run>/``, and write ``<out>/results.csv``.

    ``loss`` is the mean training loss over the last part of a complete run, in nats per token; other runs have none.
    ``heldout`` is the loss on held-out data after the last step, if the config has an evaluator ``heldout``.

    :param allow_missing: report a run without a log as missing instead of raising an error.
    :returns: one row for each run, in the order of the description.
    :raises LNSConfigError: a missing run, a damaged log, a loss that is not finite, a run that is not the
        description's, or arms that differ in more than the arm; the message names the run and the problem.
    """
    settings: dict[str, Any] = {}
    rows = []
    for run in study.runs:
        folder = out / run.name
        curve = curve_of(folder)
        if curve is None and not allow_missing:
            raise LNSConfigError(f"run {run.name} is missing: no log in {folder}: launch it, or pass --allow-missing")
        if curve and curve.losses:
            if problem := difference_from_saved(run, folder):
                raise LNSConfigError(problem)
            if saved := run.engine.saved_settings(folder):
                settings[run.name] = saved
        rows.append(_row(study, run, curve or Curve(), settings.get(run.name)))
    compare_arms(study.runs, settings)
    table = pd.DataFrame(rows)
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / "results.csv", table.to_csv(index=False))
    return table


def _row(study: Study, run: Run, curve: Curve, saved: dict[str, Any] | None) -> dict[str, Any]:
    shape = run.shape
    if shape.steps and curve.total_steps not in (None, shape.steps):
        raise LNSConfigError(
            f"run {run.name}: the log counts to {curve.total_steps} steps, the study's config to {shape.steps}"
        )
    loss, points = curve.final(study.final_fraction) if curve.is_done else (None, 0)
    status = COMPLETE if curve.is_done else INCOMPLETE if curve.losses else MISSING
    heldout = curve.heldout.get(curve.total_steps or -1)
    if heldout is not None:  # nats per token with a label
        heldout *= run.engine.heldout_correction(saved or run.settings)
    return {
        "run": run.name, "size": run.size, "arm": run.arm, "seed": run.seed, "parameters": shape.parameters,
        "status": status,
        "step": curve.last, "steps": curve.total_steps or shape.steps, "tokens": shape.tokens_per_step * curve.last,
        "loss": loss, "points": points, "heldout": heldout,
        "layers": shape.layers, "width": shape.hidden_size, "learning_rate": shape.learning_rate,
    }  # fmt: skip
