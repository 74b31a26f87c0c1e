"""The result of one run; the table of them that ``study collect`` writes; and a committed table of finished runs.

A description names the latter (``finished: runs.csv``, beside it), so that another machine or day continues where this
one stopped. A run is known there by what its result follows from: its settings without names, folders and the machine,
what is measured on held-out text, and the content of its data.
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
from olmo_lns.study.collect.stamp import environment_of
from olmo_lns.study.data.corpora import fingerprint
from olmo_lns.study.plan import compare
from olmo_lns.study.plan.spec import Run, Study

__all__ = [
    "COMPLETE",
    "INCOMPLETE",
    "MISSING",
    "Finished",
    "Result",
    "identity",
    "place",
    "read_results",
    "write_results",
]

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


#: Column -> type; a column that came later may be missing.
KINDS = {field.name: str(field.type) for field in fields(Result)}
NEEDED = {field.name for field in fields(Result) if field.default is MISSING_DEFAULT}


def place(run: Run) -> dict[str, Any]:
    """Where a run stands in a study of rates and depths, as fields of its result."""
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
        "settings": compare.identity(run.settings, run.engine),
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
        """What the table has of this run, under the name it has here."""
        if not self.rows or (row := self.rows.get(identity(run))) is None:
            return None
        return replace(row, run=run.name, size=run.size, arm=run.arm, seed=run.seed, **place(run))

    def add(self, study: Study, results: Iterable[Result]) -> Path | None:
        """Write the complete ones of ``results`` into the table; of those that are in it the place alone is renewed.

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
