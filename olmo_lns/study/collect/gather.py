"""Gather the runs of a study into one table, and refuse a study whose arms differ in more than the arm.

A description may name a committed table of finished runs (``finished: runs.csv``, beside it), so that another machine
or day continues where this one stopped. A run is identified there by its settings without names, folders and the
machine, by what is measured on held-out text, and by the content of its data.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
from dataclasses import MISSING as MISSING_DEFAULT
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Iterable, Mapping, Sequence

from olmo_lns.errors import LNSConfigError, one_line
from olmo_lns.study import files
from olmo_lns.study.collect.folder import STAMP, attempts, curve_of, environment_of, prepare_data, record
from olmo_lns.study.data.corpora import fingerprint
from olmo_lns.study.engines.base import Curve
from olmo_lns.study.plan.check import compare_arms, settings_identity
from olmo_lns.study.plan.spec import Run, Study

COMPLETE, INCOMPLETE, MISSING = "complete", "incomplete", "missing"


@dataclass(frozen=True)
class Result:
    """One run. ``loss`` (mean over the last part of the run, nats per token) is None unless ``status`` is complete.

    :param last_loss: the latest loss seen, of an incomplete run too.
    :param heldout: loss on held-out data after the last step, where the config has an evaluator ``heldout``.
    :param cpu_s: CPU seconds, where ``study launch --run`` ran it.
    :param layers, width, learning_rate: its place in a study of rates and depths; None in tables of before.
    """

    run: str
    size: str
    arm: str
    seed: int
    parameters: int
    status: str
    step: int
    steps: int
    tokens: int
    loss: float | None
    loss_std: float | None
    points: int
    last_loss: float | None
    cpu_s: float | None
    source: str
    heldout: float | None = None
    layers: int | None = None
    width: int | None = None
    learning_rate: float | None = None


#: Column -> type. A column with a default may be missing.
KINDS = {field.name: str(field.type) for field in fields(Result)}
NEEDED = {field.name for field in fields(Result) if field.default is MISSING_DEFAULT}


def place(run: Run) -> dict[str, Any]:
    """Depth, width and learning rate of a run, as fields of its result."""
    shape = run.shape
    return {"layers": shape.layers, "width": shape.width, "learning_rate": shape.learning_rate}


def write_results(results: Sequence[Result], path: Path, identities: Sequence[str] | None = None) -> None:
    """Whole or not at all. :param identities: the first column, of a table of finished runs."""
    text, rows = io.StringIO(), [asdict(result) for result in results]
    if identities is not None:
        rows = [{"identity": known, **row} for known, row in zip(identities, rows, strict=True)]
    writer = csv.DictWriter(text, [*([] if identities is None else ["identity"]), *KINDS], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    files.write_whole(path, text.getvalue())


def read_results(path: Path) -> list[Result]:
    """:raises LNSConfigError: no such file, or not one that ``study collect`` wrote."""
    if not path.is_file():
        raise LNSConfigError(f"{path}: not there; run `olmo-lns study collect` first")
    return [result for _, result in _read(path, "not a table of `olmo-lns study collect`")]


def _read(path: Path, otherwise: str, *first: str) -> list[tuple[Mapping[str, str], Result]]:
    """Each row as it is, and as a result."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    if rows and not {*first, *NEEDED} <= set(rows[0]) <= {*first, *KINDS}:
        raise LNSConfigError(f"{path}: {otherwise}: columns {', '.join(map(str, rows[0]))}")
    try:
        return [(row, Result(**{k: _value(KINDS[k], text) for k, text in row.items() if k in KINDS})) for row in rows]
    except (TypeError, ValueError) as error:
        raise LNSConfigError(f"{path}: {otherwise}: {one_line(error)}") from error


def _value(kind: str, text: str) -> Any:
    if kind == "str":
        return text
    if not text and kind.endswith("None"):
        return None
    return float(text) if kind.startswith("float") else int(text)


def identity(run: Run) -> str:
    """16 hex digits, the same wherever and under whatever name the run is made. The data files must be there."""
    known: dict[str, Any] = {
        "framework": run.engine.name,
        "settings": settings_identity(run.settings, run.engine),
        "heldout": run.engine.heldout(run.settings),
        "data": [part["sha256"] for part in fingerprint(run.engine.data_files(run.settings))],
        "environment": environment_of(),
    }
    if run.start is not None:
        known["start"] = [identity(run.start[0]), run.start[1]]
    return hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest()[:16]


class Finished:
    """The table of a study; empty, and never written, where the description names none.

    :raises LNSConfigError: the description names a file that does not exist, or is another kind of table.
    """

    def __init__(self, study: Study) -> None:
        self.path = study.finished
        if self.path and not self.path.is_file():
            raise LNSConfigError(
                f"finished: {self.path}: no such table: remove the line from the description or name a table "
                "that is there; an empty file begins a new one"
            )
        rows = _read(self.path, "not a table of finished runs", "identity") if self.path else []
        self.rows = {row["identity"]: result for row, result in rows}

    def __bool__(self) -> bool:
        return self.path is not None

    def result(self, run: Run) -> Result | None:
        """The table's result of this run, under the run's present name; None where it has none."""
        if not self.rows or (row := self.rows.get(identity(run))) is None:
            return None
        return replace(row, run=run.name, size=run.size, arm=run.arm, seed=run.seed, **place(run))

    def add(self, study: Study, results: Iterable[Result]) -> Path | None:
        """Add the complete results to the table. A result that is there keeps its numbers; :func:`place` is renewed.

        :returns: the table, or None where the description names none.
        """
        if self.path is None:
            return None
        runs = {run.name: run for run in study.runs}
        for result in (result for result in results if result.status == COMPLETE):
            known = self.rows.get(key := identity(runs[result.run]), replace(result, source=study.name))
            self.rows[key] = replace(known, **place(runs[result.run]))
        write_results(list(self.rows.values()), self.path, list(self.rows))
        return self.path


def collect(study: Study, out: Path, *, allow_missing: bool = False) -> list[Result]:
    """Read every run of the study from ``<out>/<run>/``: its console logs, or CSV files where it has none.

    A run of which nothing is there is taken from the description's table of finished runs, if it has it.

    :param allow_missing: report a run of which nothing was found as missing, instead of refusing the study.
    :raises LNSConfigError: a missing run, a damaged log, a loss that is not finite, or arms that differ in more
        than the arm; each with the run and what was found.
    """
    if table := Finished(study):
        prepare_data(study, out)  # its runs are known by their data
    identities: dict[str, dict[str, Any]] = {}
    results = []
    for run in study.runs:
        folder = out / run.name
        curve = curve_of(folder)
        if curve is None and (known := table.result(run)) is not None:
            results.append(known)
            continue
        if curve is None:
            if not allow_missing:
                raise LNSConfigError(f"run {run.name} is missing: nothing in {folder}: launch it, or --allow-missing")
            curve = Curve({}, None, "no log")
        elif curve.losses and (identity := _used(run, folder)) is not None:  # no loss, nothing to compare
            identities[run.name] = identity
        results.append(_result(study, run, curve, folder))
    compare_arms(study.runs, identities)
    return results


def _used(run: Run, folder: Path) -> dict[str, Any] | None:
    """What the run really used: the config that OLMo saved or the arguments that Megatron printed, else its stamp."""
    stamp, key = folder / STAMP, run.engine.start[0]
    started = record(stamp, "settings") if stamp.is_file() else {}
    settings: dict[str, Any] = run.engine.used(folder) or started.get("settings", {})
    if run.start_checkpoint and str(settings.get(key)).endswith(f"/{run.start_checkpoint}"):
        settings = settings | {key: None}  # the study's own trunk, which each arm has of its own
    if not settings:
        return None
    return {"settings": settings, "data": started.get("data"), "environment": started.get("environment", {})}


def _result(study: Study, run: Run, curve: Curve, folder: Path) -> Result:
    shape = run.shape
    if curve.total not in (None, shape.steps):
        raise LNSConfigError(
            f"run {run.name}: its log counts to {curve.total} steps, the study's config to {shape.steps}: "
            "not a run of this study"
        )
    status, mean, std, points = MISSING if curve.source == "no log" and not curve.losses else INCOMPLETE, None, None, 0
    if curve.losses and curve.last >= shape.steps:
        status, (mean, std, points) = COMPLETE, curve.final(study.final_fraction, shape.steps)
    # Nats per token with a label.
    heldout = curve.heldout.get(shape.steps)
    if heldout is not None:
        heldout *= run.engine.padding(run.engine.used(folder) or run.settings)
    return Result(
        run=run.name,
        size=run.size,
        arm=run.arm,
        seed=run.seed,
        parameters=shape.parameters,
        status=status,
        step=curve.last,
        steps=shape.steps,
        tokens=shape.tokens_per_step * curve.last,
        loss=mean,
        loss_std=std,
        points=points,
        last_loss=curve.losses[curve.last] if curve.losses else None,
        cpu_s=_cpu(folder),
        source=curve.source,
        heldout=heldout,
        **place(run),
    )


def _cpu(folder: Path) -> float | None:
    """CPU seconds of all attempts; None if the end of one was not seen (the launcher was killed)."""
    costs = [path.with_suffix(".json") for path in attempts(folder)]
    seconds = [record(path).get("cpu_s") if path.is_file() else None for path in costs]
    known = [float(each) for each in seconds if each is not None]
    return round(sum(known), 1) if known and len(known) == len(costs) else None
