"""``olmo-lns analyze <what>``: run a diagnostic, draw its figure, compare models."""

from __future__ import annotations

import argparse
import importlib.util
import logging
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, Callable, Iterator, Sequence

from olmo_lns.arguments import at_least
from olmo_lns.dtypes import NAMES as DTYPES
from olmo_lns.environment import processes
from olmo_lns.errors import LNSError
from olmo_lns.processes import process_group

__all__ = ["main"]

#: Diagnostic -> (help, tokens read by default, longest default sequence).
MEASURES = {
    "variance": ("output variance of every block", 262_144, 2048),
    "angular": ("angular distance between all pairs of layers", 262_144, 2048),
    "layer-drop": ("performance drop of removing each block", 65_536, 2048),
    "jacobian": ("token-averaged Jacobian of every block", None, 64),
    "gradnorm": ("gradient norm per layer and parameter kind", 65_536, 2048),
}
#: Diagnostic -> its title in the report of ``analyze all``.
TITLES = {
    "variance": "Output variance of every block",
    "angular": "Angular distance between layers",
    "layer-drop": "Performance drop of removing each block",
    "jacobian": "Token-averaged Jacobian of every block",
    "gradnorm": "Gradient norm per layer",
}
#: Options that every diagnostic takes.
PASSED_ON = ("tokens", "sequence-length", "batch-size", "dtype", "device", "device-map", "tokenizer", "seed")
#: Those that pool over the ranks of torchrun.
DISTRIBUTED = ("variance", "angular")
#: As ``olmo_lns.models.blocks.BRANCHES``, which loads torch: ``--help`` does not.
BRANCHES = ("vision", "language")
#: Sequences of which the Jacobian takes one position each.
JACOBIAN_SEQUENCES = 64


def main(argv: Sequence[str]) -> int:
    """Run one diagnostic. Exit code 0, or 2 for wrong usage; LNSError goes to the caller."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    parser = _parser()
    args = parser.parse_args(argv)
    if args.what in MEASURES:
        if (measured := _measure(args)) is not None:
            _say(*measured)
        return 0
    from olmo_lns.diagnostics import report
    from olmo_lns.models.loading import load_model

    if args.what == "all":
        load = lru_cache(maxsize=1)(load_model)  # a model is loaded once for all diagnostics

        def measure(words: Sequence[str]) -> Any:
            measured = _measure(parser.parse_args(words), load)
            assert measured is not None  # several ranks are refused
            return measured[0]

        return report.run_all(args, measure)
    return report.plot(args) if args.what == "plot" else report.compare(args)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="olmo-lns analyze", description="The papers' diagnostics for your model.")
    commands = parser.add_subparsers(dest="what", required=True, metavar="what")
    for what, (text, tokens, length) in MEASURES.items():
        command = commands.add_parser(what, help=text, description=text.capitalize() + ".")
        _add_common(command, tokens, length)
        if what == "angular":
            command.add_argument("--last-token", action="store_true", help="only the last token of each sequence")
        if what == "layer-drop":
            _add_tasks(command)
            _add_branch(command)
        if what == "jacobian":
            command.add_argument(
                "--rows", type=at_least(1), help="rows to compute; default: all up to width 256, else 128"
            )
            command.add_argument(
                "--sequences", type=at_least(1), default=JACOBIAN_SEQUENCES, help="one position of each"
            )
    _add_all(commands)
    plot = commands.add_parser("plot", help="draw the figure of result files (or of the monitor's CSV files)")
    compare = commands.add_parser("compare", help="two or more models on one figure and table")
    for command in (plot, compare):
        command.add_argument("results", nargs="+", type=Path, metavar="results.json")
        command.add_argument("-o", "--output", type=Path, action="append", help=".png, .svg or .pdf; may be repeated")
        command.add_argument("--labels", type=lambda text: text.split(","), help="comma-separated names of the models")
        command.add_argument("--log", action="store_true", help="logarithmic vertical axis")
    compare.add_argument("--table", type=Path, help="CSV file with the rows of all models")
    return parser


def _add_all(commands: Any) -> None:
    """The arguments of ``olmo-lns analyze all``."""
    command = commands.add_parser("all", help="every diagnostic on one or more models, one report")
    command.add_argument("models", nargs="+", help="OLMo checkpoint folders, or Hugging Face folders or names")
    command.add_argument("--data", required=True, help="as for the single diagnostics")
    command.add_argument("-o", "--output", type=Path, required=True, help="folder to write report.html and results to")
    command.add_argument("--pdf", action="store_true", help="also report.pdf, of the same figures and tables")
    command.add_argument("--labels", type=lambda text: text.split(","), help="comma-separated names of the models")
    command.add_argument("--only", type=lambda text: text.split(","), default=list(TITLES), help="some of the five")
    for name in PASSED_ON:
        command.add_argument(f"--{name}", help="as for the single diagnostics")


def _add_common(command: argparse.ArgumentParser, tokens: int | None, length: int) -> None:
    add = command.add_argument
    add("--model", required=True, help="OLMo checkpoint folder, or Hugging Face folder or name")
    add("--data", required=True, help="tokens.npy, text or JSON-lines file, or data set name[,config][:split]")
    add("-o", "--output", type=Path, help="result file, default <what>.json; a .csv is written beside it")
    add("--plot", type=Path, action="append", default=[], help="also draw it: .png, .svg or .pdf; may be repeated")
    add("--label", help="name of the model in figures")
    add("--tokens", type=at_least(1), default=tokens, help="tokens to read (default %(default)s)")
    add("--sequence-length", type=at_least(1), help=f"default: the model's, at most {length}")
    add("--batch-size", type=at_least(1), default=8, help="sequences a batch (default %(default)s)")
    add("--dtype", choices=("auto", *DTYPES), default="auto", help="of the weights; auto: as saved, OLMo in fp32")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:<n> or mps")
    add("--device-map", help="Hugging Face placement, e.g. auto (needs accelerate)")
    add("--blocks", help="dotted path of the list of blocks, for models outside the table")
    add("--tokenizer", help="tokenizer.json, folder or name; default: the model's own")
    add("--no-pack", dest="pack", action="store_false", help="one document a sequence, padded, instead of packing")
    add("--token-dtype", help="of raw token files without a header (default: the checkpoint's, else uint16)")
    add("--text-field", default="text", help="of JSON lines and data sets (default %(default)s)")
    add("--seed", type=int, default=0, help="of whatever is sampled (default %(default)s)")
    add("--quiet", action="store_true", help="no progress on stderr")
    command.set_defaults(longest=length)


def _add_tasks(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--tasks", type=lambda text: text.split(","), default=[], help="lm-evaluation-harness tasks, comma-separated")
    add("--task-path", help="folder with task files of your own")
    add("--metric", help="metric of the tasks; default: the first of acc_norm, acc, exact_match, f1 they report")
    add("--limit", type=at_least(1), help="examples a task")
    add("--num-fewshot", type=at_least(0), help="examples in the prompt")
    add("--chat-template", action="store_true", help="the prompts by the model's chat template")


def _add_branch(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("vision-language models")
    add = group.add_argument
    add("--branch", choices=BRANCHES, help="whose blocks are removed")
    add("--image-field", help="of JSON lines and data sets (default image; --branch language: text alone)")
    add("--processor", help="for the loss, a folder or name; default: the model's own")


def _measure(args: argparse.Namespace, load: Callable[..., Any] | None = None) -> tuple[Any, list[Path]] | None:
    """The report of one diagnostic and the files written; None on every rank but the first."""
    from olmo_lns.diagnostics.data import check_source, read_batches, track
    from olmo_lns.diagnostics.images import load_processor, read_images
    from olmo_lns.diagnostics.report import check_figures
    from olmo_lns.diagnostics.results import Report, check_writable
    from olmo_lns.models.loading import load_model, load_tokenizer

    # Before the work: what would be found out after it.
    output = args.output or Path(f"{args.what}.json")
    check_writable(output, [".json"])
    check_figures(args.plot)
    check_source(args.data, pack=args.pack)
    if getattr(args, "tasks", None) and importlib.util.find_spec("lm_eval") is None:
        raise ModuleNotFoundError("No module named 'lm_eval'", name="lm_eval")
    with _ranks(args.what) as (rank, world):
        names = ("dtype", "device", "device_map", "blocks", "branch")
        how: dict[str, Any] = {name: getattr(args, name, None) for name in names}
        loaded = (load or load_model)(args.model, **how)
        options = _data_options(args, loaded, rank, world)

        def tokenizer() -> Any:
            return load_tokenizer(args.tokenizer or loaded.tokenizer_name, loaded.eos_token_id)

        if _with_images(args, loaded):
            processor = load_processor(args.processor or args.model)
            batches = read_images(args.data, options, processor, args.image_field or "image")
        else:
            batches = read_batches(args.data, options, vocabulary=loaded.vocabulary, tokenizer=tokenizer)
        if not args.quiet and rank == 0:
            expected = args.tokens or options.sequence_length * args.sequences
            batches = track(batches, args.what, expected // world)
        result = _run(args, loaded, batches, tokenizer, world > 1)
        if rank:
            return None
    settings = {
        "dtype": loaded.dtype,
        "device": str(loaded.device),
        "sequence_length": options.sequence_length,
        "ranks": world,
        "lns": _record(args.model),
        **{name: getattr(args, name) for name in ("batch_size", "pack", "seed")},
        **{name: value for name in ("branch", "image_field") if (value := getattr(args, name, None))},
    }
    measured = Report(args.what, args.label or _label(args.model), args.model, args.data, result, settings)
    written = measured.write(output)
    if args.plot:
        from olmo_lns.diagnostics import plots

        written += [plots.save(plots.draw([measured]), path) for path in args.plot]
    return measured, written


def _with_images(args: argparse.Namespace, loaded: Any) -> bool:
    """Whether the data is records with images, not text alone."""
    if args.what != "layer-drop" or not (args.image_field or args.branch == "vision"):
        return False
    if not loaded.reads_images:
        raise LNSError(f"--image-field: {args.model} is no vision-language model")
    return True


def _data_options(args: argparse.Namespace, loaded: Any, rank: int, world: int) -> Any:
    from olmo_lns.diagnostics.data import DataOptions

    length = args.sequence_length or min(args.longest, loaded.max_length)
    if length > loaded.max_length:
        raise LNSError(f"--sequence-length {length}: the model takes at most {loaded.max_length}")
    return DataOptions(
        sequence_length=length,
        batch_size=args.batch_size,
        max_tokens=args.tokens,
        max_sequences=getattr(args, "sequences", None),
        pack=args.pack,
        token_dtype=args.token_dtype or loaded.token_dtype,
        text_field=args.text_field,
        rank=rank,
        world=world,
    )


def _run(args: argparse.Namespace, loaded: Any, batches: Any, tokenizer: Any, all_ranks: bool) -> Any:
    import dataclasses

    common = (loaded.model, loaded.blocks, batches, loaded.device)
    if args.what == "variance":
        from olmo_lns.diagnostics.variance import block_output_variance

        return block_output_variance(*common, all_ranks=all_ranks)
    if args.what == "angular":
        from olmo_lns.diagnostics.angular import angular_distance

        return angular_distance(*common, last_token=args.last_token, all_ranks=all_ranks)
    if args.what == "jacobian":
        from olmo_lns.diagnostics.jacobian import block_jacobians

        return block_jacobians(*common, rows=args.rows, seed=args.seed)
    mask_token = tokenizer().mask_token_id if loaded.masked_lm else None
    if args.what == "gradnorm":
        from olmo_lns.diagnostics.gradnorm import gradient_norms

        return gradient_norms(*common, mask_token=mask_token)
    from olmo_lns.diagnostics.layer_drop import drop_layers

    if not args.tasks:
        return drop_layers(*common, mask_token=mask_token)
    from olmo_lns.diagnostics.lm_eval_tasks import score_tasks

    tasks = score_tasks(  # first: what fails here, such as a download, fails before the losses are computed
        loaded,
        tokenizer(),
        args.tasks,
        include_path=args.task_path,
        metric=args.metric,
        limit=args.limit,
        num_fewshot=args.num_fewshot,
        chat_template=args.chat_template,
        batch_size=args.batch_size,
    )
    return dataclasses.replace(drop_layers(*common, mask_token=mask_token), tasks=tasks)


@contextmanager
def _ranks(what: str) -> Iterator[tuple[int, int]]:
    """Rank and world size; joins the process group that torchrun announces, if it did."""
    world = processes()
    if world == 1:
        yield 0, 1
        return
    if what not in DISTRIBUTED:
        raise LNSError(f"{what} runs in one process: found WORLD_SIZE={world}; start it without torchrun")
    import torch.distributed as dist

    with process_group():
        yield dist.get_rank(), world


def _record(model: str) -> dict[str, Any] | None:
    """Of the folder, for the result file; None for Pre-LN and for what says nothing."""
    from olmo_lns.checkpoints.records import record_in

    record = record_in(Path(model)) if Path(model).is_dir() else None
    return None if record is None or record.scheme.is_pre_ln else record.as_dict()


def _label(model: str) -> str:
    parts, checkpoint = Path(model).parts, Path(model, "config.yaml").is_file()  # from the run's name on
    first = len(parts) - 1 - checkpoint
    while first > 0 and parts[first].startswith(("step", "seed")):
        first -= 1
    return "/".join(parts[max(0, first) :])


def _say(measured: Any, written: Sequence[Path]) -> None:
    from olmo_lns.diagnostics.report import text_table

    print(text_table([measured]))
    if measured.what == "jacobian":
        print(f"\n{measured.result.method}: {len(measured.result.coordinates)} of {measured.result.width} rows")
    print(f"\n{measured.result.tokens:,} tokens. Written: {', '.join(map(str, written))}")
