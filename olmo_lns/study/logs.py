"""Loss curves out of what a run leaves behind: OLMo's and Megatron's console logs, CSV, TensorBoard, W&B exports."""

from __future__ import annotations

import csv
import itertools
import math
import re
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Iterable

from olmo_lns.errors import LNSConfigError

__all__ = ["Curve", "megatron_arguments", "merge", "read", "read_wandb_export"]

OLMO_LOSS = "train/CrossEntropyLoss"
LOSS_COLUMNS = (OLMO_LOSS, "lm loss", "loss", "train_loss", "train/loss")
STEP_COLUMNS = ("step", "Step", "_step", "iteration", "global_step", "trainer/global_step")
ANSI = re.compile(r"\x1b\[[0-9;]*m")
OLMO_STEP = re.compile(r"\[step=(\d+)/(\d+)(?:,epoch=\d+)?\]\s*$")
OLMO_METRIC = re.compile(r"^ {4,}(\S+)=(\S+)\s*$")
MEGATRON_STEP = re.compile(r"iteration\s+(\d+)\s*/\s*(\d+)\s*\|(.*)")
MEGATRON_LOSS = re.compile(r"lm loss:\s*(\S+)")
MEGATRON_ARGUMENT = re.compile(r"^(?:\[?\w*\d+\]?:\s*)?\s{2}([a-z0-9_]+) \.{2,} (.*)$")


@dataclass(frozen=True)
class Curve:
    """Loss (nats per token) by optimizer step. :param total: the steps the run was to make, None where unknown."""

    losses: dict[int, float]
    total: int | None
    source: str

    @property
    def last(self) -> int:
        return max(self.losses, default=0)

    def final(self, fraction: float, steps: int) -> tuple[float, float, int]:
        """``(mean, standard deviation, number of points)`` of the losses in the last ``fraction`` of ``steps``."""
        tail = [loss for step, loss in self.losses.items() if step > steps - max(1, round(fraction * steps))]
        if not tail:
            raise LNSConfigError(f"{self.source}: no loss in the last {fraction:.0%} of {steps} steps: log more often")
        return statistics.fmean(tail), statistics.stdev(tail) if len(tail) > 1 else 0.0, len(tail)


def read(path: Path) -> Curve:
    """One file, its kind by name and content.

    :raises LNSConfigError: a file that is no log, is damaged, or holds a loss that is not finite.
    """
    if path.name.startswith("events.out.tfevents"):
        return _checked(_tensorboard(path))
    text = _text(path)
    if path.suffix == ".csv":
        return _checked(_csv(path))
    if "[step=" in text:
        return _checked(_olmo(path, text))
    if MEGATRON_STEP.search(text):
        return _checked(_megatron(path, text))
    return Curve({}, None, str(path))  # killed before its first step


def _text(path: Path) -> str:
    raw = path.read_bytes()
    if b"\0" in raw:
        raise LNSConfigError(f"{path}: damaged: NUL bytes at offset {raw.index(0)}; restore it or rerun the run")
    try:
        return ANSI.sub("", raw.decode())
    except UnicodeDecodeError as error:
        raise LNSConfigError(f"{path}: damaged: not text at byte {error.start}; restore it or rerun the run") from error


def _number(path: Path, step: int, text: str) -> float:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        raise LNSConfigError(f"{path}: damaged: loss {text!r} at step {step} is not a number") from None


def _olmo(path: Path, text: str) -> Curve:
    losses: dict[int, float] = {}
    total = step = None
    lines = text.splitlines()
    for line in lines:
        if match := OLMO_STEP.search(line):
            _in_order(path, losses, step)
            step, total = int(match[1]), int(match[2])
        elif step is not None and (match := OLMO_METRIC.match(line)) and match[1] == OLMO_LOSS:
            if losses and step <= max(losses):
                raise LNSConfigError(f"{path}: damaged: step {step} comes after step {max(losses)}")
            losses[step] = _number(path, step, match[2])
    # The last step may have been cut by a kill: only an earlier one without a loss is damage (_in_order).
    return Curve(losses, total, str(path))


def _in_order(path: Path, losses: dict[int, float], step: int | None) -> None:
    if step is not None and step not in losses:
        raise LNSConfigError(f"{path}: damaged: step {step} has no {OLMO_LOSS}")


def _megatron(path: Path, text: str) -> Curve:
    losses: dict[int, float] = {}
    total = None
    for match in MEGATRON_STEP.finditer(text):
        step, total = int(match[1]), int(match[2])
        loss = MEGATRON_LOSS.search(match[3])
        if loss is None:
            if text.endswith(match[0]):
                break  # cut by a kill
            raise LNSConfigError(f"{path}: damaged: iteration {step} has no 'lm loss'")
        if losses and step <= max(losses):
            raise LNSConfigError(f"{path}: damaged: iteration {step} comes after iteration {max(losses)}")
        losses[step] = _number(path, step, loss[1])
    return Curve(losses, total, str(path))


def megatron_arguments(path: Path) -> dict[str, str]:
    """The ``arguments`` block that Megatron prints, as text; empty when the log has none."""
    found: dict[str, str] = {}
    inside = False
    for line in _text(path).splitlines():
        if "- arguments -" in line:
            inside = True
        elif "- end of arguments -" in line:
            return found
        elif inside and (match := MEGATRON_ARGUMENT.match(line)):
            found[match[1]] = match[2].strip()
    return found


def _csv(path: Path) -> Curve:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    columns = list(rows[0]) if rows else []
    step = next((c for c in STEP_COLUMNS if c in columns), None)
    loss = next((c for c in LOSS_COLUMNS if c in columns), None)
    if step is None or loss is None:
        raise LNSConfigError(f"{path}: no step or loss column among {columns}; expected {OLMO_LOSS!r} or 'lm loss'")
    pairs = [(int(float(row[step])), row[loss]) for row in rows if row[loss]]
    return Curve({s: _number(path, s, value) for s, value in pairs}, None, str(path))


def _tensorboard(path: Path) -> Curve:
    try:
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
        from tensorboard.util import tensor_util
    except ImportError as error:
        raise LNSConfigError(f"{path}: reading it needs tensorboard: pip install 'olmo-lns[study]'") from error
    losses: dict[int, float] = {}
    for event in EventFileLoader(str(path)).Load():
        for value in event.summary.value:
            if value.tag in LOSS_COLUMNS:
                losses[event.step] = float(tensor_util.make_ndarray(value.tensor).item())
    return Curve(losses, None, str(path))


def read_wandb_export(path: Path) -> dict[str, Curve]:
    """A chart exported by W&B as CSV: a ``Step`` column and one ``<run> - <metric>`` column a run."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    step = next((c for c in STEP_COLUMNS if rows and c in rows[0]), None)
    if step is None:
        raise LNSConfigError(f"{path}: not a W&B chart export: no 'Step' column")
    curves = {}
    for column in rows[0]:
        run, _, metric = column.rpartition(" - ")
        if run and metric in LOSS_COLUMNS:
            pairs = [(int(float(row[step])), row[column]) for row in rows if row[column]]
            losses = {s: _number(path, s, text) for s, text in pairs}
            curves[run] = _checked(Curve(losses, None, str(path)))
    if not curves:
        raise LNSConfigError(f"{path}: no '<run> - {OLMO_LOSS}' or '<run> - lm loss' column")
    return curves


def _checked(curve: Curve) -> Curve:
    for step, loss in curve.losses.items():
        if not math.isfinite(loss):
            raise LNSConfigError(
                f"{curve.source}: loss is {loss} at step {step}: the run diverged; it has no final loss"
            )
    return curve


def merge(curves: Iterable[Curve]) -> Curve:
    """The attempts of one run, oldest first: a later attempt replaces the steps it repeats.

    :raises LNSConfigError: attempts with different total steps, or a gap between them.
    """
    parts = [curve for curve in curves if curve.losses]
    if not parts:
        return Curve({}, None, "no log")
    totals = {part.total for part in parts if part.total is not None}
    if len(totals) > 1:
        raise LNSConfigError(
            f"{parts[-1].source}: {sorted(totals)} total steps in the attempts of one run: expected one"
        )
    losses: dict[int, float] = {}
    for part in parts:
        first = min(part.losses)
        losses = {step: loss for step, loss in losses.items() if step < first} | part.losses
    _no_gap(losses, parts[-1].source)
    return Curve(dict(sorted(losses.items())), totals.pop() if totals else None, parts[-1].source)


def _no_gap(losses: dict[int, float], source: str) -> None:
    steps = sorted(losses)
    gaps = [b - a for a, b in itertools.pairwise(steps)]
    if not gaps:
        return
    usual = statistics.median(gaps)
    for (a, b), gap in zip(itertools.pairwise(steps), gaps, strict=True):
        if gap > 2 * usual:
            raise LNSConfigError(f"{source}: damaged: no loss between steps {a} and {b} (usual distance {usual:g})")
