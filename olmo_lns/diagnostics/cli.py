"""``olmo-lns analyze <what>``: run a diagnostic, draw its figure, compare models."""

from __future__ import annotations

import argparse
import importlib
import logging
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Iterable, Sequence

from olmo_lns.arguments import DTYPES, at_least, seed
from olmo_lns.diagnostics import MEASURES
from olmo_lns.errors import LNSError
from olmo_lns.processes import one_process

if TYPE_CHECKING:
    from olmo_lns.diagnostics.results import Measurement

#: Formats of figures.
FIGURES = (".png", ".svg")


def main(argv: Sequence[str]) -> int:
    """Run one diagnostic, or compare results. Exit code 0, or 2 for wrong usage."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    args = _parser().parse_args(argv)
    return compare(args) if args.what == "compare" else measure(args)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="olmo-lns analyze", description="The papers' diagnostics for your model.")
    commands = parser.add_subparsers(dest="what", required=True, metavar="what")
    for what, measure in MEASURES.items():
        title = measure.title
        made = commands.add_parser(what, help=title[0].lower() + title[1:], description=f"{title}.")
        _add_common(made, what)
        made.set_defaults(tasks=None, sequences=None)
        add = made.add_argument
        if what == "layer-drop":
            add("--tasks", type=lambda text: text.split(","), help="lm-evaluation-harness tasks, comma-separated")
            add("--task-path", help="folder with your task files")
            add("--limit", type=at_least(1), help="examples a task")
            add("--num-fewshot", type=at_least(0), help="examples in the prompt")
            add("--chat-template", action="store_true", help="build prompts with the model's chat template")
        if what == "jacobian":
            add("--rows", type=at_least(1), help="rows to compute; default: all up to width 256, else 128")
            add("--sequences", type=at_least(1), default=64, help="sequences to sample (default %(default)s)")
    made = commands.add_parser("compare", help="show results of one or more models in one figure and table")
    add = made.add_argument
    add("results", nargs="+", type=Path, metavar="results.json", help="of one diagnostic")
    add("-o", "--output", type=Path, action="append", default=[], help=".png or .svg; repeatable")
    add("--table", type=Path, help="CSV file with the rows of all models")
    return parser


def _add_common(command: argparse.ArgumentParser, what: str) -> None:
    """Options of every diagnostic."""
    add, tokens, longest = command.add_argument, MEASURES[what].tokens, MEASURES[what].longest
    default = f"{tokens:,}" if tokens else "all of --sequences"
    add("--model", required=True, help="OLMo or OLMo-core checkpoint folder, Hugging Face folder or name")
    add("--scheme", help="scheme of a model whose folder does not name it: lns")
    add("-o", "--output", type=Path, help=f"result file, default {what}.json; a .csv is written beside it")
    add("--plot", type=Path, action="append", default=[], help="also draw a figure: .png or .svg; repeatable")
    add("--label", help="name of the model in figures; a study arm's name sets its colour")
    add("--data", required=True, help="tokens.npy, text or JSON-lines file, or data set name[,config][:split]")
    add("--tokens", type=at_least(1), default=tokens, help=f"tokens to read (default {default})")
    add("--sequence-length", type=at_least(1), help=f"default: the model's, at most {longest}")
    add("--batch-size", type=at_least(1), default=8, help="sequences per batch (default %(default)s)")
    add("--dtype", choices=("auto", *DTYPES), default="auto", help="dtype of the weights; auto: as saved, OLMo in fp32")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:<n>")
    add("--blocks", help="dotted path of the list of blocks, if it is not found")
    add("--tokenizer", help="tokenizer.json, folder or name; default: the model's own")
    add("--token-dtype", help="dtype of raw token files (default: the checkpoint's, else uint16)")
    add("--text-field", default="text", help="field of JSON lines and data sets (default %(default)s)")
    add("--seed", type=seed, default=0, help="seed of all sampling (default %(default)s)")
    add("--quiet", action="store_true", help="no progress on stderr")


def measure(args: argparse.Namespace) -> int:
    """Run ``olmo-lns analyze <what>``: measure, write, draw and print."""
    from olmo_lns.diagnostics.data import check_source
    from olmo_lns.diagnostics.results import check_writable, table

    # Check before the work, so that its result is not lost.
    output = args.output or Path(f"{args.what}.json")
    check_writable(output, ".json")
    for path in args.plot:
        check_writable(path, *FIGURES)
    check_source(args.data)
    one_process(args.what)
    for module in ("matplotlib",) * bool(args.plot) + ("lm_eval",) * bool(args.tasks):
        importlib.import_module(module)
    result = _measure(args)
    written = [*result.write(output), *(_drawn([result], path) for path in args.plot)]
    print(table([result]))
    if args.what == "jacobian":
        print(f"\n{result.details['method']}: {result.details['rows']} of {result.details['width']} rows")
    print(f"\n{result.tokens:,} tokens. Written: {', '.join(map(str, written))}")
    return 0


def _measure(args: argparse.Namespace) -> Measurement:
    """Run one diagnostic and return its result."""
    from rich.console import Console
    from rich.progress import track

    from olmo_lns.diagnostics.data import read_batches
    from olmo_lns.diagnostics.loading import load_model
    from olmo_lns.tokenizers import load_tokenizer

    how = {name: getattr(args, name) for name in ("dtype", "device", "blocks", "scheme")}
    loaded = load_model(args.model, **how)
    length = args.sequence_length or min(MEASURES[args.what].longest, loaded.max_length)
    if length > loaded.max_length:
        raise LNSError(f"--sequence-length {length}: the model takes at most {loaded.max_length}")

    def tokenizer() -> Any:
        return load_tokenizer(args.tokenizer or loaded.tokenizer, Path(args.model), loaded.eos_token_id)

    scores = None
    if args.tasks:  # first, so that a failed download ends the command early
        from olmo_lns.diagnostics.tasks import harness_model, score_tasks, with_tasks

        how = {name: getattr(args, name) for name in ("limit", "num_fewshot", "chat_template")}
        lm = harness_model(loaded, tokenizer(), args.batch_size)
        scores = score_tasks(lm, loaded.blocks, args.tasks, include_path=args.task_path, **how)
    batches: Iterable[Any] = read_batches(
        args.data,
        length,
        vocabulary=loaded.vocabulary,
        tokenizer=tokenizer,
        batch_size=args.batch_size,
        max_tokens=args.tokens,
        max_sequences=args.sequences,
        token_dtype=args.token_dtype or loaded.token_dtype,
        text_field=args.text_field,
    )
    if not args.quiet:
        count = math.ceil((args.tokens or length * (args.sequences or 1)) / (length * args.batch_size))
        batches = track(batches, f"{args.what}, batches", count, console=Console(stderr=True))
    own = {"rows": args.rows, "seed": args.seed} if args.what == "jacobian" else {}
    device = loaded.embedding.weight.device
    result: Measurement = MEASURES[args.what].run(loaded.model, loaded.blocks, batches, device, **own)
    settings = {"dtype": loaded.dtype, "device": str(device), "sequence_length": length, "scheme": str(loaded.scheme)}
    settings |= {name: getattr(args, name) for name in ("batch_size", "seed")}
    found = with_tasks(result, scores) if scores else result
    label = args.label or "/".join(Path(args.model).parts[-2:])  # lns/step1000-unsharded, Qwen/Qwen2.5-0.5B
    label = os.fsencode(label).decode(errors="replace")  # pandas accepts UTF-8 only
    return replace(found, label=label, model=args.model, data=args.data, settings=settings)


def _drawn(results: Sequence[Measurement], path: Path) -> Path:
    from olmo_lns.diagnostics import plots

    return plots.save(plots.draw(results), path)


def compare(args: argparse.Namespace) -> int:
    """Run ``olmo-lns analyze compare``: show one or more results in one figure and table."""
    import pandas

    from olmo_lns.diagnostics.results import check_writable, read_results, table, write_csv

    for path in args.output:
        check_writable(path, *FIGURES)
    if args.table:
        check_writable(args.table, ".csv")
    results = read_results(args.results)
    print(table(results))
    # A new figure for each file, since saving one figure twice changes the last digits of its layout.
    written = [_drawn(results, path) for path in args.output]
    if args.table:
        written.append(write_csv(args.table, pandas.concat(r.frame().assign(model=r.label) for r in results)))
    if written:
        print(f"\nWritten: {', '.join(map(str, written))}")
    return 0
