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
from olmo_lns.study.engines import ENGINES, OLMO
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
        return _checked(_csv(path, text))
    for engine in ENGINES.values():
        if (curve := engine.curve(path, text)) is not None:
            return _checked(curve)
    return Curve({}, None, str(path))  # killed before its first step


def _csv(path: Path, text: str) -> Curve:
    rows = list(csv.DictReader(io.StringIO(text)))
    columns = list(rows[0]) if rows else []
    step = next((c for c in STEP_COLUMNS if c in columns), None)
    loss = next((c for c in LOSS_COLUMNS if c in columns), None)
    if step is None or loss is None:
        raise LNSConfigError(
            f"{path}: no step or loss column among {columns}; expected {' or '.join(map(repr, LOSS_COLUMNS[:2]))}"
        )
    pairs = [(int(float(row[step])), row[loss]) for row in rows if row[loss]]
    return Curve({s: number(path, s, value) for s, value in pairs}, None, str(path))


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
            losses = {s: number(path, s, text) for s, text in pairs}
            curves[run] = _checked(Curve(losses, None, str(path)))
    if not curves:
        raise LNSConfigError(f"{path}: no '<run> - {OLMO.loss}' or '<run> - lm loss' column")
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
    heldout: dict[int, float] = {}
    for part in parts:
        first = min(part.losses)
        losses = {step: loss for step, loss in losses.items() if step < first} | part.losses
        heldout = {step: loss for step, loss in heldout.items() if step < first} | part.heldout
    _no_gap(losses, parts[-1].source)
    return Curve(dict(sorted(losses.items())), totals.pop() if totals else None, parts[-1].source, heldout)


def _no_gap(losses: dict[int, float], source: str) -> None:
    steps = sorted(losses)
    gaps = [b - a for a, b in itertools.pairwise(steps)]
    if not gaps:
        return
    usual = statistics.median(gaps)
    for (a, b), gap in zip(itertools.pairwise(steps), gaps, strict=True):
        if gap > 2 * usual:
            raise LNSConfigError(f"{source}: damaged: no loss between steps {a} and {b} (usual distance {usual:g})")
