"""``olmo-lns analyze plot``, ``compare`` and ``all``: figures, tables and one page of the results."""

from __future__ import annotations

import argparse
import base64
import html
import io
from functools import partial
from pathlib import Path
from typing import Any, Callable, Sequence

from olmo_lns.diagnostics import MEASURES
from olmo_lns.diagnostics.results import (
    Report,
    check_comparable,
    check_writable,
    markdown,
    relabelled,
    table,
    write_csv,
)
from olmo_lns.environment import processes
from olmo_lns.errors import LNSError, one_line

__all__ = ["compare", "page", "plot", "run_all"]

_STYLE = (
    "body{font:15px sans-serif;max-width:60em;margin:2em auto}img{max-width:100%}"
    "table{border-collapse:collapse}td,th{padding:.15em .8em;text-align:right;border-bottom:1px solid #ddd}"
)


def plot(args: argparse.Namespace) -> int:
    """``olmo-lns analyze plot``: the figure of result files."""
    from olmo_lns.diagnostics import plots

    outputs = args.output or [args.results[0].with_suffix(".png")]
    for path in outputs:
        check_writable(path)
    if any(result.suffix == ".csv" for result in args.results):
        labels = args.labels or [result.parent.name or result.stem for result in args.results]
        if len(labels) != len(args.results):
            raise LNSError(f"--labels: found {len(labels)} names, expected {len(args.results)}, one a file")
        draw = partial(plots.draw_training, args.results, labels, log=args.log)
    else:
        draw = partial(plots.draw, relabelled([Report.read(p) for p in args.results], args.labels), log=args.log)
    print(f"Written: {', '.join(str(plots.save(draw(), path)) for path in outputs)}")
    return 0


def compare(args: argparse.Namespace) -> int:
    """``olmo-lns analyze compare``: several models in one figure and table."""
    if len(args.results) < 2:
        raise LNSError(f"compare needs two or more result files, found {len(args.results)}")
    for path in args.output or []:
        check_writable(path)
    if args.table:
        check_writable(args.table, [".csv"])
    reports = [Report.read(path) for path in args.results]
    check_comparable(reports)
    reports = relabelled(reports, args.labels)
    print(markdown(reports))
    written = []
    if args.output:
        from olmo_lns.diagnostics import plots

        # Each file is of a figure of its own: a second one of the same has another layout in its last digits.
        written += [plots.save(plots.draw(reports, log=args.log), path) for path in args.output]
    if args.table:
        import pandas

        frames = [report.result.frame() for report in reports]
        for frame, report in zip(frames, reports, strict=True):
            frame.insert(0, "model", report.label)
        written.append(write_csv(args.table, pandas.concat(frames)))
    if written:
        print(f"\nWritten: {', '.join(map(str, written))}")
    return 0


def run_all(args: argparse.Namespace, load: Callable[[str], Any], measure: Callable[..., Report]) -> int:
    """``olmo-lns analyze all``: run them, model by model, and write the page.

    What a model cannot take is noted there, the others go on.

    :param load: opens a model. :param measure: runs a diagnostic of an opened model: (what, opened, name, number).
    :raises LNSError: an unknown diagnostic, several ranks, or nothing that ran.
    """
    if unknown := [what for what in args.only if what not in MEASURES]:
        raise LNSError(f"--only: unknown {unknown[0]!r}: expected some of {', '.join(MEASURES)}")
    if (world := processes()) > 1:
        raise LNSError(f"analyze all runs in one process: found WORLD_SIZE={world}; start it without torchrun")
    args.output.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[Report]] = {what: [] for what in args.only}
    problems: list[str] = []
    for number, model in enumerate(args.models):
        try:
            opened = load(model)
        except LNSError as error:
            problems.append(f"{model}: {one_line(error)}")
            continue
        for what in args.only:
            try:
                found[what].append(measure(what, opened, model, number))
            except LNSError as error:
                problems.append(f"{what}, {model}: {one_line(error)}")
    sections = {what: reports for what, reports in found.items() if reports}
    if not sections:
        raise LNSError(f"no diagnostic ran: {'; '.join(problems)}")
    target = args.output / "report.html"
    target.write_text(page(sections, problems), encoding="utf-8")
    written = [target, *([_pdf(args.output / "report.pdf", sections)] if args.pdf else [])]
    print("\n\n".join(map(markdown, sections.values())))
    print(f"\nWritten: {', '.join(map(str, written))}" + "".join(f"\nNot run: {problem}" for problem in problems))
    return 1 if problems else 0


def page(sections: dict[str, list[Report]], problems: Sequence[str]) -> str:
    """The page, with its figures inside."""
    from olmo_lns.diagnostics import plots

    parts = ["<!doctype html><meta charset='utf-8'><title>Diagnostics</title>", f"<style>{_STYLE}</style>"]
    everything = [report for reports in sections.values() for report in reports]
    models = dict.fromkeys(f"{report.label}: {report.model}, data {report.data}" for report in everything)
    parts.append("<h1>Diagnostics</h1>" + "".join(f"<p>{html.escape(model)}" for model in models))
    for what, reports in sections.items():
        buffer = io.BytesIO()
        plots.save(plots.draw(reports), buffer)
        image = base64.b64encode(buffer.getvalue()).decode()
        shows, cells = table(reports)
        parts.append(f"<h2>{MEASURES[what].title}</h2>\n<img alt='{what}' src='data:image/png;base64,{image}'>")
        tokens = ", ".join(dict.fromkeys(f"{report.result.tokens:,}" for report in reports))
        parts.append(f"<p>{html.escape(shows)}, {tokens} tokens\n{cells.to_html(index=False, border=0)}")
    if problems:
        parts.append("<h2>Not run</h2>" + "".join(f"<p>{html.escape(problem)}" for problem in problems))
    return "\n".join(parts) + "\n"


def _pdf(path: Path, sections: dict[str, list[Report]]) -> Path:
    from matplotlib.backends.backend_pdf import PdfPages
    from matplotlib.figure import Figure

    from olmo_lns.diagnostics import plots

    with PdfPages(path) as pages:
        for what, reports in sections.items():
            numbers = Figure(figsize=(8.3, 11.7))
            text = f"{MEASURES[what].title}\n\n{markdown(reports)}"
            numbers.text(0.05, 0.95, text, family="monospace", size=7, verticalalignment="top")
            for figure in (plots.draw(reports), numbers):
                pages.savefig(figure, bbox_inches="tight")
    return path
