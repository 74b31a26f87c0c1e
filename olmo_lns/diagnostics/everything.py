"""``olmo-lns analyze all``: every diagnostic on one or more models, and one report with figures and tables."""

from __future__ import annotations

import argparse
import base64
import html
import io
from pathlib import Path
from typing import Any, Callable, Sequence

from olmo_lns.diagnostics.compare import relabelled, summary_table
from olmo_lns.diagnostics.results import Report
from olmo_lns.errors import LNSError, one_line

__all__ = ["add_command", "page", "run_all"]

TITLES = {
    "variance": "Output variance of every block",
    "angular": "Angular distance between layers",
    "layer-drop": "Performance drop of removing each block",
    "jacobian": "Token-averaged Jacobian of every block",
    "gradnorm": "Gradient norm per layer",
}
#: Options that every diagnostic takes.
PASSED_ON = ("tokens", "sequence-length", "batch-size", "dtype", "device", "device-map", "tokenizer", "seed")
_STYLE = "body{font:15px sans-serif;max-width:60em;margin:2em auto}pre{overflow:auto}img{max-width:100%}"


def add_command(commands: Any) -> None:
    """The sub-command's arguments."""
    command = commands.add_parser("all", help="every diagnostic on one or more models, one report")
    command.add_argument("models", nargs="+", help="OLMo checkpoint folders, or Hugging Face folders or names")
    command.add_argument("--data", required=True, help="as for the single diagnostics")
    command.add_argument("-o", "--output", type=Path, required=True, help="folder to write report.html and results to")
    command.add_argument("--pdf", action="store_true", help="also report.pdf, of the same figures and tables")
    command.add_argument("--labels", type=lambda text: text.split(","), help="comma-separated names of the models")
    command.add_argument("--only", type=lambda text: text.split(","), default=list(TITLES), help="some of the five")
    for name in PASSED_ON:
        command.add_argument(f"--{name}", help="as for the single diagnostics")


def run_all(args: argparse.Namespace, measure: Callable[[Sequence[str]], int]) -> int:
    """Run them and write the page; a diagnostic that a model cannot take is noted there, the others go on.

    :param measure: runs one diagnostic from its command line.
    :raises LNSError: unknown names, a number of labels that is not the models', or nothing that ran.
    """
    if unknown := [what for what in args.only if what not in TITLES]:
        raise LNSError(f"--only: unknown {unknown[0]!r}: expected some of {', '.join(TITLES)}")
    if args.labels and len(args.labels) != len(args.models):
        raise LNSError(f"--labels: found {len(args.labels)} names, expected {len(args.models)}, one a model")
    args.output.mkdir(parents=True, exist_ok=True)
    given = {name: getattr(args, name.replace("-", "_")) for name in PASSED_ON}
    more = [word for name, value in given.items() if value is not None for word in (f"--{name}", value)]
    sections: dict[str, list[Report]] = {}
    problems: list[str] = []
    for what in args.only:
        reports = []
        for number, model in enumerate(args.models, start=1):
            path = args.output / f"{what}-{number}.json"
            try:
                measure([what, "--model", model, "--data", args.data, "-o", str(path), "--quiet", *more])
            except LNSError as error:
                problems.append(f"{what}, {model}: {one_line(error)}")
                continue
            label = args.labels[number - 1] if args.labels else None
            reports += relabelled([Report.read(path)], [label] if label else None)
        if reports:
            sections[what] = reports
    if not sections:
        raise LNSError(f"no diagnostic ran: {'; '.join(problems)}")
    target = args.output / "report.html"
    target.write_text(page(sections, problems), encoding="utf-8")
    written = [target, *([_pdf(args.output / "report.pdf", sections)] if args.pdf else [])]
    print(f"\nWritten: {', '.join(map(str, written))}" + "".join(f"\nnot run: {problem}" for problem in problems))
    return 1 if problems else 0


def page(sections: dict[str, list[Report]], problems: Sequence[str]) -> str:
    """The page, with its figures inside."""
    parts = ["<!doctype html><meta charset='utf-8'><title>Diagnostics</title>", f"<style>{_STYLE}</style>"]
    parts.append("<h1>Diagnostics</h1>")
    for what, reports in sections.items():
        parts += [f"<h2>{TITLES[what]}</h2>", _figure(reports)]
        parts.append(f"<pre>{html.escape(summary_table(reports))}</pre>")
        parts += [
            f"<p>{html.escape(r.label)}: {html.escape(r.model)}, {html.escape(str(r.data))}, {r.result.tokens:,} tokens"
            for r in reports
        ]
    if problems:
        parts.append("<h2>Not run</h2>" + "".join(f"<p>{html.escape(problem)}" for problem in problems))
    return "\n".join(parts) + "\n"


def _pdf(path: Path, sections: dict[str, list[Report]]) -> Path:
    from matplotlib.backends.backend_pdf import PdfPages

    from olmo_lns.diagnostics import plots

    with PdfPages(path) as pages:
        for what, reports in sections.items():
            table = plots._pyplot().figure(figsize=(8.3, 11.7))
            text = f"{TITLES[what]}\n\n{summary_table(reports)}"
            table.text(0.05, 0.95, text, family="monospace", size=7, verticalalignment="top")
            for figure in (plots.draw(reports), table):
                pages.savefig(figure, bbox_inches="tight")
                plots._pyplot().close(figure)
    return path


def _figure(reports: list[Report]) -> str:
    from olmo_lns.diagnostics import plots

    buffer = io.BytesIO()
    figure = plots.draw(reports)
    figure.savefig(buffer, format="png", bbox_inches="tight", dpi=150)
    plots._pyplot().close(figure)
    return f"<img alt='{reports[0].what}' src='data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}'>"
