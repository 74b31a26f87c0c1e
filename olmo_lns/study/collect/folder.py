"""Files in a run's folder: ``run.json`` (what it was started with), and for each attempt a log and a record."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import os
import re
import statistics
from pathlib import Path
from typing import Any, Iterable

from olmo_lns import __version__
from olmo_lns.environment import INITIALIZATION
from olmo_lns.errors import LNSConfigError, one_line
from olmo_lns.study.data.corpora import BUILT, fingerprint
from olmo_lns.study.engines import ENGINES, Run
from olmo_lns.study.engines.base import Curve, number, text_of
from olmo_lns.study.files import write_whole
from olmo_lns.study.plan.spec import Study

STAMP = "run.json"
LOSS_COLUMNS = (*(engine.loss for engine in ENGINES.values()), "loss", "train_loss", "train/loss")
STEP_COLUMNS = ("step", "Step", "_step", "iteration", "global_step", "trainer/global_step")


def environment_of() -> dict[str, str]:
    """Variables that are set and would change a run."""
    return {name: os.environ[name] for name in (INITIALIZATION,) if os.environ.get(name)}


def prepare_data(study: Study, out: Path) -> None:
    """Build the corpus where the study names one that is built here; a no-op otherwise, and when it is there."""
    if study.data in BUILT:
        BUILT[study.data](out / "data")


def stamp(study: Study, run: Run, out: Path) -> Path:
    """Write ``run.json``: the identity the run is started with. A stamp that is there must agree.

    :raises LNSConfigError: the folder holds a run started with other settings or data.
    """
    settings = json.loads(json.dumps(run.settings, default=str))
    data = run.engine.data_files(settings)
    decisive = {
        "settings": settings,
        "data": fingerprint(data) if data else None,
        "environment": environment_of(),
        "start": run.start_checkpoint,
    }
    path = out / run.name / STAMP
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_file():
        names = {"study": study.name, "name": run.name, "size": run.size, "arm": run.arm, "seed": run.seed}
        names |= {"framework": run.engine.name, "version": __version__}
        write_whole(path, json.dumps({**names, **decisive}, indent=1) + "\n")
        return path
    found = record(path)
    for kind, new in decisive.items():
        if (old := found.get(kind)) != new:
            where = f"other {kind}"
            if isinstance(old, dict) and isinstance(new, dict):
                key = next(k for k in sorted({*old, *new}) if old.get(k) != new.get(k))
                where, old, new = f"{where}: {key}", old.get(key), new.get(key)
            raise LNSConfigError(
                f"{path}: was started with {where}: {old!r} then, {new!r} now; use another --out, or remove the folder "
                "to start it anew"
            )
    return path


def attempts(folder: Path, pattern: str = "attempt-*.log") -> list[Path]:
    """The console logs of a run folder, oldest first: by the numbers in their names, ``-99`` before ``-100``."""
    parts = {path: re.split(r"(\d+)", str(path)) for path in folder.glob(pattern)}
    return sorted(parts, key=lambda path: [int(part) if part.isdigit() else part for part in parts[path]])


def record(path: Path, *keys: str) -> dict[str, Any]:
    """A JSON record of ours: ``run.json``, or ``attempt-NN.json`` (how an attempt ended and what it cost).

    :raises LNSConfigError: it cannot be read, or lacks one of ``keys``.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError(f"a {type(found).__name__}, expected a mapping")
        if lacking := [key for key in keys if key not in found]:
            raise ValueError(f"no {lacking[0]!r} in it")
    except (OSError, ValueError) as error:
        raise LNSConfigError(f"{path}: damaged: {one_line(error)}: restore it, or remove it to go on without") from None
    return found


def curve_of(folder: Path) -> Curve | None:
    """The losses of all attempts of a run, from its console logs, or without any from its CSV files; None without both.

    :raises LNSConfigError: as :func:`read` and :func:`merge`.
    """
    for pattern in ("*.log", "*.txt", "*.csv"):
        if found := attempts(folder, pattern):
            return merge(map(read, found))
    return None


def read(path: Path) -> Curve:
    """The losses in one file: a CSV, or the console log of a framework, which is known by its content.

    :raises LNSConfigError: the file is damaged, a CSV lacks a column, or a loss is not finite.
    """
    text = text_of(path)
    if path.suffix == ".csv":
        curve = _csv(path, text)
    else:
        known = (engine.curve(path, text) for engine in ENGINES.values())
        curve = next((found for found in known if found is not None), Curve({}, None, str(path)))
    for step, loss in curve.losses.items():
        if not math.isfinite(loss):
            raise LNSConfigError(f"{path}: loss is {loss} at step {step}: the run diverged; it has no final loss")
    return curve


def _csv(path: Path, text: str) -> Curve:
    rows = list(csv.DictReader(io.StringIO(text)))
    columns = list(rows[0]) if rows else []
    step, loss = (next((c for c in known if c in columns), None) for known in (STEP_COLUMNS, LOSS_COLUMNS))
    if step is None or loss is None:
        expected = f"'step' and one of {', '.join(map(repr, LOSS_COLUMNS))}"
        raise LNSConfigError(f"{path}: no step or loss column among {columns}; expected {expected}")
    numbered = [(int(float(row[step])), row[loss]) for row in rows if row[loss]]
    return Curve({s: number(path, s, value) for s, value in numbered}, None, str(path))


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
