"""Read the logs and saved settings of runs; write the table of their results."""

from __future__ import annotations

import math
import re
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from olmo_lns.errors import LNSConfigError
from olmo_lns.study.describe import Run, Study
from olmo_lns.study.planning import arm_problems, compare_arms
from olmo_lns.text import write_whole

COMPLETE, INCOMPLETE, MISSING = "complete", "incomplete", "missing"
ANSI = re.compile(r"\x1b\[[0-9;]*m")
#: OLMo and OLMo-core: a line with the step, then lines with its metrics.
STEP = re.compile(r"\[step=(\d+)/(\d+|\?\?\?)(?:,epoch=\d+)?(?:,eta=[^\]]*)?\]\s*$")
METRIC = re.compile(r"^ {4,}(\S.*?)=(\S+)\s*$")
LOSSES = ("train/CrossEntropyLoss", "train/CE loss")
HELDOUT = ("eval/heldout/CrossEntropyLoss", "eval/lm/heldout/CE loss")
#: Megatron: a line with the step and its loss.
ITERATION = re.compile(r"iteration\s+(\d+)\s*/\s*(\d+)\s*\|(?:.*?lm loss:\s*(\S+))?")
VALIDATION = re.compile(r"validation loss at iteration (\d+)(?: on validation set)? \| lm loss value: (\S+)")


@dataclass
class Curve:
    """Loss (nats per token) by optimizer step. :param total: planned steps of the run, None if unknown.

    :param heldout: loss on held-out data, by the step before the measurement.
    """

    losses: dict[int, float] = field(default_factory=dict)
    heldout: dict[int, float] = field(default_factory=dict)
    total: int | None = None

    @property
    def last(self) -> int:
        """The last step with a loss; the steps are in order."""
        return next(reversed(self.losses), 0)

    @property
    def done(self) -> bool:
        """True if the log has the loss of the run's last step."""
        return self.total is not None and self.last >= self.total

    def final(self, fraction: float) -> tuple[float, int]:
        """Return ``(mean, points)`` of the losses in the last ``fraction`` of a finished run."""
        tail = [loss for step, loss in self.losses.items() if step > self.last - max(1, round(fraction * self.last))]
        return statistics.fmean(tail), len(tail)

    def add(self, line: str, step: int) -> int:
        """Add the loss in a line of any framework's log; return the step of the lines after it.

        A step that is repeated after a restart replaces the former one and all later ones.

        :param step: the step of the last line that named one.
        :raises LNSConfigError: a loss that is not a finite number, or another number of total steps.
        """
        trained, heldout, total = "", "", ""
        if match := STEP.search(line):
            step, total = int(match[1]), match[2].strip("?")
        elif match := ITERATION.search(line):
            step, total, trained = int(match[1]), match[2], match[3] or ""
        elif match := VALIDATION.search(line):
            step, heldout = int(match[1]), match[2]
        elif step and (match := METRIC.match(line)) and match[1] in LOSSES:
            trained = match[2]
        elif match and match[1] in HELDOUT:
            heldout = match[2]
        if total:
            if self.total not in (None, int(total)):
                raise LNSConfigError(f"{total} total steps at step {step}, {self.total} before")
            self.total = int(total)
        if trained:
            if step <= self.last:
                self.losses = {known: loss for known, loss in self.losses.items() if known < step}
                self.heldout = {known: loss for known, loss in self.heldout.items() if known < step}
            self.losses[step] = _loss(trained, step)
        if heldout:
            self.heldout[step] = _loss(heldout, step)
        return step


def _loss(text: str, step: int) -> float:
    try:
        loss = float(text.replace(",", ""))
    except ValueError:
        raise LNSConfigError(f"damaged: loss {text!r} at step {step} is not a number") from None
    if not math.isfinite(loss):
        raise LNSConfigError(f"loss is {loss} at step {step}: the run diverged; it has no final loss")
    return loss


def attempts(folder: Path) -> list[Path]:
    """Return the console logs of a run folder, oldest first, by number: ``-99`` before ``-100``."""
    return sorted(folder.glob("*.log"), key=lambda path: (len(path.name), path.name))


def curve_of(folder: Path) -> Curve | None:
    """Return the losses of all attempts of a run; None without a log.

    A log counts up to its last whole line: a kill may cut a number.

    :raises LNSConfigError: errors of :meth:`Curve.add`, with the log's name.
    """
    curve, logs = Curve(), attempts(folder)
    for path in logs:
        text, step = path.read_bytes().rpartition(b"\n")[0].decode(errors="replace"), 0
        try:
            for line in ANSI.sub("", text).splitlines():
                step = curve.add(line, step)
        except LNSConfigError as error:
            raise LNSConfigError(f"{path}: {error}") from None
    return curve if logs else None


def other_run(run: Run, folder: Path) -> str | None:
    """Name the difference between ``run`` and the config saved in its folder; None if there is none."""
    if not (used := run.engine.used(folder)):
        return None
    if problems := arm_problems(run.arm, used, run.engine):
        return f"run {run.name} is not its arm: {problems[0]}"
    keys = [*run.engine.plain_keys.values(), *run.engine.rate_keys, *run.overrides]
    for key in (key for key in keys if key in used and run.engine.compared.match(key)):
        if str(used[key]) != str(run.settings.get(key)):
            there, here = used[key], run.settings.get(key)
            return f"{folder}: found a run with other settings: {key}: {there!r} there, {here!r} in this study"
    return None


def read_results(path: Path) -> pd.DataFrame:
    """Read ``results.csv``. :raises LNSConfigError: ``study collect`` has not written it."""
    if not path.is_file():
        raise LNSConfigError(f"{path}: no such file; run `olmo-lns study collect` first")
    return pd.read_csv(path, dtype={"run": str, "size": str, "arm": str})


def collect(study: Study, out: Path, *, allow_missing: bool = False) -> pd.DataFrame:
    """Read every run of the study from ``<out>/<run>/`` and write ``<out>/results.csv``.

    ``loss`` is the mean over the last part of a run (nats per token), None unless its ``status`` is complete;
    ``heldout`` is the loss on held-out data after the last step, if the config has an evaluator ``heldout``.

    :param allow_missing: report a run without a log as missing, instead of an error.
    :returns: a row for each run, in the description's order.
    :raises LNSConfigError: a missing run, a damaged log, a loss that is not finite, a run that is not the
        description's, or arms that differ in more than the arm; the message names the run and the finding.
    """
    settings: dict[str, Any] = {}
    rows = []
    for run in study.runs:
        folder = out / run.name
        curve = curve_of(folder)
        if curve is None and not allow_missing:
            raise LNSConfigError(f"run {run.name} is missing: no log in {folder}: launch it, or pass --allow-missing")
        if curve and curve.losses:
            if problem := other_run(run, folder):
                raise LNSConfigError(problem)
            if used := run.engine.used(folder):
                settings[run.name] = used
        rows.append(_row(study, run, curve or Curve(), settings.get(run.name)))
    compare_arms(study.runs, settings)
    table = pd.DataFrame(rows)
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / "results.csv", table.to_csv(index=False))
    return table


def _row(study: Study, run: Run, curve: Curve, used: dict[str, Any] | None) -> dict[str, Any]:
    shape = run.shape
    if shape.steps and curve.total not in (None, shape.steps):
        raise LNSConfigError(
            f"run {run.name}: its log counts to {curve.total} steps, the study's config to {shape.steps}"
        )
    loss, points = curve.final(study.final_fraction) if curve.done else (None, 0)
    heldout = curve.heldout.get(curve.total or -1)
    if heldout is not None:  # nats per token with a label
        heldout *= run.engine.padding(used or run.settings)
    return {
        "run": run.name, "size": run.size, "arm": run.arm, "seed": run.seed, "parameters": shape.parameters,
        "status": COMPLETE if curve.done else INCOMPLETE if curve.losses else MISSING,
        "step": curve.last, "steps": curve.total or shape.steps, "tokens": shape.tokens_per_step * curve.last,
        "loss": loss, "points": points, "heldout": heldout,
        "layers": shape.layers, "width": shape.width, "learning_rate": shape.learning_rate,
    }  # fmt: skip
