"""Load, count, check and price the runs of a study, or config files, without running anything."""

from __future__ import annotations

import math
import shlex
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any, Mapping, Sequence

from olmo_lns.errors import LNSConfigError
from olmo_lns.study import files
from olmo_lns.study.arms import ARMS, arm_named
from olmo_lns.study.data.corpora import BUILT, DOLMA
from olmo_lns.study.describe import GPUS_OF_A_NODE, Study
from olmo_lns.study.engines import ENGINES, Engine, Run, settings_of
from olmo_lns.study.engines.base import CHECKPOINT_BYTES, GPUS

#: Default GPU of the plan, share of its peak, and margin for evaluation and checkpoints.
GPU, UTILISATION, MARGIN = "A100", 0.4, 1.25
#: Key of config files that other commands check -> the command.
ELSEWHERE = {"dataset_name": "TRL's own command", "augment": "configs/vision/train.py"}


def arm_problems(name: str, settings: Mapping[str, Any], engine: Engine) -> list[str]:
    """Return the flat settings that contradict the arm's definition."""
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


def compare_arms(runs: Sequence[Run], settings: Mapping[str, Mapping[str, Any]] | None = None) -> None:
    """Check that each run is its arm, and that the arms of one size and seed differ in the arm's keys only.

    :param settings: run name -> flat settings, for some runs; None uses the configs' settings of all runs.
    :raises LNSConfigError: the two runs, the key and both values.
    """
    firsts: dict[tuple[str, int], Run] = {}
    if settings is None:
        settings = {run.name: run.settings for run in runs}
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


def check(run: Run, gpus: int | None) -> tuple[list[str], list[str]]:
    """Return ``(problems, notes)`` of one run; a note names a check that was not possible.

    :param gpus: number of GPUs that must divide the batch; None if unknown.
    :raises LNSConfigError: the framework does not load its config.
    """
    settings, shape, engine = run.settings, run.shape, run.engine
    problems = arm_problems(run.arm, settings, engine) if run.arm else []
    found, notes = engine.problems(settings, gpus or GPUS_OF_A_NODE)
    if gpus and (problem := engine.machine(settings).problem(shape, gpus)):
        found.append(problem)
    if shape.steps and shape.warmup >= shape.steps:
        found.append(f"warm-up of {shape.warmup} steps in a run of {shape.steps}: expected fewer")
    return problems + found, notes


def hours(run: Run, gpu: str) -> float:
    """Return the hours of a run on one GPU: 6 N D plus attention (:attr:`Shape.flops`) at :data:`UTILISATION`."""
    return run.shape.flops / (GPUS[gpu] * UTILISATION) / 3600


def disk(run: Run) -> float:
    """Return the gigabytes of a run: its kept checkpoints and one being written."""
    return (run.engine.kept(run.settings, run.shape.steps) + 1) * CHECKPOINT_BYTES * run.shape.parameters / 1e9


def planned_hours(study: Study, run: Run, gpu: str = GPU) -> float:
    """Return the hours of a run on its GPUs, with :data:`MARGIN`."""
    return hours(run, gpu) * MARGIN / math.prod(study.layout(run))


def table(study: Study, runs: Sequence[Run], gpu: str) -> str:
    """Return one line per size, in 80 columns for short names, and the study's totals."""
    width = max(4, *(len(run.size) for run in runs))
    total = sum(hours(run, gpu) / math.prod(study.layout(run)) for run in runs)
    lines = [f"{'size':<{width}} runs params tokens   steps  {gpu} h GPUs     a run disk a run"]
    for size in dict.fromkeys(run.size for run in runs):
        mine = [run for run in runs if run.size == size]
        run, shape, gpus = mine[0], mine[0].shape, math.prod(study.layout(mine[0]))
        spent = hours(run, gpu)
        known = [_short(shape.tokens), f"{shape.steps:,}", _hours(spent), _lasting(spent / gpus)]
        tokens, steps, cost, lasts = known if shape.steps else ["–"] * 4
        lines.append(
            f"{size:<{width}} {len(mine):>4} {_short(run.engine.count(run.config, run.loaded)):>6} {tokens:>6} "
            f"{steps:>7} {cost:>7} {gpus:>4} {lasts:>9} {disk(run):>7,.3g} GB"
        )
    arms = ", ".join(ARMS[arm].label for arm in dict.fromkeys(run.arm for run in runs) if arm)
    both = " or ".join(f"{_hours(sum(hours(run, name) for run in runs))} {name}" for name in ("A100", "H100"))
    text = (
        f"All {len(runs)} runs{f' ({arms})' if arms else ''}: {sum(run.shape.flops for run in runs):.2e} FLOPs, {both} "
        f"hours; one after the other {_lasting(total)} on {gpu}s; {sum(map(disk, runs)):,.4g} GB of disk, for "
        "the checkpoints that the configs keep and the one being written. Estimates at "
        f"{UTILISATION:.0%} of the dense bf16 peak, without evaluation, checkpoints and queues."
    )
    return "\n".join([*lines, "", textwrap.fill(text, 80)])


def data_advice(study: Study, run: Run) -> list[str]:
    """Return the data of a run, and the commands that make them."""
    shape, variable = run.shape, f"${run.engine.data_variable}"
    if study.data:
        return ["text that the launch makes" if study.data in BUILT else str(study.path.parent / study.data)]
    vocabulary, masks = run.engine.corpus(run.settings)
    rows = shape.steps * shape.batch
    folder = "TOKENS" if run.engine.indexed_data else variable
    if masks:
        how = f"--tokenizer t5-base --eos '</s>' --pad '<pad>' --layout rows --sequence {shape.sequence} --out {folder}"
        make = [f"olmo-lns data prepare c4 train {how} --rows {rows or 'ROWS'}"]
        make += [f"olmo-lns data prepare c4 validation --name validation {how} --tokens 1e7"]
    elif DOLMA.vocabulary <= vocabulary <= DOLMA.embedding:
        make = [f"olmo-lns data fetch dolma --out {folder} --tokens {shape.tokens or 'TOKENS'}"]
    else:
        make = [f"olmo-lns data prepare … --tokenizer ONE_WITH_{vocabulary}_IDS --out {folder}"]
    what = f"{_short(shape.tokens)} tokens with ids below {vocabulary:,}{' and label masks' if masks else ''}"
    if run.engine.indexed_data:
        make.append(f"olmo-lns data megatron {folder} --out FOLDER")
    check = f"olmo-lns data check {folder} --vocab-size {vocabulary} --sequence {shape.sequence} --rows {rows}"
    return [f"{what}, in {variable}; to make them (docs/data.md):", *make, *([check] if rows else [])]


def next_steps(study: Study, only: Sequence[str] | None, gpu: str) -> str:
    """Return the data of a study, and the next command."""
    first, *more = data_advice(study, max(study.runs, key=lambda run: run.shape.tokens))
    lines = [f"data: {first}", *(f"  {line}" for line in more)]
    name = study.path.stem if study.path.is_relative_to(files.pack_folder()) else str(study.path)
    words = ["olmo-lns", "study", "launch", name, "--out", "RUNS", *(["--only", *only] if only else [])]
    for key in ("gpus", "nodes"):
        words += [f"--{key}", str(value)] if (value := getattr(study, key)) else []
    words += ["--gpu", gpu] if gpu != GPU else []
    script = study.launch.command
    where = "" if script == "train" or files.script(script) != script else f"   # in the folder that has {script}"
    several = any(study.layout(run)[0] > 1 for run in study.runs)
    lines.append(f"next: {shlex.join(words)} {'--slurm JOBS' if several else '--run'}{where}")
    if several:
        lines.append("  (without --slurm JOBS the command prints the commands for each node)")
    return "\n".join(lines)


def _lasting(value: float) -> str:
    return f"{value:.3g} h" if value < 48 else f"{value / 24:.1f} days"


def _short(number: float) -> str:
    for limit, unit in ((1e9, "B"), (1e6, "M")):
        if number >= limit:
            return f"{number / limit:.3g}{unit}"
    return f"{number:,.0f}"


def _hours(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def targets(names: Sequence[str]) -> tuple[list[Study], list[str], list[str]]:
    """Return ``(studies, problems, notes)``: each description, and the config files of each framework as one study.

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
                problems.append(f"{path}: unknown kind of file, expected a study (arms:) or a framework's config")
        except LNSConfigError as error:
            problems.append(str(error))
    return [*studies, *(Study.of_configs(found, engine) for engine, found in configs.items())], problems, notes


def show(study: Study, only: Sequence[str] | None, gpu: str) -> int:
    """Print the plan of one study. :returns: the number of problems.

    :raises LNSConfigError: the arms differ in more than the arm.
    """
    study = replace(study, runs=tuple(study.selected(only)))
    problems, notes, loaded = list[str](), dict[str, None](), list[Run]()
    for run in study.runs:
        try:
            asked = not study.is_configs or study.gpus is not None
            found, said = check(run, math.prod(study.layout(run)) if asked else None)
            run.engine.count(run.config, run.loaded)
            loaded.append(run)
        except LNSConfigError as error:
            found, said = [str(error).removeprefix(f"{run.config}: ")], []
        problems += [f"{run.config if study.is_configs else f'run {run.name}'}: {text}" for text in found]
        notes |= dict.fromkeys(said)
    if not study.is_configs and len(loaded) == len(study.runs):
        compare_arms(study.runs)
    if loaded:
        print(table(study, loaded, gpu))
    if not study.is_configs:
        print(f"\n{next_steps(study, only, gpu)}")
    print("".join(f"note: {text}\n" for text in notes) + "".join(f"PROBLEM: {text}\n" for text in problems), end="")
    return len(problems)
