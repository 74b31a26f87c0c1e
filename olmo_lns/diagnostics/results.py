"""Result files: one JSON object per model and diagnostic, from which tables and figures are made."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Iterable, Mapping, Protocol, Sequence

from olmo_lns.diagnostics.angular import AngularResult
from olmo_lns.diagnostics.gradnorm import GradNormResult
from olmo_lns.diagnostics.jacobian import JacobianResult
from olmo_lns.diagnostics.layer_drop import LayerDropResult, TaskScores
from olmo_lns.diagnostics.variance import VarianceResult
from olmo_lns.errors import LNSError

__all__ = ["KINDS", "Report", "check_writable", "write_csv"]

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
        text = json.dumps(content, indent=1, allow_nan=False)
        path.write_text(_compact_numbers(text) + "\n", encoding="utf-8")
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


def _compact_numbers(text: str) -> str:
    """Put lists of plain numbers on one line: json's indent would give every number its own."""
    lines: list[str] = []
    open_list: list[str] | None = None
    for line in text.splitlines():
        if line.endswith("["):
            if open_list is not None:
                lines += open_list
            open_list = [line]
        elif open_list is not None and line.strip() in ("]", "],"):
            lines.append(open_list[0] + " ".join(part.strip() for part in open_list[1:]) + line.strip())
            open_list = None
        elif open_list is not None:
            open_list.append(line)
        else:
            lines.append(line)
    return "\n".join(lines)


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
