"""``olmo-lns analyze plot`` and ``compare``: figures and tables of results that were measured before."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Sequence

from olmo_lns.errors import LNSError

__all__ = ["check_figures", "compare", "plot"]


def check_figures(paths: Sequence[Path]) -> None:
    """:raises LNSError: a figure could not be written there."""
    if paths:
        from olmo_lns.diagnostics.plots import SUFFIXES
        from olmo_lns.diagnostics.results import check_writable

        for path in paths:
            check_writable(path, SUFFIXES)


def plot(args: argparse.Namespace) -> int:
    """``olmo-lns analyze plot``: the figure of result files."""
    from olmo_lns.diagnostics import plots
    from olmo_lns.diagnostics.compare import relabelled
    from olmo_lns.diagnostics.results import Report

    outputs = args.output or [args.results[0].with_suffix(".png")]
    check_figures(outputs)
    for path in outputs:  # a saved figure is closed, so each file gets its own
        if any(result.suffix == ".csv" for result in args.results):
            labels = args.labels or [result.parent.name or result.stem for result in args.results]
            if len(labels) != len(args.results):
                raise LNSError(f"--labels: found {len(labels)} names, expected {len(args.results)}, one a file")
            figure = plots.draw_training(args.results, labels, log=args.log)
        else:
            figure = plots.draw(relabelled([Report.read(p) for p in args.results], args.labels), log=args.log)
        plots.save(figure, path)
    print(f"Written: {', '.join(map(str, outputs))}")
    return 0


def compare(args: argparse.Namespace) -> int:
    """``olmo-lns analyze compare``: several models in one figure and table."""
    from olmo_lns.diagnostics import plots
    from olmo_lns.diagnostics.compare import check_comparable, combined_rows, relabelled, summary_table
    from olmo_lns.diagnostics.results import Report, check_writable, write_csv

    if len(args.results) < 2:
        raise LNSError(f"compare needs two or more result files, found {len(args.results)}")
    check_figures(args.output or [])
    if args.table:
        check_writable(args.table, [".csv"])
    reports = [Report.read(path) for path in args.results]
    check_comparable(reports)
    reports = relabelled(reports, args.labels)
    print(summary_table(reports))
    written = [plots.save(plots.draw(reports, log=args.log), path) for path in args.output or []]
    if args.table:
        write_csv(args.table, combined_rows(reports))
        written.append(args.table)
    if written:
        print(f"\nWritten: {', '.join(map(str, written))}")
    return 0
