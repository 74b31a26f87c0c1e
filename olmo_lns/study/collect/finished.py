"""Finished runs in a committed table, so that another machine or day continues where this one stopped.

A description names the table (``finished: runs.csv``, beside it). A run is known by what its result follows from:
its settings without names, folders and the machine, what is measured on held-out text, and the content of its data.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, Iterable

from olmo_lns.errors import LNSConfigError, one_line
from olmo_lns.study.collect.results import COMPLETE, Result, from_row, is_table, place
from olmo_lns.study.collect.stamp import environment_of, prepare_data, write_whole
from olmo_lns.study.data.corpora import fingerprint
from olmo_lns.study.plan import compare
from olmo_lns.study.plan.spec import Run, Study

__all__ = ["Finished", "identity", "prepared"]


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
        self.rows: dict[str, Result] = _read(self.path) if self.path else {}

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
        for result in results:
            if result.status == COMPLETE:
                run = runs[result.run]
                known = self.rows.get(key := identity(run), replace(result, source=study.name))
                self.rows[key] = replace(known, **place(run))
        text = io.StringIO()
        writer = csv.DictWriter(text, ["identity", *(field.name for field in fields(Result))], lineterminator="\n")
        writer.writeheader()
        writer.writerows({"identity": key, **asdict(row)} for key, row in self.rows.items())
        write_whole(self.path, text.getvalue())
        return self.path


def _read(path: Path) -> dict[str, Result]:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    if rows and not ("identity" in rows[0] and is_table(set(rows[0]) - {"identity"})):
        raise LNSConfigError(f"{path}: not a table of finished runs: columns {', '.join(rows[0])}")
    try:
        return {row.pop("identity"): from_row(row) for row in rows}
    except (TypeError, ValueError) as error:
        raise LNSConfigError(f"{path}: not a table of finished runs: {one_line(error)}") from error


def prepared(study: Study, out: Path) -> Finished:
    """The table with the data of the study in place, which the identities need."""
    found = Finished(study)
    if found:
        prepare_data(study, out)
    return found
