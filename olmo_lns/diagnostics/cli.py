"""``olmo-lns analyze <diagnostic>``: run a diagnostic, draw its figure, compare models."""

from __future__ import annotations

import argparse
import importlib
import logging
import math
import pkgutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Iterable, Sequence

from olmo_lns.arguments import DTYPES, Parser, as_path, at_least
from olmo_lns.diagnostics import DIAGNOSTICS
from olmo_lns.errors import LNSError
from olmo_lns.processes import one_process

if TYPE_CHECKING:
    from olmo_lns.diagnostics.results import Measurement

#: Suffixes of figures.
FIGURE_SUFFIXES = (".png", ".svg")


def main(argv: Sequence[str]) -> int:
    """Run one diagnostic, or compare results. Exit code 0, or 2 for wrong usage."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    args = _parser().parse_args(argv)
    return compare(args) if args.diagnostic == "compare" else measure(args)


def _parser() -> argparse.ArgumentParser:
    example = "olmo-lns analyze variance --model runs/lns/step1000-unsharded --data heldout.npy --plot variance.png"
    parser = Parser(prog="olmo-lns analyze", description="The papers' diagnostics for your model.", epilog=example)
    commands = parser.add_subparsers(dest="diagnostic", required=True, metavar="diagnostic")
    for name, diagnostic in DIAGNOSTICS.items():
        title = diagnostic.title
        command = commands.add_parser(name, help=title[0].lower() + title[1:], description=f"{title}.")
        _add_common_options(command, name)
        command.set_defaults(tasks=None)
        add = command.add_argument
        if name == "layer-drop":
            add("--tasks", type=lambda text: text.split(","), help="lm-evaluation-harness tasks, comma-separated")
            add("--task-path", help="folder with your task files")
            add("--limit", type=at_least(1), help="examples a task")
            add("--num-fewshot", type=at_least(0), help="examples in the prompt")
            add("--chat-template", action="store_true", help="build prompts with the model's chat template")
        if name == "jacobian":
            add("--rows", type=at_least(1), help="rows to compute; default: all up to width 256, else 128")
            add("--sequences", type=at_least(1), default=64, help="sequences to sample (default %(default)s)")
            add("--seed", type=at_least(0), default=0, help="seed of positions and rows (default %(default)s)")
        else:
            add("--tokens", type=at_least(1), default=diagnostic.tokens, help="tokens to read (default %(default)s)")
    command = commands.add_parser("compare", help="show the results of several models in one figure and table")
    command.add_argument(
        "results", nargs="+", type=as_path, metavar="results.json", help="result files of one diagnostic"
    )
    command.add_argument("-o", "--output", type=as_path, help="figure: .png or .svg")
    return parser


def _add_common_options(command: argparse.ArgumentParser, diagnostic: str) -> None:
    """Add the options that all diagnostics share."""
    add = command.add_argument
    add("--model", required=True, help="folder of OLMo, OLMo-core, Megatron or transformers, or a name on the hub")
    add("--scheme", help="scheme of a model whose config names none, such as lns")
    add(
        "-o",
        "--output",
        type=as_path,
        help=f"result file, default {diagnostic}.json; a .csv is written beside it",
    )
    add("--plot", type=as_path, help="also draw a figure: .png or .svg")
    add("--label", help="name of the model in figures; the name of an arm of a study selects its color")
    add("--data", required=True, help="tokens.npy, text or JSON-lines file, or data set name[,config][:split]")
    add(
        "--sequence-length",
        type=at_least(1),
        help=f"default: the model's, at most {DIAGNOSTICS[diagnostic].max_sequence_length}",
    )
    add("--batch-size", type=at_least(1), default=8, help="sequences per batch (default %(default)s)")
    add("--dtype", choices=("auto", *DTYPES), default="auto", help="dtype of the weights; auto: as saved")
    add("--device", choices=("auto", "cpu"), default="auto", help="auto: CUDA if there is one")
    add("--blocks", help="dotted path of the list of blocks; default: detected")
    add("--tokenizer", help="tokenizer.json, folder or name; default: the model's")
    add("--token-dtype", help="dtype of raw token files (default: the checkpoint's, else uint16)")
    add("--text-field", default="text", help="field of JSON lines and data sets (default %(default)s)")


def measure(args: argparse.Namespace) -> int:
    """Run one diagnostic: measure the model, write and print the result, draw the figure."""
    from olmo_lns.diagnostics.data import check_source
    from olmo_lns.diagnostics.results import check_writable, table

    # Check the outputs first: a failure after the measurement would lose its result.
    output = args.output or Path(f"{args.diagnostic}.json")
    check_writable(output, ".json")
    if args.plot:
        check_writable(args.plot, *FIGURE_SUFFIXES)
        importlib.import_module("matplotlib")
    check_source(args.data)
    one_process(args.diagnostic)
    result = _measure(args)
    paths = result.write(output)
    if args.plot:
        from olmo_lns.diagnostics import plots

        paths.append(plots.save(plots.draw([result]), args.plot))
    print(table([result]))
    print(f"\n{result.tokens:,} tokens. Written: {', '.join(map(str, paths))}")
    return 0


def _measure(args: argparse.Namespace) -> Measurement:
    """Open the model and run one diagnostic on it."""
    import torch
    from rich.console import Console
    from rich.progress import track

    from olmo_lns.diagnostics.capture import find_blocks
    from olmo_lns.diagnostics.data import read_batches
    from olmo_lns.diagnostics.results import printable
    from olmo_lns.export.open import open_checkpoint
    from olmo_lns.export.prompts import token_count
    from olmo_lns.norm.dtypes import DTYPES as TORCH_DTYPES
    from olmo_lns.tokenizers import load_tokenizer

    opened = open_checkpoint(args.model, args.scheme)
    diagnostic = DIAGNOSTICS[args.diagnostic]
    device = "cuda" if args.device == "auto" and torch.cuda.is_available() else "cpu"
    model = opened.model.to(device=device, dtype=TORCH_DTYPES.get(args.dtype))
    blocks = find_blocks(model, args.blocks)
    length = args.sequence_length or min(diagnostic.max_sequence_length, opened.max_length)
    if length > opened.max_length:
        raise LNSError(
            f"--sequence-length is {length}, but the model accepts at most {opened.max_length} tokens. Pass a smaller "
            "number."
        )

    def tokenizer() -> Any:
        return load_tokenizer(args.tokenizer or opened.tokenizer, Path(args.model), opened.eos_token_id)

    scores = None
    if args.tasks:  # first, so that a failed download ends the command early
        from olmo_lns.diagnostics.tasks import harness_model, score_tasks, with_tasks

        options = {name: getattr(args, name) for name in ("limit", "num_fewshot", "chat_template")}
        lm = harness_model(opened, tokenizer(), args.batch_size)
        scores = score_tasks(lm, blocks, args.tasks, include_path=args.task_path, **options)
    is_jacobian = args.diagnostic == "jacobian"
    tokens = args.sequences * length if is_jacobian else args.tokens
    batches: Iterable[Any] = read_batches(
        args.data,
        length,
        vocabulary=token_count(model),
        tokenizer=tokenizer,
        batch_size=args.batch_size,
        max_tokens=tokens,
        token_dtype=args.token_dtype or opened.token_dtype,
        text_field=args.text_field,
    )
    if sys.stderr.isatty():
        count = math.ceil(tokens / (length * args.batch_size))
        batches = track(batches, f"{args.diagnostic}, batches", count, console=Console(stderr=True))
    sampling = {"rows": args.rows, "seed": args.seed} if is_jacobian else {}
    run_diagnostic = pkgutil.resolve_name(f"olmo_lns.diagnostics.{diagnostic.function}")
    result: Measurement = run_diagnostic(model, blocks, batches, device, **sampling)
    if scores:
        result = with_tasks(result, scores)
    settings = {"device": device, "dtype": str(next(model.parameters()).dtype).removeprefix("torch."), **sampling}
    settings |= {"sequence_length": length, "batch_size": args.batch_size, "scheme": str(opened.scheme)}
    label = args.label or "/".join(Path(args.model).parts[-2:])  # lns/step1000-unsharded, Qwen/Qwen2.5-0.5B
    return replace(result, label=printable(label), model=args.model, data=args.data, settings=settings)


def compare(args: argparse.Namespace) -> int:
    """Run ``olmo-lns analyze compare``: show the results of several models in one figure and table."""
    from olmo_lns.diagnostics.results import check_writable, read_results, table

    if args.output:
        check_writable(args.output, *FIGURE_SUFFIXES)
    results = read_results(args.results)
    print(table(results))
    if args.output:
        from olmo_lns.diagnostics import plots

        print(f"\nWritten: {plots.save(plots.draw(results), args.output)}")
    return 0
