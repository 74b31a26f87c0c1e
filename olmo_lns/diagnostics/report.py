"""``olmo-lns analyze plot``, ``compare`` and ``all``: figures, tables and one page of the results."""

from __future__ import annotations

import argparse
import base64
import html
import io
from pathlib import Path
from typing import Callable, Sequence

from olmo_lns.diagnostics.cli import PASSED_ON, TITLES
from olmo_lns.diagnostics.results import Report, check_comparable, check_writable, relabelled, table, write_csv
from olmo_lns.environment import processes
from olmo_lns.errors import LNSError, one_line

__all__ = ["check_figures", "compare", "page", "plot", "run_all", "text_table"]

_STYLE = (
    "body{font:15px sans-serif;max-width:60em;margin:2em auto}img{max-width:100%}"
    "table{border-collapse:collapse}td,th{padding:.15em .8em;text-align:right;border-bottom:1px solid #ddd}"
)


def text_table(reports: Sequence[Report]) -> str:
    """A Markdown table: a row per block, a column per model."""
    name, rows = table(reports)
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([name[0].upper() + name[1:], "", lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def check_figures(paths: Sequence[Path]) -> None:
    """:raises LNSError: a figure could not be written there."""
    if paths:
        from olmo_lns.diagnostics.plots import SUFFIXES

        for path in paths:
            check_writable(path, SUFFIXES)


def plot(args: argparse.Namespace) -> int:
    """``olmo-lns analyze plot``: the figure of result files."""
    from olmo_lns.diagnostics import plots

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
    if len(args.results) < 2:
        raise LNSError(f"compare needs two or more result files, found {len(args.results)}")
    check_figures(args.output or [])
    if args.table:
        check_writable(args.table, [".csv"])
    reports = [Report.read(path) for path in args.results]
    check_comparable(reports)
    reports = relabelled(reports, args.labels)
    print(text_table(reports))
    written = []
    if args.output:
        from olmo_lns.diagnostics import plots

        written += [plots.save(plots.draw(reports, log=args.log), path) for path in args.output]
    if args.table:
        write_csv(args.table, [{"model": report.label, **row} for report in reports for row in report.result.rows()])
        written.append(args.table)
    if written:
        print(f"\nWritten: {', '.join(map(str, written))}")
    return 0


def run_all(args: argparse.Namespace, measure: Callable[[Sequence[str]], Report]) -> int:
    """Run them, model by model, and write the page; what a model cannot take is noted there, the others go on.

    :param measure: runs one diagnostic from its command line.
    :raises LNSError: unknown names, a number of labels that is not the models', several ranks, or nothing that ran.
    """
    if unknown := [what for what in args.only if what not in TITLES]:
        raise LNSError(f"--only: unknown {unknown[0]!r}: expected some of {', '.join(TITLES)}")
    if args.labels and len(args.labels) != len(args.models):
        raise LNSError(f"--labels: found {len(args.labels)} names, expected {len(args.models)}, one a model")
    if (world := processes()) > 1:
        raise LNSError(f"analyze all runs in one process: found WORLD_SIZE={world}; start it without torchrun")
    args.output.mkdir(parents=True, exist_ok=True)
    given = {name: getattr(args, name.replace("-", "_")) for name in PASSED_ON}
    more = [word for name, value in given.items() if value is not None for word in (f"--{name}", value)]
    found: dict[str, list[Report]] = {what: [] for what in args.only}
    problems: list[str] = []
    for number, model in enumerate(args.models, start=1):
        label = ["--label", args.labels[number - 1]] if args.labels else []
        for what in args.only:
            path = args.output / f"{what}-{number}.json"
            words = [what, "--model", model, "--data", args.data, "-o", str(path), "--quiet", *label, *more]
            try:
                found[what].append(measure(words))
            except LNSError as error:
                problems.append(f"{what}, {model}: {one_line(error)}")
    sections = {what: relabelled(reports, None) for what, reports in found.items() if reports}
    if not sections:
        raise LNSError(f"no diagnostic ran: {'; '.join(problems)}")
    for reports in sections.values():
        print(f"{text_table(reports)}\n")
    target = args.output / "report.html"
    target.write_text(page(sections, problems), encoding="utf-8")
    written = [target, *([_pdf(args.output / "report.pdf", sections)] if args.pdf else [])]
    print(f"Written: {', '.join(map(str, written))}" + "".join(f"\nnot run: {problem}" for problem in problems))
    return 1 if problems else 0


def page(sections: dict[str, list[Report]], problems: Sequence[str]) -> str:
    """The page, with its figures inside."""
    escape = html.escape
    parts = ["<!doctype html><meta charset='utf-8'><title>Diagnostics</title>", f"<style>{_STYLE}</style>"]
    parts.append("<h1>Diagnostics</h1>")
    for what, reports in sections.items():
        name, (head, *rows) = table(reports)
        parts += [f"<h2>{TITLES[what]}</h2>", _figure(reports), f"<p>{escape(name)}", "<table>"]
        parts.append("<tr>" + "".join(f"<th>{escape(cell)}" for cell in head))
        parts += ["<tr>" + "".join(f"<td>{cell}" for cell in row) for row in rows]
        parts.append("</table>")
        parts += [
            f"<p>{escape(r.label)}: {escape(r.model)}, {escape(str(r.data))}, {r.result.tokens:,} tokens"
            for r in reports
        ]
    if problems:
        parts.append("<h2>Not run</h2>" + "".join(f"<p>{escape(problem)}" for problem in problems))
    return "\n".join(parts) + "\n"


def _figure(reports: list[Report]) -> str:
    from olmo_lns.diagnostics import plots

    buffer = io.BytesIO()
    plots.save(plots.draw(reports), buffer)
    return f"<img alt='{reports[0].what}' src='data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}'>"


def _pdf(path: Path, sections: dict[str, list[Report]]) -> Path:
    from matplotlib.backends.backend_pdf import PdfPages
    from matplotlib.figure import Figure

    from olmo_lns.diagnostics import plots

    with PdfPages(path) as pages:
        for what, reports in sections.items():
            numbers = Figure(figsize=(8.3, 11.7))
            text = f"{TITLES[what]}\n\n{text_table(reports)}"
            numbers.text(0.05, 0.95, text, family="monospace", size=7, verticalalignment="top")
            for figure in (plots.draw(reports), numbers):
                pages.savefig(figure, bbox_inches="tight")
    return path
