"""Several models' results of one diagnostic as one table (and, with :mod:`.plots`, one figure)."""

from __future__ import annotations

import logging
from typing import Any, Sequence

from olmo_lns.diagnostics.results import Report
from olmo_lns.errors import LNSError

__all__ = ["check_comparable", "combined_rows", "relabelled", "summary_table"]

log = logging.getLogger(__name__)

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
    return [
        Report(report.what, name, report.model, report.data, report.result, report.settings)
        for name, report in zip(names, reports, strict=True)
    ]


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


def combined_rows(reports: Sequence[Report]) -> list[dict[str, Any]]:
    """All rows of all reports, each with its ``model`` label first."""
    return [{"model": report.label, **row} for report in reports for row in report.result.rows()]


def summary_table(reports: Sequence[Report]) -> str:
    """A Markdown table: a row per block, a column per model."""
    name, columns = _main_column(reports)
    deepest = max(map(len, columns))
    lines = [f"{name}", "", "| block | " + " | ".join(report.label for report in reports) + " |"]
    lines.append("|---|" + "---|" * len(reports))
    for block in range(deepest):
        cells = [f"{column[block]:.4g}" if block < len(column) else "" for column in columns]
        lines.append(f"| {block + 1} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _main_column(reports: Sequence[Report]) -> tuple[str, list[list[float]]]:
    results = [report.result for report in reports]
    columns = {
        "variance": ("Output variance", lambda r: r.variance),
        "angular": ("Angular distance d(l, l+1), fraction of pi", lambda r: r.adjacent),
        "layer-drop": (
            "Loss increase without the block, nats/token",
            lambda r: [loss - r.baseline_loss for loss in r.loss],
        ),
        "jacobian": ("Distance of the Jacobian to the identity", lambda r: r.identity_distance),
        "gradnorm": ("Gradient norm", lambda r: r.total),
    }
    name, values = columns[reports[0].what]
    return name, [values(result) for result in results]
