"""The result of one run, and the table of them that ``study collect`` writes."""

from __future__ import annotations

import csv
from dataclasses import MISSING as MISSING_DEFAULT
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Collection, Mapping, Sequence

from olmo_lns.errors import LNSConfigError
from olmo_lns.study.engines import Run

__all__ = [
    "COMPLETE",
    "INCOMPLETE",
    "MISSING",
    "Result",
    "from_row",
    "is_table",
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

    @property
    def variant(self) -> str:
        """What the name of its size has after ``_``: ``trunk`` at a constant rate, or a control's name."""
        return self.size.partition("_")[2]


def write_results(results: Sequence[Result], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Result)])
        writer.writeheader()
        writer.writerows(asdict(result) for result in results)


#: Column -> type, as written above.
KINDS = {field.name: str(field.type) for field in fields(Result)}


def read_results(path: Path) -> list[Result]:
    """:raises LNSConfigError: no such file, or not one that ``study collect`` wrote."""
    if not path.is_file():
        raise LNSConfigError(f"{path}: not there; run `olmo-lns study collect` first")
    with path.open(newline="") as file:
        table = list(csv.DictReader(file))
    if table and not is_table(set(table[0])):
        raise LNSConfigError(f"{path}: not a table of `olmo-lns study collect`: columns {', '.join(table[0])}")
    return [from_row(row) for row in table]


def is_table(columns: Collection[str]) -> bool:
    """Whether a CSV file with these columns holds results; a column that came later may be missing."""
    needed = {field.name for field in fields(Result) if field.default is MISSING_DEFAULT}
    return needed <= set(columns) <= set(KINDS)


def place(run: Run) -> dict[str, Any]:
    """Where a run stands in a study of rates and depths, as fields of its result."""
    shape = run.shape
    return {"layers": shape.layers, "width": shape.width, "learning_rate": shape.learning_rate}


def from_row(row: Mapping[str, str]) -> Result:
    """A row of a CSV file."""
    return Result(**{key: _value(KINDS[key], text) for key, text in row.items()})


def _value(kind: str, text: str) -> Any:
    if kind == "float | None":
        return float(text) if text else None
    if kind == "int | None":
        return int(text) if text else None
    return int(text) if kind == "int" else text
