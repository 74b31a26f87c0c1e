"""Loss curves out of what a run leaves behind: OLMo's and Megatron's console logs, CSV, TensorBoard, W&B exports."""

from __future__ import annotations

import csv
import io
import itertools
import math
import statistics
from pathlib import Path
from typing import Iterable

from olmo_lns.errors import LNSConfigError
from olmo_lns.study.engines import ENGINES
from olmo_lns.study.engines.base import Curve, number, text_of

__all__ = ["merge", "read", "read_wandb_export"]

LOSS_COLUMNS = (*(engine.loss for engine in ENGINES.values()), "loss", "train_loss", "train/loss")
STEP_COLUMNS = ("step", "Step", "_step", "iteration", "global_step", "trainer/global_step")


def read(path: Path) -> Curve:
    """One file, its kind by name and content.

    :raises LNSConfigError: a file that is no log, is damaged, or holds a loss that is not finite.
    """
    if path.name.startswith("events.out.tfevents"):
        return _checked(_tensorboard(path))
    text = text_of(path)
    if path.suffix == ".csv":
        return _checked(next(iter(_table(path, text).values())))
    for engine in ENGINES.values():
        if (curve := engine.curve(path, text)) is not None:
            return _checked(curve)
    return Curve({}, None, str(path))  # killed before its first step


def read_wandb_export(path: Path) -> dict[str, Curve]:
    """Run -> curve of a chart exported by W&B: a ``Step`` column and one ``<run> - <metric>`` column a run."""
    found = _table(path, path.read_text(encoding="utf-8"))
    return {column.rpartition(" - ")[0]: _checked(curve) for column, curve in found.items()}


def _table(path: Path, text: str) -> dict[str, Curve]:
    """Column -> curve of each column of losses in a CSV file."""
    rows = list(csv.DictReader(io.StringIO(text)))
    columns = list(rows[0]) if rows else []
    step = next((c for c in STEP_COLUMNS if c in columns), None)
    losses = [c for loss in LOSS_COLUMNS for c in columns if c.rpartition(" - ")[2] == loss]
    if step is None or not losses:
        expected = f"'Step' and {' or '.join(map(repr, LOSS_COLUMNS[:3]))}, of W&B with '<run> - ' before it"
        raise LNSConfigError(f"{path}: no step or loss column among {columns}; expected {expected}")
    steps = [int(float(row[step])) for row in rows]
    return {
        column: Curve(
            {s: number(path, s, row[column]) for s, row in zip(steps, rows, strict=True) if row[column]},
            None,
            str(path),
        )
        for column in losses
    }


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
    source, totals = parts[-1].source, {part.total for part in parts if part.total is not None}
    if len(totals) > 1:
        raise LNSConfigError(f"{source}: {sorted(totals)} total steps in the attempts of one run: expected one")
    losses: dict[int, float] = {}
    heldout: dict[int, float] = {}
    for part in parts:
        first = min(part.losses)
        losses = {step: loss for step, loss in losses.items() if step < first} | part.losses
        heldout = {step: loss for step, loss in heldout.items() if step < first} | part.heldout
    pairs = list(itertools.pairwise(sorted(losses)))
    usual = statistics.median([b - a for a, b in pairs]) if pairs else 0
    for a, b in pairs:
        if b - a > 2 * usual:
            raise LNSConfigError(f"{source}: damaged: no loss between steps {a} and {b} (usual distance {usual:g})")
    return Curve(dict(sorted(losses.items())), totals.pop() if totals else None, source, heldout)
