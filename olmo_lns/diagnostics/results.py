"""Result files, one JSON object per model and diagnostic, and the tables made of them."""

from __future__ import annotations

import csv
import dataclasses
import json
import logging
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, ClassVar, Iterable, Mapping, Protocol, Sequence

from olmo_lns.diagnostics.angular import AngularResult
from olmo_lns.diagnostics.gradnorm import GradNormResult
from olmo_lns.diagnostics.jacobian import JacobianResult
from olmo_lns.diagnostics.layer_drop import LayerDropResult, TaskScores
from olmo_lns.diagnostics.variance import VarianceResult
from olmo_lns.errors import LNSError

__all__ = ["KINDS", "Report", "check_comparable", "check_writable", "relabelled", "table", "write_csv"]

log = logging.getLogger(__name__)

#: Version of the file layout.
FORMAT = 1


class Result(Protocol):
    """What every diagnostic returns: a dataclass that can be shown as a table."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def rows(self) -> list[dict[str, Any]]: ...


#: Name of a diagnostic -> its result type.
KINDS: dict[str, type[Any]] = {
    "variance": VarianceResult,
    "angular": AngularResult,
    "layer-drop": LayerDropResult,
    "jacobian": JacobianResult,
    "gradnorm": GradNormResult,
}


@dataclass(frozen=True)
class Report:
    """A diagnostic's result with what it was measured on.

    :param what: a key of :data:`KINDS`. :param label: name of the model in figures and tables.
    :param settings: dtype, device, sequence length and so on, as used.
    """

    what: str
    label: str
    model: str
    data: str
    result: Any
    settings: dict[str, Any] = field(default_factory=dict)

    def write(self, path: Path) -> list[Path]:
        """Write ``path`` (JSON) and the same table as CSV beside it; returns both paths."""
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"format": FORMAT, **{f.name: getattr(self, f.name) for f in dataclasses.fields(self)}}
        content["result"] = dataclasses.asdict(self.result)
        path.write_text(json.dumps(content, allow_nan=False) + "\n", encoding="utf-8")
        table = path.with_suffix(".csv")
        write_csv(table, self.result.rows())
        return [path, table]

    @classmethod
    def read(cls, path: Path) -> Report:
        """:raises LNSError: no such file, or not a result of this version."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise LNSError(f"{path}: {error.strerror or error}") from None
        except ValueError as error:
            raise LNSError(f"{path}: not a result file of `olmo-lns analyze`: {error}") from None
        if not isinstance(content, dict) or content.get("format") != FORMAT or content.get("what") not in KINDS:
            raise LNSError(
                f"{path}: not a result file of `olmo-lns analyze` (expected format {FORMAT} and what in "
                f"{', '.join(KINDS)})"
            )
        try:
            return cls(**{**{f.name: content[f.name] for f in dataclasses.fields(cls)}, "result": _result(content)})
        except (KeyError, TypeError) as error:
            raise LNSError(f"{path}: incomplete result file: {error}") from None


def check_writable(path: Path, suffixes: Sequence[str]) -> None:
    """Find out before the work whether its result can be written; makes the parent folder.

    :raises LNSError: another suffix, a folder in its place, or no permission.
    """
    if path.suffix not in suffixes:
        raise LNSError(f"{path}: cannot write {path.suffix or 'a file without suffix'}, expected {', '.join(suffixes)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LNSError(f"{path} cannot be written: {error}") from None
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise LNSError(f"{path} cannot be written: {'it is a folder' if path.is_dir() else 'no permission'}")


def _result(content: Mapping[str, Any]) -> Any:
    values = dict(content["result"])
    if "tasks" in values:
        values["tasks"] = {name: TaskScores(**scores) for name, scores in values["tasks"].items()}
    return KINDS[content["what"]](**values)


def write_csv(path: Path | None, rows: Iterable[Mapping[str, Any]], columns: Sequence[str] | None = None) -> None:
    """Write ``rows`` with floats at 6 significant digits; to standard output when ``path`` is None."""
    table = list(rows)
    names = list(columns or dict.fromkeys(name for row in table for name in row))
    stream = path.open("w", newline="", encoding="utf-8") if path is not None else sys.stdout
    try:
        writer = csv.DictWriter(stream, names, lineterminator="\n", extrasaction="ignore")
        writer.writeheader()
        for row in table:
            writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})
    finally:
        if path is not None:
            stream.close()


#: Name of a diagnostic -> what its table shows, and that number of every block, block 1 first.
COLUMNS: dict[str, tuple[str, Callable[[Any], list[float]]]] = {
    "variance": ("output variance", lambda r: r.variance),
    "angular": ("angular distance d(l, l+1), fraction of pi", lambda r: r.adjacent),
    "layer-drop": ("loss increase without the block, nats/token", lambda r: [x - r.baseline_loss for x in r.loss]),
    "jacobian": ("distance of the Jacobian to the identity", lambda r: r.identity_distance),
    "gradnorm": ("gradient norm", lambda r: r.total),
}
#: Settings that change the numbers: a difference is said, because it is then not only the models that differ.
MATTERS = ("sequence_length", "pack", "dtype", "seed")


def relabelled(reports: Sequence[Report], labels: Sequence[str] | None) -> list[Report]:
    """The reports under other names, or under their own.

    :raises LNSError: another number of labels than reports, or two equal labels.
    """
    names = list(labels) if labels else [report.label for report in reports]
    if len(names) != len(reports):
        raise LNSError(f"--labels: found {len(names)} for {len(reports)} results")
    if len(set(names)) != len(names):
        raise LNSError(f"two results have one label ({', '.join(names)}): name them with --labels")
    return [dataclasses.replace(report, label=name) for name, report in zip(names, reports, strict=True)]


def check_comparable(reports: Sequence[Report]) -> list[str]:
    """Names of the settings in which the reports differ, each logged as a warning.

    :raises LNSError: different diagnostics.
    """
    kinds = sorted({report.what for report in reports})
    if len(kinds) != 1:
        raise LNSError(f"only results of one diagnostic can be compared: found {', '.join(kinds)}")
    values = {"data": [report.data for report in reports], "tokens": [report.result.tokens for report in reports]}
    values |= {name: [report.settings.get(name) for report in reports] for name in MATTERS}
    values |= {name: [getattr(r.result, name, None) for r in reports] for name in ("variant", "method")}
    different = [name for name, found in values.items() if any(value != found[0] for value in found)]
    for name in different:
        log.warning("the results differ in %s: %s", name, ", ".join(map(str, values[name])))
    return different


def table(reports: Sequence[Report]) -> tuple[str, list[list[str]]]:
    """What the numbers are, and the rows: a header, then a row a block and a column a model.

    A block that a model has not is an empty cell.
    """
    name, values = COLUMNS[reports[0].what]
    columns = [values(report.result) for report in reports]
    rows = [["block", *(report.label for report in reports)]]
    for block in range(max(map(len, columns))):
        rows.append([str(block + 1), *(f"{c[block]:.4g}" if block < len(c) else "" for c in columns)])
    return name, rows
