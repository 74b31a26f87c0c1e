"""The result of a diagnostic: a class, its JSON file, and its table with a row per block."""

from __future__ import annotations

import json
import logging
import math
import os
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Sequence

from olmo_lns.atomic import write_atomically
from olmo_lns.diagnostics import DIAGNOSTICS
from olmo_lns.errors import LNSError

if TYPE_CHECKING:
    import pandas

log = logging.getLogger(__name__)

#: Settings that change the numbers. A difference between compared results is logged.
COMPARED_SETTINGS = ("sequence_length", "dtype", "seed")


@dataclass(frozen=True)
class Measurement:
    """The result of a diagnostic for one model.

    :param what: a key of :data:`~olmo_lns.diagnostics.DIAGNOSTICS`.
    :param tokens: number of tokens in the average, without padding.
    :param blocks: column -> a number or None for each block, block 1 first.
    :param details: other results, as JSON values.
    :param label: name of the model in figures and tables.
    :param settings: dtype, device and so on.
    :raises LNSError: if a number is not finite. The message names its column and its blocks.

    Example: ``block_output_variance(model, None, batches).blocks["variance"][0]`` is the variance of block 1.
    """

    what: str
    tokens: int
    blocks: dict[str, list[Any]]
    details: dict[str, Any] = field(default_factory=dict)
    label: str = ""
    model: str = ""
    data: str = ""
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        scalars = {name: [value] for name, value in self.details.items() if isinstance(value, float)}
        for name, column in {**self.blocks, **scalars}.items():
            bad = [str(n) for n, value in enumerate(column, start=1) if value is not None and not math.isfinite(value)]
            if bad:
                blocks = f" of block {', '.join(bad)}" if name in self.blocks else ""
                raise LNSError(
                    f"{self.what}: {name}{blocks} is NaN or infinite. Expected finite numbers. Check the checkpoint "
                    "and the dtype. fp16 overflows earlier than bf16 and fp32."
                )

    @property
    def main(self) -> list[float]:
        """The column that tables show."""
        return self.blocks[DIAGNOSTICS[self.what].column]

    def frame(self) -> pandas.DataFrame:
        """Return a table with a row per block: the 1-based number, the columns, and the scalar details."""
        import pandas

        scalars = {name: value for name, value in self.details.items() if isinstance(value, (int, float, str))}
        numbers = {"block": list(range(1, len(self.main) + 1)), **self.blocks}
        return pandas.DataFrame(numbers).assign(**scalars, tokens=self.tokens)

    def write(self, path: Path) -> list[Path]:
        """Write ``path`` (JSON) and the same table as CSV beside it; return both paths."""
        table = self.frame().to_csv(index=False, float_format="%.6g", lineterminator="\n")
        return [
            write_atomically(path, json.dumps(asdict(self), allow_nan=False) + "\n"),
            write_atomically(path.with_suffix(".csv"), table),
        ]

    @classmethod
    def read(cls, path: Path) -> Measurement:
        """Read a result file.

        :raises LNSError: if the file is not a complete result.
        """
        try:
            result = cls(**json.loads(path.read_text(encoding="utf-8")))
            result.frame()
        except (KeyError, TypeError, ValueError) as error:
            raise LNSError(
                f"{path} is not a complete result file of `olmo-lns analyze`: {error}. Run the diagnostic again."
            ) from None
        return result


def check_writable(path: Path, *suffixes: str) -> None:
    """Check that a result can be written to ``path``, and create its folder.

    :raises LNSError: if the suffix is wrong, ``path`` is a folder, or its folder is not writable.
    :raises OSError: if the parent folder cannot be created.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix not in suffixes or path.is_dir() or not os.access(path.parent, os.W_OK):
        raise LNSError(
            f"{path} cannot be written. Expected a file that ends in {' or '.join(suffixes)}, in a folder that you may "
            "write to. Pass another path."
        )


def read_results(paths: Sequence[Path]) -> list[Measurement]:
    """Read result files of one diagnostic, and warn about different settings.

    If two results have the same label, the paths of the files become the labels.

    :raises LNSError: if the results are of different diagnostics.
    """
    results = [Measurement.read(path) for path in paths]
    diagnostics = sorted({result.what for result in results})
    if len(diagnostics) != 1:
        raise LNSError(
            f"The files are results of {', '.join(diagnostics)}. A comparison shows one diagnostic. Compare each one "
            "separately."
        )
    values = {name: [getattr(result, name) for result in results] for name in ("data", "tokens")}
    values |= {name: [result.settings.get(name) for result in results] for name in COMPARED_SETTINGS}
    values["method"] = [result.details.get("method") for result in results]
    for name, column in values.items():
        if any(value != column[0] for value in column):
            log.warning("The results differ in %s: %s.", name, ", ".join(map(str, column)))
    if len({result.label for result in results}) < len(results):
        return [replace(result, label=printable(path)) for path, result in zip(paths, results, strict=True)]
    return results


def printable(path: str | Path) -> str:
    """Return a path as text that UTF-8 can encode, for pandas and JSON."""
    return os.fsencode(path).decode(errors="replace")


def table(results: Sequence[Measurement]) -> str:
    """Return a title and a table with a row per block and a column per model. Missing blocks are empty cells."""
    import pandas

    columns = pandas.concat([pandas.Series(result.main, name=result.label) for result in results], axis=1)
    columns.index = pandas.RangeIndex(1, len(columns) + 1, name="block")
    title = DIAGNOSTICS[results[0].what].column_title
    return f"{title[0].upper()}{title[1:]}\n\n{columns.to_string(float_format='{:.4g}'.format, na_rep='')}"
