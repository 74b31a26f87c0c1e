"""Result files, one JSON object per model and diagnostic, and the tables made of them."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, Sequence

from olmo_lns.diagnostics import MEASURES
from olmo_lns.diagnostics.layer_drop import TaskScores
from olmo_lns.errors import LNSError

log = logging.getLogger(__name__)

#: Version of the file layout.
FORMAT = 1
#: Formats of figures.
FORMATS = (".png", ".svg")
#: Settings that change the numbers: a difference is said, because it is then not only the models that differ.
MATTERS = ("sequence_length", "pack", "dtype", "seed")


@dataclass(frozen=True)
class Report:
    """A diagnostic's result with what it was measured on.

    :param what: a key of :data:`~olmo_lns.diagnostics.MEASURES`. :param label: name of the model in figures and tables.
    :param settings: dtype, device, sequence length and so on, as used.
    """

    what: str
    label: str
    model: str
    data: str
    result: Any
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def per_block(self) -> list[float]:
        """The number that stands for the diagnostic in tables, of each block, block 1 first."""
        found: list[float] = getattr(self.result, MEASURES[self.what].numbers)
        return found

    def write(self, path: Path) -> list[Path]:
        """Write ``path`` (JSON) and the same table as CSV beside it; returns both paths."""
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, allow_nan=False)
        path.write_text(text + "\n", encoding="utf-8")
        return [path, write_csv(path.with_suffix(".csv"), self.result.frame())]

    @classmethod
    def read(cls, path: Path) -> Report:
        """:raises LNSError: not a result of this version, or one that something is missing from."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["format"] != FORMAT:
                raise ValueError(f"expected format {FORMAT}, found {content['format']}")
            measure, values = MEASURES[content["what"]], dict(content["result"])
            if "tasks" in values:
                values["tasks"] = {name: TaskScores(**scores) for name, scores in values["tasks"].items()}
            result = measure.loaded(measure.result)(**values)
            found = cls(**{**{f.name: content[f.name] for f in dataclasses.fields(cls)}, "result": result})
            for name, kind in (("label", str), ("model", str), ("data", str), ("settings", dict)):
                if not isinstance(content[name], kind):
                    raise TypeError(f"{name!r} is no {kind.__name__}")
            # Columns of one length, of numbers.
            [float(value) for value in found.per_block], int(result.tokens), result.frame()
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise LNSError(f"{path}: not a whole result file of `olmo-lns analyze`: {error}") from None
        return found


def check_writable(path: Path, suffixes: Sequence[str] = FORMATS) -> None:
    """Find out before the work whether its result can be written; makes the parent folder.

    :param suffixes: of the formats that can be written, those of figures by default.
    :raises LNSError: another suffix, a folder in its place, or no permission.
    :raises OSError: its folder cannot be made.
    """
    if path.suffix not in suffixes:
        raise LNSError(f"{path}: cannot write {path.suffix or 'a file without suffix'}, expected {', '.join(suffixes)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise LNSError(f"{path} cannot be written: {'it is a folder' if path.is_dir() else 'no permission'}")


def write_csv(path: Path, frame: Any) -> Path:
    """A pandas table with floats at 6 significant digits."""
    frame.to_csv(path, index=False, float_format="%.6g", lineterminator="\n")
    return path


def check_labels(names: Sequence[str], given: Sequence[str] | None) -> list[str]:
    """The labels that were ``given``, or the ``names`` that models and files have by themselves.

    :raises LNSError: another number of labels than names, or two equal labels.
    """
    labels = list(given or names)
    if len(labels) != len(names):
        raise LNSError(f"--labels: found {len(labels)} names, expected {len(names)}, one for each model or result")
    if len(set(labels)) != len(labels):
        raise LNSError(f"two of them have one label ({', '.join(labels)}): name them with --labels")
    return labels


def read_results(paths: Sequence[Path], labels: Sequence[str] | None) -> list[Report]:
    """Result files of one diagnostic, under other labels where some are given.

    What differs beside the models is logged as a warning.

    :raises LNSError: of different diagnostics, or the labels are wrong.
    """
    reports = [Report.read(path) for path in paths]
    if len(kinds := sorted({report.what for report in reports})) != 1:
        raise LNSError(f"only results of one diagnostic can be compared: found {', '.join(kinds)}")
    values = {"data": [report.data for report in reports], "tokens": [report.result.tokens for report in reports]}
    values |= {name: [report.settings.get(name) for report in reports] for name in MATTERS}
    values |= {name: [getattr(r.result, name, None) for r in reports] for name in ("variant", "method")}
    for name, found in values.items():
        if any(value != found[0] for value in found):
            log.warning("the results differ in %s: %s", name, ", ".join(map(str, found)))
    names = check_labels([report.label for report in reports], labels)
    return [dataclasses.replace(report, label=name) for name, report in zip(names, reports, strict=True)]


def markdown(reports: Sequence[Report]) -> str:
    """A row a block and a column a model, under a line that says what the numbers are.

    A block that a model has not is an empty cell.
    """
    shows, labels = MEASURES[reports[0].what].shows, [report.label for report in reports]
    columns = zip_longest(*([f"{value:.4g}" for value in report.per_block] for report in reports), fillvalue="")
    rows = [["block", *labels], *([str(block), *cells] for block, cells in enumerate(columns, start=1))]
    head, *lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([shows[0].upper() + shows[1:], "", head, "|" + "---|" * (len(labels) + 1), *lines])
