"""What ``olmo-lns analyze`` does once its options are read: run diagnostics, and write, draw and compare results."""

from __future__ import annotations

import argparse
import base64
import html
import io
import os
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Callable, Iterator, Sequence

import pandas

from olmo_lns.arguments import process_group
from olmo_lns.checkpoints import record_in
from olmo_lns.diagnostics import MEASURES, plots
from olmo_lns.diagnostics.data import DataOptions, check_source, read_batches, track
from olmo_lns.diagnostics.layer_drop import harness_model, score_tasks
from olmo_lns.diagnostics.results import (
    Report,
    check_labels,
    check_writable,
    markdown,
    read_results,
    table,
    write_csv,
)
from olmo_lns.environment import one_process, processes
from olmo_lns.errors import LNSError, one_line
from olmo_lns.extras import require
from olmo_lns.models.loading import LoadedModel, load_model, load_tokenizer

__all__ = ["compare", "measure_all", "measure_one", "plot"]

_STYLE = (
    "body{font:15px sans-serif;max-width:60em;margin:2em auto}img{max-width:100%}"
    "table{border-collapse:collapse}td,th{padding:.15em .8em;text-align:right;border-bottom:1px solid #ddd}"
)


def measure_one(args: argparse.Namespace) -> int:
    """``olmo-lns analyze <what>``: measured, written, drawn, and printed by the first rank."""
    # Before the work: what would be found out after it.
    output = args.output or Path(f"{args.what}.json")
    check_writable(output, [".json"])
    for path in args.plot:
        check_writable(path)
    check_source(args.data, pack=args.pack)
    require(*(["matplotlib"] if args.plot else []), *(["lm_eval"] if args.tasks else []))
    world = processes() if MEASURES[args.what].pools else one_process(args.what)
    with process_group() if world > 1 else nullcontext():
        rank = int(os.environ["RANK"]) if world > 1 else 0
        measured = _measure(args, _load(args, args.model), rank, world)
    if rank:
        return 0
    written = [*measured.write(output), *(plots.save(plots.draw([measured]), path) for path in args.plot)]
    result = measured.result
    print(markdown([measured]))
    if args.what == "jacobian":
        print(f"\n{result.method}: {len(result.coordinates)} of {result.width} rows")
    print(f"\n{result.tokens:,} tokens. Written: {', '.join(map(str, written))}")
    return 0


def measure_all(args: argparse.Namespace) -> int:
    """``olmo-lns analyze all``: run them, model by model, and write the page.

    What a model cannot take is noted there, the others go on.

    :raises LNSError: an unknown diagnostic, several ranks, or nothing that ran.
    """
    one_process("analyze all")
    require("matplotlib")
    check_source(args.data, pack=args.pack)
    labels = check_labels([_label(model) for model in args.models], args.labels)
    if unknown := [what for what in args.only if what not in MEASURES]:
        raise LNSError(f"--only: unknown {unknown[0]!r}: expected some of {', '.join(MEASURES)}")
    args.output.mkdir(parents=True, exist_ok=True)
    sections: dict[str, list[Report]] = {}
    problems: list[str] = []
    for number, (model, label) in enumerate(zip(args.models, labels, strict=True), start=1):
        try:
            loaded = _load(args, model)
        except LNSError as error:
            problems.append(f"{model}: {one_line(error)}")
            continue
        for what in args.only:
            own = {"what": what, "model": model, "label": label, "tokens": args.tokens or MEASURES[what].tokens}
            try:
                found = _measure(argparse.Namespace(**{**vars(args), **own}), loaded, 0, 1)
            except LNSError as error:
                problems.append(f"{what}, {model}: {one_line(error)}")
                continue
            found.write(args.output / f"{what}-{number}.json")
            sections.setdefault(what, []).append(found)
    if not sections:
        raise LNSError(f"no diagnostic ran: {'; '.join(problems)}")
    target = args.output / "report.html"
    target.write_text(_page(sections, problems), encoding="utf-8")
    print("\n\n".join(map(markdown, sections.values())))
    print(f"\nWritten: {target}" + "".join(f"\nNot run: {problem}" for problem in problems))
    return 1 if problems else 0


def _load(args: argparse.Namespace, model: str) -> LoadedModel:
    names = ("dtype", "device", "device_map", "blocks")
    return load_model(model, **{name: getattr(args, name) for name in names})


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
        return load_tokenizer(args.tokenizer or loaded.tokenizer_name, loaded.eos_token_id)

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
    tasks = {}  # of scores; first, since what fails here, such as a download, fails before the losses are computed
    if args.tasks:
        how = {name: getattr(args, name) for name in ("metric", "limit", "num_fewshot", "chat_template")}
        lm = harness_model(loaded, tokenizer(), args.batch_size)
        tasks = score_tasks(lm, loaded.blocks, args.tasks, include_path=args.task_path, **how)
    function = measure.loaded(measure.function)
    result = function(loaded.model, loaded.blocks, batches, loaded.device, **options)
    return replace(result, tasks=tasks) if tasks else result


def _label(model: str) -> str:
    """From the run's name on: ``lns/seed0/step300-unsharded``."""
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


def _page(sections: dict[str, list[Report]], problems: Sequence[str]) -> str:
    """The page, with its figures inside."""
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
