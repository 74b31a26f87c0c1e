"""Read the logs and saved settings of runs; write the table of their results."""

from __future__ import annotations

import itertools
import math
import re
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Iterable

import pandas as pd

from olmo_lns.errors import LNSConfigError
from olmo_lns.study.describe import Run, Study
from olmo_lns.study.files import make_folder
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

    source: str
    losses: dict[int, float] = field(default_factory=dict)
    heldout: dict[int, float] = field(default_factory=dict)
    total: int | None = None

    @property
    def last(self) -> int:
        return max(self.losses, default=0)

    @property
    def done(self) -> bool:
        """True if the log has the loss of the run's last step."""
        return self.total is not None and self.last >= self.total

    def final(self, fraction: float) -> tuple[float, float, int]:
        """Return ``(mean, standard deviation, points)`` of the losses in the last ``fraction`` of a finished run."""
        tail = [loss for step, loss in self.losses.items() if step > self.last - max(1, round(fraction * self.last))]
        return statistics.fmean(tail), statistics.stdev(tail) if len(tail) > 1 else 0.0, len(tail)


def attempts(folder: Path) -> list[Path]:
    """Return the console logs of a run folder, oldest first, by number: ``-99`` before ``-100``."""
    parts = {path: re.split(r"(\d+)", path.name) for path in folder.glob("*.log")}
    return sorted(parts, key=lambda path: [int(part) if part.isdigit() else part for part in parts[path]])


def read(path: Path) -> Curve:
    """Read the losses in a console log of any framework, up to the last whole line: a kill may cut a number.

    :raises LNSConfigError: the log is damaged, or a loss is not finite.
    """
    raw = path.read_bytes()
    if b"\0" in raw:
        raise LNSConfigError(f"{path}: damaged: it has NUL bytes; restore the log or repeat the run")
    curve, step = Curve(str(path)), None

    def add(to: dict[int, float], at: int, text: str) -> None:
        if to is curve.losses and at <= curve.last:
            raise LNSConfigError(f"{path}: damaged: step {at} comes after step {curve.last}")
        try:
            to[at] = float(text.replace(",", ""))
        except ValueError:
            raise LNSConfigError(f"{path}: damaged: loss {text!r} at step {at} is not a number") from None
        if not math.isfinite(to[at]):
            raise LNSConfigError(f"{path}: loss is {to[at]} at step {at}: the run diverged; it has no final loss")

    for line in ANSI.sub("", raw[: raw.rfind(b"\n") + 1].decode(errors="replace")).splitlines():
        if match := STEP.search(line):
            step, curve.total = int(match[1]), None if match[2] == "???" else int(match[2])
        elif step is not None and (match := METRIC.match(line)) and match[1] in LOSSES:
            add(curve.losses, step, match[2])
        elif step is not None and match and match[1] in HELDOUT:
            add(curve.heldout, step, match[2])
        elif match := ITERATION.search(line):
            curve.total = int(match[2])
            if match[3]:
                add(curve.losses, int(match[1]), match[3])
        elif match := VALIDATION.search(line):
            add(curve.heldout, int(match[1]), match[2])
    return curve


def merge(curves: Iterable[Curve]) -> Curve:
    """Merge the attempts of one run, oldest first; a later attempt replaces repeated steps.

    :raises LNSConfigError: attempts with different total steps, or a gap between them.
    """
    found = Curve("no log")
    for part in (curve for curve in curves if curve.losses):
        if None not in (found.total, part.total) and found.total != part.total:
            raise LNSConfigError(f"{part.source}: {part.total} total steps, {found.total} in the attempt before it")
        for ours, new in ((found.losses, part.losses), (found.heldout, part.heldout)):
            for step in [step for step in ours if step >= min(part.losses)]:
                del ours[step]
            ours |= new
        found.source, found.total = part.source, part.total or found.total
    pairs = list(itertools.pairwise(sorted(found.losses)))
    usual = statistics.median([b - a for a, b in pairs]) if pairs else 0
    for a, b in pairs:
        if b - a > 2 * usual:
            raise LNSConfigError(
                f"{found.source}: damaged: no loss between steps {a} and {b} (usual distance {usual:g})"
            )
    return found


def curve_of(folder: Path) -> Curve | None:
    """Return the losses of all attempts of a run; None without a log.

    :raises LNSConfigError: errors of :func:`read` and :func:`merge`.
    """
    return merge(map(read, logs)) if (logs := attempts(folder)) else None


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
    ``last_loss`` is the latest loss, also of an incomplete run; ``heldout`` is the loss on held-out data after the last
    step, if the config has an evaluator ``heldout``.

    :param allow_missing: report a run without a log as missing, instead of an error.
    :returns: a row for each run, in the description's order.
    :raises LNSConfigError: a missing run, a damaged log, a loss that is not finite, a run that is not the
        description's, or arms that differ in more than the arm; the message names the run and the finding.
    """
    settings: dict[str, Any] = {}
    rows = []
    for run in study.runs:
        curve = curve_of(out / run.name)
        if curve is None and not allow_missing:
            raise LNSConfigError(
                f"run {run.name} is missing: no log in {out / run.name}: launch it, or pass --allow-missing"
            )
        if curve and curve.losses:
            if problem := other_run(run, out / run.name):
                raise LNSConfigError(problem)
            if used := run.engine.used(out / run.name):
                settings[run.name] = used
        rows.append(_row(study, run, curve or Curve("no log"), settings.get(run.name)))
    compare_arms(study.runs, settings)
    table = pd.DataFrame(rows)
    make_folder(out)
    write_whole(out / "results.csv", table.to_csv(index=False))
    return table


def _row(study: Study, run: Run, curve: Curve, used: dict[str, Any] | None) -> dict[str, Any]:
    shape = run.shape
    if shape.steps and curve.total not in (None, shape.steps):
        raise LNSConfigError(
            f"run {run.name}: its log counts to {curve.total} steps, the study's config to {shape.steps}: "
            "expected a run of this study"
        )
    mean, std, points = curve.final(study.final_fraction) if curve.done else (None, None, 0)
    heldout = curve.heldout.get(curve.total or -1)
    if heldout is not None:  # nats per token with a label
        heldout *= run.engine.padding(used or run.settings)
    return {
        **{"run": run.name, "size": run.size, "arm": run.arm, "seed": run.seed, "parameters": shape.parameters},
        "status": COMPLETE if curve.done else INCOMPLETE if curve.losses else MISSING,
        **{"step": curve.last, "steps": curve.total or shape.steps, "tokens": shape.tokens_per_step * curve.last},
        **{"loss": mean, "loss_std": std, "points": points, "last_loss": curve.losses.get(curve.last)},
        **{"heldout": heldout, "source": curve.source},
        **{"layers": shape.layers, "width": shape.width, "learning_rate": shape.learning_rate},
    }
