"""The commands of ``olmo-lns analyze``: run a diagnostic, and write, draw and compare results."""

from __future__ import annotations

import argparse
import os
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Callable, Iterator

import pandas

from olmo_lns.arguments import process_group
from olmo_lns.diagnostics import MEASURES, plots
from olmo_lns.diagnostics.data import DataOptions, check_source, read_batches, track
from olmo_lns.diagnostics.layer_drop import harness_model, score_tasks
from olmo_lns.diagnostics.results import (
    Report,
    check_labels,
    check_writable,
    markdown,
    read_results,
    write_csv,
)
from olmo_lns.environment import one_process, processes
from olmo_lns.errors import LNSError
from olmo_lns.extras import require
from olmo_lns.models.loading import LoadedModel, load_model, load_tokenizer


def measure(args: argparse.Namespace) -> int:
    """``olmo-lns analyze <what>``: measure on every rank; the first one writes, draws and prints."""
    # These checks come before the work, so that it is not lost.
    output = args.output or Path(f"{args.what}.json")
    check_writable(output, [".json"])
    for path in args.plot:
        check_writable(path)
    check_source(args.data, pack=args.pack)
    require(*(["matplotlib"] if args.plot else []), *(["lm_eval"] if args.tasks else []))
    world = processes() if MEASURES[args.what].pools else one_process(args.what)
    with process_group() if world > 1 else nullcontext():
        rank = int(os.environ["RANK"]) if world > 1 else 0
        how = {name: getattr(args, name) for name in ("dtype", "device", "device_map", "blocks")}
        measured = _measure(args, load_model(args.model, **how), rank, world)
    if rank:
        return 0
    written = [*measured.write(output), *(plots.save(plots.draw([measured]), path) for path in args.plot)]
    result = measured.result
    print(markdown([measured]))
    if args.what == "jacobian":
        print(f"\n{result.method}: {len(result.coordinates)} of {result.width} rows")
    print(f"\n{result.tokens:,} tokens. Written: {', '.join(map(str, written))}")
    return 0


def _measure(args: argparse.Namespace, loaded: LoadedModel, rank: int, world: int) -> Report:
    """The report of one diagnostic of a loaded model."""
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
        return load_tokenizer(args.tokenizer or loaded.tokenizer_name, Path(args.model), loaded.eos_token_id)

    batches = read_batches(args.data, options, vocabulary=loaded.vocabulary, tokenizer=tokenizer)
    label = args.label or _label(args.model)
    if not args.quiet and rank == 0:
        batches = track(batches, args.what, (args.tokens or length * args.sequences) // world)
    result = _run(args, loaded, batches, tokenizer, world > 1)
    settings = {
        "dtype": loaded.dtype,
        "device": str(loaded.device),
        "sequence_length": length,
        "ranks": world,
        "lns": None if loaded.scheme.is_pre_ln else {"scheme": str(loaded.scheme)},
        **{name: getattr(args, name) for name in ("batch_size", "pack", "seed")},
    }
    return Report(args.what, label, args.model, args.data, result, settings)


def _run(
    args: argparse.Namespace, loaded: LoadedModel, batches: Iterator[Any], tokenizer: Callable[[], Any], several: bool
) -> Any:
    measure = MEASURES[args.what]
    options: dict[str, Any] = {"all_ranks": several} if measure.pools else {}
    if args.what == "angular":
        options["last_token"] = args.last_token
    elif args.what == "jacobian":
        options |= {"rows": args.rows, "seed": args.seed}
    elif args.what in ("layer-drop", "gradnorm"):
        options["mask_token"] = tokenizer().mask_token_id if loaded.masked_lm else None
    tasks = {}  # scored first: a download that fails does so before the losses are computed
    if args.tasks:
        how = {name: getattr(args, name) for name in ("metric", "limit", "num_fewshot", "chat_template")}
        lm = harness_model(loaded, tokenizer(), args.batch_size)
        tasks = score_tasks(lm, loaded.blocks, args.tasks, include_path=args.task_path, **how)
    function = measure.loaded(measure.function)
    result = function(loaded.model, loaded.blocks, batches, loaded.device, **options)
    return replace(result, tasks=tasks) if tasks else result


def _label(model: str) -> str:
    """The end of a checkpoint's path, from the name of its run on: ``lns/seed0/step300-unsharded``."""
    parts, checkpoint = Path(model).parts, Path(model, "config.yaml").is_file()
    first = len(parts) - 1 - checkpoint
    while first > 0 and parts[first].startswith(("step", "seed")):
        first -= 1
    return "/".join(parts[max(0, first) :])


def plot(args: argparse.Namespace) -> int:
    """``olmo-lns analyze plot``: the figure of result files."""
    outputs = args.output or [args.results[0].with_suffix(".png")]
    for path in outputs:
        check_writable(path)
    if any(result.suffix == ".csv" for result in args.results):
        labels = check_labels([result.parent.name or result.stem for result in args.results], args.labels)
        draw = partial(plots.draw_training, args.results, labels, log=args.log)
    else:
        draw = partial(plots.draw, read_results(args.results, args.labels), log=args.log)
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
    reports = read_results(args.results, args.labels)
    print(markdown(reports))
    written: list[Path] = []
    # Each file is of a figure of its own: a second one of the same has another layout in its last digits.
    written += [plots.save(plots.draw(reports, log=args.log), path) for path in args.output or []]
    if args.table:
        frames = [report.result.frame() for report in reports]
        for frame, report in zip(frames, reports, strict=True):
            frame.insert(0, "model", report.label)
        written.append(write_csv(args.table, pandas.concat(frames)))
    if written:
        print(f"\nWritten: {', '.join(map(str, written))}")
    return 0
