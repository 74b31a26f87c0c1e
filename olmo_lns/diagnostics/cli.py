"""``olmo-lns analyze <what>``: run a diagnostic, draw its figure, compare models."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import logging
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Callable, Iterator, Sequence

from olmo_lns.arguments import DTYPES, at_least, process_group, seed
from olmo_lns.diagnostics import MEASURES
from olmo_lns.environment import processes
from olmo_lns.errors import LNSError

__all__ = ["main"]

#: As ``olmo_lns.models.blocks.BRANCHES``, which loads torch: ``--help`` does not.
BRANCHES = ("vision", "language")
#: What only some diagnostics ask for, and its value where it is not asked for.
SPECIAL: dict[str, Any] = {"last_token": False, "rows": None, "sequences": 64, "tasks": []}
SPECIAL |= {"branch": None, "image_field": None}


def main(argv: Sequence[str]) -> int:
    """Run one diagnostic. Exit code 0, or 2 for wrong usage; LNSError goes to the caller."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    args = _parser().parse_args(argv)
    if args.what in MEASURES:
        _one(args)
        return 0
    from olmo_lns.diagnostics import report

    if args.what != "all":
        return report.plot(args) if args.what == "plot" else report.compare(args)
    from olmo_lns.diagnostics.data import check_source

    _need("pandas", "matplotlib")
    check_source(args.data, pack=args.pack)
    labels = args.labels or [_label(model) for model in args.models]
    if len(labels) != len(args.models):
        raise LNSError(f"--labels: found {len(labels)} names, expected {len(args.models)}, one a model")
    if len(set(labels)) != len(labels):
        raise LNSError(f"two models have one label ({', '.join(labels)}): name them with --labels")

    def measure(what: str, loaded: Any, model: str, number: int) -> Any:
        own = {"what": what, "model": model, "label": labels[number], "tokens": args.tokens or MEASURES[what].tokens}
        found = _measure(argparse.Namespace(**{**vars(args), **own}), loaded, 0, 1)
        found.write(args.output / f"{what}-{number + 1}.json")
        return found

    return report.run_all(args, lambda model: _load(args, model), measure)


def _parser() -> argparse.ArgumentParser:
    def names(text: str) -> list[str]:
        return text.split(",")

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
        add("--plot", type=Path, action="append", default=[], help="also draw it: .png, .svg or .pdf; may be repeated")
        add("--label", help="name of the model in figures")
        _add_common(made, what)
        if what == "angular":
            add("--last-token", action="store_true", help="only the last token of each sequence")
        if what == "layer-drop":
            _add_layer_drop(made)
        if what == "jacobian":
            add("--rows", type=at_least(1), help="rows to compute; default: all up to width 256, else 128")
            add("--sequences", type=at_least(1), help="one position of each (default %(default)s)")
    made, add = command("all", "Every diagnostic on one or more models, one report")
    add("models", nargs="+", help="OLMo checkpoint folders, or Hugging Face folders or names")
    add("-o", "--output", type=Path, required=True, help="folder to write report.html and results to")
    add("--pdf", action="store_true", help="also report.pdf, of the same figures and tables")
    add("--labels", type=names, help="comma-separated names of the models")
    add("--only", type=names, default=list(MEASURES), help=f"some of {', '.join(MEASURES)}, with commas between")
    _add_common(made, "all")
    for name, title in (
        ("plot", "Draw the figure of result files (or of the monitor's CSV files)"),
        ("compare", "Two or more models on one figure and table"),
    ):
        made, add = command(name, title)
        add("results", nargs="+", type=Path, metavar="results.json", help="what the single diagnostics have written")
        add("-o", "--output", type=Path, action="append", help=".png, .svg or .pdf; may be repeated")
        add("--labels", type=names, help="comma-separated names of the models")
        add("--log", action="store_true", help="logarithmic vertical axis")
        if name == "compare":
            add("--table", type=Path, help="CSV file with the rows of all models")
    return parser


def _add_common(command: argparse.ArgumentParser, what: str) -> None:
    """Options of every diagnostic, and so of ``analyze all``."""
    add, measure = command.add_argument, MEASURES.get(what)
    tokens, longest = (measure.tokens, measure.longest) if measure else (None, "what the single diagnostic takes")
    default = f"{tokens:,}" if tokens else "all of --sequences" if measure else "as the single diagnostic"
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
    add("--tasks", type=lambda text: text.split(","), help="lm-evaluation-harness tasks, comma-separated")
    add("--task-path", help="folder with task files of your own")
    add("--metric", help="metric of the tasks; default: the first of acc_norm, acc, exact_match, f1 they report")
    add("--limit", type=at_least(1), help="examples a task")
    add("--num-fewshot", type=at_least(0), help="examples in the prompt")
    add("--chat-template", action="store_true", help="the prompts by the model's chat template")
    add = command.add_argument_group("vision-language models").add_argument
    add("--branch", choices=BRANCHES, help="whose blocks are removed")
    add("--image-field", help="of JSON lines and data sets (default image; --branch language: text alone)")
    add("--processor", help="for the loss, a folder or name; default: the model's own")


def _one(args: argparse.Namespace) -> None:
    """One diagnostic of one model: measured, written, drawn, and printed by the first rank."""
    from olmo_lns.diagnostics.data import check_source
    from olmo_lns.diagnostics.results import check_writable, markdown

    # Before the work: what would be found out after it.
    output = args.output or Path(f"{args.what}.json")
    check_writable(output, [".json"])
    for path in args.plot:
        check_writable(path)
    check_source(args.data, pack=args.pack)
    _need("pandas", *(["matplotlib"] if args.plot else []), *(["lm_eval"] if args.tasks else []))
    if (world := processes()) > 1 and not MEASURES[args.what].pools:
        raise LNSError(f"{args.what} runs in one process: found WORLD_SIZE={world}; start it without torchrun")
    with process_group() if world > 1 else nullcontext():
        rank = int(os.environ["RANK"]) if world > 1 else 0
        measured = _measure(args, _load(args, args.model), rank, world)
    if rank:
        return
    written = measured.write(output)
    if args.plot:
        from olmo_lns.diagnostics import plots

        written += [plots.save(plots.draw([measured]), path) for path in args.plot]
    result = measured.result
    print(markdown([measured]))
    if args.what == "jacobian":
        print(f"\n{result.method}: {len(result.coordinates)} of {result.width} rows")
    print(f"\n{result.tokens:,} tokens. Written: {', '.join(map(str, written))}")


def _need(*modules: str) -> None:
    """:raises ModuleNotFoundError: one is not installed, before the work that ends with it."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)


def _load(args: argparse.Namespace, model: str) -> Any:
    from olmo_lns.models.loading import load_model

    names = ("dtype", "device", "device_map", "blocks", "branch")
    return load_model(model, **{name: getattr(args, name) for name in names})


def _measure(args: argparse.Namespace, loaded: Any, rank: int, world: int) -> Any:
    """The report of one diagnostic of a loaded model."""
    from olmo_lns.checkpoints import record_in
    from olmo_lns.diagnostics.data import DataOptions, load_processor, read_batches, read_images, track
    from olmo_lns.diagnostics.results import Report
    from olmo_lns.models.loading import load_tokenizer

    length = args.sequence_length or min(MEASURES[args.what].longest, loaded.max_length)
    if length > loaded.max_length:
        raise LNSError(f"--sequence-length {length}: the model takes at most {loaded.max_length}")
    options = DataOptions(
        sequence_length=length,
        batch_size=args.batch_size,
        max_tokens=args.tokens,
        max_sequences=args.sequences if args.what == "jacobian" else None,
        pack=args.pack,
        token_dtype=args.token_dtype or loaded.token_dtype,
        text_field=args.text_field,
        rank=rank,
        world=world,
    )

    def tokenizer() -> Any:
        return load_tokenizer(args.tokenizer or loaded.tokenizer_name, loaded.eos_token_id)

    if args.image_field or args.branch == "vision":
        if not loaded.reads_images:
            raise LNSError(f"--image-field: {args.model} is no vision-language model")
        processor = load_processor(args.processor or args.model)
        batches = read_images(args.data, options, processor, args.image_field or "image")
    else:
        batches = read_batches(args.data, options, vocabulary=loaded.vocabulary, tokenizer=tokenizer)
    label = args.label or _label(args.model)
    if not args.quiet and rank == 0:
        said = f"{label}: {args.what}" if "models" in args else args.what
        batches = track(batches, said, (args.tokens or length * args.sequences) // world)
    result = _run(args, loaded, batches, tokenizer, world > 1)
    record = record_in(Path(args.model)) if Path(args.model).is_dir() else None
    settings = {
        "dtype": loaded.dtype,
        "device": str(loaded.device),
        "sequence_length": length,
        "initialization": record.scaled_init if record else "plain",
        "ranks": world,
        "lns": None if record is None or record.scheme.is_pre_ln else record.as_dict(),
        **{name: getattr(args, name) for name in ("batch_size", "pack", "seed")},
        **{name: value for name in ("branch", "image_field") if (value := getattr(args, name))},
    }
    return Report(args.what, label, args.model, args.data, result, settings)


def _run(
    args: argparse.Namespace, loaded: Any, batches: Iterator[Any], tokenizer: Callable[[], Any], several: bool
) -> Any:
    module, _, name = MEASURES[args.what].function.partition(":")
    function = getattr(importlib.import_module(f"olmo_lns.diagnostics.{module}"), name)
    options: dict[str, Any] = {"all_ranks": several} if MEASURES[args.what].pools else {}
    if args.what == "angular":
        options["last_token"] = args.last_token
    elif args.what == "jacobian":
        options |= {"rows": args.rows, "seed": args.seed}
    elif args.what in ("layer-drop", "gradnorm"):
        options["mask_token"] = tokenizer().mask_token_id if loaded.masked_lm else None
    tasks = {}
    if args.tasks:
        from olmo_lns.diagnostics.lm_eval_tasks import score_tasks

        names = ("metric", "limit", "num_fewshot", "chat_template", "batch_size")
        how = {name: getattr(args, name) for name in names}
        # First: what fails here, such as a download, fails before the losses are computed.
        tasks = score_tasks(loaded, tokenizer(), args.tasks, include_path=args.task_path, **how)
    result = function(loaded.model, loaded.blocks, batches, loaded.device, **options)
    if tasks:
        result.tasks.update(tasks)
    return result


def _label(model: str) -> str:
    """From the run's name on: ``lns/seed0/step300-unsharded``."""
    parts, checkpoint = Path(model).parts, Path(model, "config.yaml").is_file()
    first = len(parts) - 1 - checkpoint
    while first > 0 and parts[first].startswith(("step", "seed")):
        first -= 1
    return "/".join(parts[max(0, first) :])
