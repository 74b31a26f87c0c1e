"""``olmo-lns analyze <what>``: run a diagnostic, draw its figure, compare models."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import Any, Callable, Sequence

from olmo_lns.arguments import DTYPES, at_least, seed
from olmo_lns.diagnostics import MEASURES

#: What only some diagnostics ask for, and its value where it is not asked for.
SPECIAL: dict[str, Any] = {"last_token": False, "rows": None, "sequences": 64, "tasks": []}


def main(argv: Sequence[str]) -> int:
    """Run one diagnostic, or draw what some have found. Exit code 0, or 2 for wrong usage."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    args = _parser().parse_args(argv)
    from olmo_lns.diagnostics import report

    return {"plot": report.plot, "compare": report.compare}.get(args.what, report.measure)(args)


def names(text: str) -> list[str]:
    return text.split(",")


def _parser() -> argparse.ArgumentParser:
    def command(name: str, title: str) -> tuple[argparse.ArgumentParser, Callable[..., Any]]:
        found = commands.add_parser(name, help=title[0].lower() + title[1:], description=f"{title}.")
        found.set_defaults(**SPECIAL)
        return found, found.add_argument

    parser = argparse.ArgumentParser(prog="olmo-lns analyze", description="The papers' diagnostics for your model.")
    commands = parser.add_subparsers(dest="what", required=True, metavar="what")
    for what, measure in MEASURES.items():
        made, add = command(what, measure.title)
        add("--model", required=True, help="OLMo checkpoint folder, or Hugging Face folder or name")
        add("-o", "--output", type=Path, help=f"result file, default {what}.json; a .csv is written beside it")
        add("--plot", type=Path, action="append", default=[], help="also draw it: .png or .svg; may be repeated")
        add("--label", help="name of the model in figures")
        _add_common(made, what)
        if what == "angular":
            add("--last-token", action="store_true", help="only the last token of each sequence")
        if what == "layer-drop":
            _add_layer_drop(made)
        if what == "jacobian":
            add("--rows", type=at_least(1), help="rows to compute; default: all up to width 256, else 128")
            add("--sequences", type=at_least(1), help="one position of each (default %(default)s)")
    for name, title in (
        ("plot", "Draw the figure of result files (or of the monitor's CSV files)"),
        ("compare", "Two or more models on one figure and table"),
    ):
        made, add = command(name, title)
        add("results", nargs="+", type=Path, metavar="results.json", help="what the single diagnostics have written")
        add("-o", "--output", type=Path, action="append", help=".png or .svg; may be repeated")
        add("--labels", type=names, help="comma-separated names of the models")
        add("--log", action="store_true", help="logarithmic vertical axis")
        if name == "compare":
            add("--table", type=Path, help="CSV file with the rows of all models")
    return parser


def _add_common(command: argparse.ArgumentParser, what: str) -> None:
    """Options of every diagnostic."""
    add, tokens, longest = command.add_argument, MEASURES[what].tokens, MEASURES[what].longest
    default = f"{tokens:,}" if tokens else "all of --sequences"
    add("--data", required=True, help="tokens.npy, text or JSON-lines file, or data set name[,config][:split]")
    add("--tokens", type=at_least(1), default=tokens, help=f"tokens to read (default {default})")
    add("--sequence-length", type=at_least(1), help=f"default: the model's, at most {longest}")
    add("--batch-size", type=at_least(1), default=8, help="sequences a batch (default %(default)s)")
    add("--dtype", choices=("auto", *DTYPES), default="auto", help="of the weights; auto: as saved, OLMo in fp32")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:<n> or mps")
    add("--device-map", help="Hugging Face placement, e.g. auto (needs accelerate)")
    add("--blocks", help="dotted path of the list of blocks, for models outside the table")
    add("--tokenizer", help="tokenizer.json, folder or name; default: the model's own")
    add("--no-pack", dest="pack", action="store_false", help="one document a sequence, padded, instead of packing")
    add("--token-dtype", help="of raw token files without a header (default: the checkpoint's, else uint16)")
    add("--text-field", default="text", help="of JSON lines and data sets (default %(default)s)")
    add("--seed", type=seed, default=0, help="of whatever is sampled (default %(default)s)")
    add("--quiet", action="store_true", help="no progress on stderr")


def _add_layer_drop(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--tasks", type=names, help="lm-evaluation-harness tasks, comma-separated")
    add("--task-path", help="folder with task files of your own")
    add("--metric", help="metric of the tasks; default: the first of acc_norm, acc, exact_match, f1 they report")
    add("--limit", type=at_least(1), help="examples a task")
    add("--num-fewshot", type=at_least(0), help="examples in the prompt")
    add("--chat-template", action="store_true", help="the prompts by the model's chat template")
