"""Load, count, check and price the runs of a study, or config files, without running anything."""

from __future__ import annotations

import csv
import math
import shlex
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any, Iterable, Mapping, Sequence

from olmo_lns.errors import LNSConfigError
from olmo_lns.study import files
from olmo_lns.study.arms import ARMS, arm_named
from olmo_lns.study.data.corpora import BUILT, DOLMA
from olmo_lns.study.describe import Study
from olmo_lns.study.engines import ENGINES, Engine, Run, settings_of
from olmo_lns.study.engines.base import GPUS

#: A job is planned on this GPU, at this share of its peak, with this margin for evaluation and checkpoints.
GPU, UTILISATION, MARGIN = "A100", 0.4, 1.25
#: Files of other commands, which check them themselves: the key that tells them -> whose they are.
ELSEWHERE = {"dataset_name": "TRL's own command", "augment": "olmo-lns vision train"}


def arm_problems(name: str, settings: Mapping[str, Any], engine: Engine) -> list[str]:
    """Flat settings that contradict the arm's definition; empty when none does."""
    try:
        wanted = engine.defining(settings_of(arm_named(name), engine))
    except LNSConfigError as error:
        return [str(error)]
    found = engine.defining(settings)
    return [
        f"{key}={found[key]!r}, but arm {name!r} is {key}={value!r}"
        for key, value in wanted.items()
        if found[key] != value
    ]


def compare_arms(runs: Iterable[Run], settings: Mapping[str, Mapping[str, Any]]) -> None:
    """Each run must be its arm, and the arms of one size and seed must differ in the arm's keys only.

    :param settings: flat ones of the runs that are known, by the run's name.
    :raises LNSConfigError: the two runs, the key and both values.
    """
    firsts: dict[tuple[str, int], Run] = {}
    for run in (run for run in runs if run.name in settings):
        engine, found = run.engine, settings[run.name]
        if problems := arm_problems(run.arm, found, engine):
            raise LNSConfigError(f"run {run.name} is not its arm: {problems[0]}")
        first = firsts.setdefault((run.group, run.seed), run)
        own = engine.arm_keys | ({*engine.rate_keys} if (first.rate, run.rate) != (None, None) else set())
        other = settings[first.name]
        keys = (key for key in sorted({*found, *other}) if key not in own and engine.compared.match(key))
        if different := [key for key in keys if found.get(key) != other.get(key)]:
            key, more = different[0], f" (and {len(different) - 1} more)" if len(different) > 1 else ""
            raise LNSConfigError(
                f"{first.name} and {run.name} differ in more than the arm: {key} is {other.get(key)!r} and "
                f"{found.get(key)!r}{more}; their losses cannot be compared"
            )


def compare_planned(runs: Sequence[Run]) -> None:
    """:func:`compare_arms` before anything runs, on the settings that the configs give."""
    compare_arms(runs, {run.name: run.settings for run in runs})


def check(
    run: Run, gpus: int, gpu: str, budget: float | None = None, *, gpus_given: bool = True
) -> tuple[list[str], list[str]]:
    """``(problems, notes)`` of one run; a note names what could not be checked.

    :param gpus_given: the batch must divide over them; else they serve an estimate.
    :raises LNSConfigError: the framework does not load its config.
    """
    settings, shape, engine = run.settings, run.shape, run.engine
    problems = arm_problems(run.arm, settings, engine) if run.arm else []
    found, notes = engine.problems(settings, gpus)
    machine = engine.machine(settings)
    memory = machine.memory(shape, gpus)
    if memory is not None and memory > GPUS[gpu].memory:
        split = f" with {machine.split_by} (see the config's header for this GPU)" if machine.split_by else ""
        notes.append(f"{run.size}: {memory / 1e9:.0f} GB a GPU by the estimate{split}, more than {gpu} has")
    if gpus_given and (problem := machine.problem(shape, gpus, even=engine.even)):
        found.append(problem)
    if shape.steps and shape.warmup >= shape.steps:
        found.append(f"warm-up of {shape.warmup} steps in a run of {shape.steps}: it never ends")
    if budget and shape.steps and shape.steps != (fewest := -(-int(budget) // shape.tokens_per_step)):
        found.append(f"{shape.steps} steps of {shape.tokens_per_step:,} tokens: expected {fewest} for {budget:.3g}")
    return problems + found, notes


def price(run: Run, gpus: int, gpu: str = GPU, mfu: float = UTILISATION) -> dict[str, Any]:
    """The numbers of one run, the columns of ``--csv``.

    ``flops`` is 6 N D plus attention (:attr:`Shape.flops`); the hours follow from it. ``days`` is for the run on its
    GPUs. ``memory_gb`` is an estimate for a GPU. ``disk_gb`` is what the run fills: the checkpoints that it keeps, and
    the one being written.
    """
    shape = run.shape
    memory = run.engine.machine(run.settings).memory(shape, gpus)
    hours = {name: shape.flops / (kind.peak * mfu) / 3600 for name, kind in GPUS.items()}
    return {
        "run": run.name,
        "size": run.size,
        "arm": run.arm,
        "seed": run.seed,
        "parameters": run.engine.count(run.config, run.loaded),
        "steps": shape.steps,
        "tokens": shape.tokens,
        "warmup_share": shape.warmup / shape.steps if shape.steps else None,
        "flops": shape.flops,
        **{f"hours_{name.lower()}": value for name, value in hours.items()},
        "gpus": gpus,
        "days": hours[gpu] / gpus / 24,
        "memory_gb": None if memory is None else memory / 1e9,
        "checkpoint_gb": shape.checkpoint_bytes / 1e9,
        "disk_gb": (run.engine.kept(run.settings, shape.steps) + 1) * shape.checkpoint_bytes / 1e9,
    }


def table(rows: Sequence[dict[str, Any]], mfu: float, gpu: str) -> str:
    """One line per size, in 80 columns where its name is short; and the study's totals."""
    width, hours = max(len(row["size"]) for row in rows), f"hours_{gpu.lower()}"
    lines = [f"{'size':<{width}} runs params tokens   steps  {gpu} h GPUs     a run GB/GPU disk a run"]
    for size in dict.fromkeys(row["size"] for row in rows):
        mine = [row for row in rows if row["size"] == size]
        row = mine[0]
        memory = "–" if row["memory_gb"] is None else f"{row['memory_gb']:.0f}"
        known = [_short(row["tokens"]), f"{row['steps']:,}", _hours(row[hours]), duration(86400 * row["days"])]
        tokens, steps, spent, lasts = known if row["steps"] else ["–"] * 4
        lines.append(
            f"{size:<{width}} {len(mine):>4} {_short(row['parameters']):>6} {tokens:>6} {steps:>7} {spent:>7} "
            f"{row['gpus']:>4} {lasts:>9} {memory:>6} {row['disk_gb']:>7,.3g} GB"
        )
    total = {key: sum(row[key] for row in rows) for key in ("flops", "hours_a100", "hours_h100", "days", "disk_gb")}
    arms = ", ".join(ARMS[arm].label for arm in dict.fromkeys(row["arm"] for row in rows) if arm)
    text = (
        f"All {len(rows)} runs{f' ({arms})' if arms else ''}: {total['flops']:.2e} FLOPs, "
        f"{_hours(total['hours_a100'])} A100 or {_hours(total['hours_h100'])} H100 hours; one after the other "
        f"{duration(86400 * total['days'])} on {gpu}s; {total['disk_gb']:,.4g} GB of disk, for the checkpoints that "
        f"the configs keep and the one being written. Estimates at {mfu:.0%} of the dense bf16 peak, without "
        "evaluation, checkpoints and queues."
    )
    return "\n".join([*lines, "", textwrap.fill(text, 80)])


def data_advice(study: Study, run: Run) -> list[str]:
    """The data that a run reads, and the commands that make them."""
    shape, variable = run.shape, f"${run.engine.data_variable}"
    if study.data:
        return ["text that the launch makes" if study.data in BUILT else str(study.path.parent / study.data)]
    vocabulary, masks = run.engine.corpus(run.settings)
    rows = shape.steps * shape.batch
    folder = "TOKENS" if run.engine.indexed_data else variable
    if masks:
        how = f"--tokenizer t5-base --eos '</s>' --pad '<pad>' --layout rows --sequence {shape.sequence} --out {folder}"
        make = [f"olmo-lns data prepare c4 train {how} --rows {rows}"]
        make += [f"olmo-lns data prepare c4 validation --name validation {how} --tokens 1e7"]
    elif DOLMA.vocabulary <= vocabulary <= DOLMA.embedding:
        make = [f"olmo-lns data fetch dolma --out {folder} --tokens {shape.tokens}"]
    else:
        make = [f"olmo-lns data prepare … --tokenizer ONE_WITH_{vocabulary}_IDS --out {folder}"]
    what = f"{_short(shape.tokens)} tokens with ids below {vocabulary:,}{' and label masks' if masks else ''}"
    if run.engine.indexed_data:
        make.append(f"olmo-lns data megatron {folder} --out FOLDER")
    check = f"olmo-lns data check {folder} --vocab-size {vocabulary} --sequence {shape.sequence} --rows {rows}"
    return [f"{what}, in {variable}; to make them (docs/data.md):", *make, *([check] if rows else [])]


def around(study: Study, command: Sequence[str]) -> str:
    """The data, and the next command."""
    run = max(study.runs, key=lambda run: run.shape.tokens)
    first, *more = data_advice(study, run)
    lines = [f"data: {first}", *(f"  {line}" for line in more)]
    script = study.launch.command
    where = "" if script == "train" or files.script(script) != script else f"   # in the folder that has {script}"
    several = any(study.layout(run)[0] > 1 for run in study.runs)
    lines.append(f"next: {shlex.join(command)} {'--slurm JOBS' if several else '--run'}{where}")
    if several:
        lines.append("  (without --slurm JOBS it prints the commands for each node)")
    return "\n".join(lines)


def duration(seconds: float) -> str:
    """``45 s``, ``12 min``, ``3.5 h``, ``2.1 days``."""
    for limit, unit, text in ((90, 1, "s"), (5400, 60, "min")):
        if seconds < limit:
            return f"{seconds / unit:.0f} {text}"
    return f"{seconds / 3600:.1f} h" if seconds < 172800 else f"{seconds / 86400:.1f} days"


def _short(number: float) -> str:
    for limit, unit in ((1e9, "B"), (1e6, "M")):
        if number >= limit:
            return f"{number / limit:.3g}{unit}"
    return f"{number:,.0f}"


def _hours(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def planned_hours(study: Study, run: Run, gpu: str = GPU, mfu: float = UTILISATION) -> float:
    """Hours of a run on its GPUs, with :data:`MARGIN`."""
    return run.shape.flops / (GPUS[gpu].peak * mfu) / 3600 * MARGIN / math.prod(study.layout(run))


def targets(names: Sequence[str]) -> tuple[list[Study], list[str], list[str]]:
    """``(studies, problems, notes)``: each description, and the config files of each framework as one study.

    :param names: files, folders (searched), or names of the pack.
    :raises LNSConfigError: a name without a file.
    """
    paths: list[Path] = []
    for name in names:
        here = next((p for p in (Path(name), files.pack_folder().parent / name) if p.is_dir()), None)
        paths += sorted(here.rglob("*.y*ml")) if here else [files.located(name, "study")]
    studies, configs, problems, notes = list[Study](), dict[Engine, list[Path]](), list[str](), list[str]()
    for path in paths:
        try:
            raw = files.read_text(path)
            if whose := next((text for key, text in ELSEWHERE.items() if key in raw), None):
                notes.append(f"{path}: not checked here: {whose} checks its own configs")
            elif "arms" in raw:
                studies.append(Study.load(path))
            elif engine := next((engine for engine in ENGINES.values() if engine.file_key in raw), None):
                configs.setdefault(engine, []).append(path)
            else:
                problems.append(f"{path}: of no known kind: expected a study (arms:) or a framework's config")
        except LNSConfigError as error:
            problems.append(str(error))
    return [*studies, *(Study.of_configs(found, engine) for engine, found in configs.items())], problems, notes


def show(study: Study, *, only: Sequence[str] | None, mfu: float, gpu: str, budget: float | None, csv_file: Path | None,
         command: Sequence[str]) -> int:  # fmt: skip
    """Print the plan of one study. :returns: the number of problems.

    :raises LNSConfigError: the arms differ in more than the arm.
    """
    study = replace(study, runs=tuple(study.selected(only)))
    problems, notes, rows = list[str](), dict[str, None](), []
    for run in study.runs:
        gpus = math.prod(study.layout(run))
        try:
            found, said = check(run, gpus, gpu, budget, gpus_given=not study.is_configs or study.gpus is not None)
            rows.append(price(run, gpus, gpu, mfu))
        except LNSConfigError as error:
            found, said = [str(error).removeprefix(f"{run.config}: ")], []
        problems += [f"{run.config if study.is_configs else f'run {run.name}'}: {text}" for text in found]
        notes |= dict.fromkeys(said)
    if not study.is_configs and len(rows) == len(study.runs):
        compare_planned(study.runs)
    if rows:
        print(table(rows, mfu, gpu))
    if not study.is_configs:
        print(f"\n{around(study, command)}")
    print("".join(f"note: {text}\n" for text in notes) + "".join(f"PROBLEM: {text}\n" for text in problems), end="")
    if csv_file and rows:
        with csv_file.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        print(f"wrote {csv_file}")
    return len(problems)
