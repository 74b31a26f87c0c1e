"""Load, count, check and price the runs of a study, or config files, without running anything."""

from __future__ import annotations

import math
import textwrap
from dataclasses import replace
from typing import Any, Mapping, Sequence

from olmo_lns.errors import LNSConfigError
from olmo_lns.study import files
from olmo_lns.study.arms import ARMS, arm_named
from olmo_lns.study.data.corpora import BUILT
from olmo_lns.study.describe import Study
from olmo_lns.study.engines import ENGINES, Engine, Run, settings_of

#: GPU -> dense bf16 FLOP/s of the SXM part (vendor data sheet).
GPUS = {"A100": 312e12, "H100": 989.5e12, "H200": 989.5e12}
#: Default GPU of the plan, share of its peak, and margin for evaluation and checkpoints.
GPU, UTILISATION, MARGIN = "A100", 0.4, 1.25


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
        for key in sorted({*found, *other} - own):
            if engine.compared.match(key) and found.get(key) != other.get(key):
                raise LNSConfigError(
                    f"{first.name} and {run.name} differ in more than the arm: {key} is {other.get(key)!r} and "
                    f"{found.get(key)!r}; their losses cannot be compared"
                )


def check(run: Run, gpus: int) -> list[str]:
    """Return the problems of one run on so many GPUs.

    :raises LNSConfigError: the framework does not load its config, or cannot build its model.
    """
    shape, engine = run.shape, run.engine
    problems = arm_problems(run.arm, run.settings, engine) if run.arm else []
    problems += engine.problems(run.settings, gpus)
    if shape.steps and shape.warmup >= shape.steps:
        problems.append(f"warm-up of {shape.warmup} steps in a run of {shape.steps}: expected fewer")
    if problem := shape.problem(gpus):
        problems.append(problem)
    _ = run.counted  # builds the model
    return problems


def hours(run: Run, gpu: str) -> float:
    """Return the hours of a run on one GPU: 6 N D plus attention (:attr:`Shape.flops`) at :data:`UTILISATION`."""
    return run.shape.flops / (GPUS[gpu] * UTILISATION) / 3600


def planned_hours(study: Study, run: Run, gpu: str = GPU) -> float:
    """Return the hours of a run on its GPUs, with :data:`MARGIN`."""
    return hours(run, gpu) * MARGIN / math.prod(study.layout(run))


def table(study: Study, runs: Sequence[Run], gpu: str) -> str:
    """Return one line per size, in 80 columns for short names, and the study's totals."""
    width = max(4, *(len(run.size) for run in runs))
    lines = [f"{'size':<{width}} runs params tokens   steps  {gpu} h GPUs     a run"]
    for size in dict.fromkeys(run.size for run in runs):
        mine = [run for run in runs if run.size == size]
        run, shape, gpus = mine[0], mine[0].shape, math.prod(study.layout(mine[0]))
        spent = hours(run, gpu)
        known = [_short(shape.tokens), f"{shape.steps:,}", f"{spent:,.1f}", _lasting(spent / gpus)]
        tokens, steps, cost, lasts = known if shape.steps else ["–"] * 4  # a duration in epochs
        parameters = _short(run.counted)
        lines.append(
            f"{size:<{width}} {len(mine):>4} {parameters:>6} {tokens:>6} {steps:>7} {cost:>7} {gpus:>4} {lasts:>9}"
        )
    arms = ", ".join(ARMS[arm].label for arm in dict.fromkeys(run.arm for run in runs) if arm)
    text = (
        f"All {len(runs)} runs{f' ({arms})' if arms else ''}: {sum(run.shape.flops for run in runs):.2e} FLOPs, "
        f"{sum(hours(run, gpu) for run in runs):,.0f} {gpu} hours. Estimates at {UTILISATION:.0%} of the dense bf16 "
        "peak, without evaluation, checkpoints and queues."
    )
    return "\n".join([*lines, "", textwrap.fill(text, 80)])


def needed_data(study: Study, runs: Sequence[Run]) -> str:
    """Return the data that the longest run reads, and the command that checks them."""
    if study.data in BUILT:
        return "data: text that the launch makes"
    shape = max((run.shape for run in runs), key=lambda shape: shape.tokens)
    where = str(study.path.parent / study.data) if study.data else f"${study.engine.data_variable}"
    rows = shape.steps * shape.batch
    return (
        f"data: {_short(shape.tokens)} tokens (docs/data.md); to check them:\n"
        f"  olmo-lns data check {where} --sequence {shape.sequence} --rows {rows}"
    )


def _lasting(value: float) -> str:
    return f"{value:.3g} h" if value < 48 else f"{value / 24:.1f} days"


def _short(number: float) -> str:
    for limit, unit in ((1e9, "B"), (1e6, "M")):
        if number >= limit:
            return f"{number / limit:.3g}{unit}"
    return f"{number:,.0f}"


def show(name: str, only: Sequence[str] | None, gpu: str, *, gpus: int | None, nodes: int | None) -> list[str]:
    """Print the plan of a description or a config file, and return its problems.

    :param name: a file, or a name of the pack.
    :raises LNSConfigError: it cannot be read, or the arms differ in more than the arm.
    """
    path = files.located(name, "study")
    raw = files.read_text(path)
    if "arms" in raw:
        study = Study.load(path)
    elif engine := next((engine for engine in ENGINES.values() if engine.file_key in raw), None):
        study = Study.of_config(path, engine)
    else:
        raise LNSConfigError(f"{path}: expected a study (arms:) or a framework's config")
    study = replace(study, gpus=gpus, nodes=nodes)
    runs, problems, loaded = study.selected(only), list[str](), list[Run]()
    for run in runs:
        try:
            problems += [f"{run.name}: {text}" for text in check(run, math.prod(study.layout(run)))]
            loaded.append(run)
        except LNSConfigError as error:
            problems.append(f"{run.name}: {error}")
    if loaded == runs and "arms" in raw:
        compare_arms(runs)
    if loaded:
        print(f"{table(study, loaded, gpu)}\n\n{needed_data(study, loaded)}")
    if study.engine.unchecked():
        print(f"note: {study.engine.unchecked()}")
    return problems
