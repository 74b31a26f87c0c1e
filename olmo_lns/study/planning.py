"""Plan a study, or the run of a config file, without training.

A plan loads the configs, counts the parameters, checks the settings and estimates the cost.
"""

from __future__ import annotations

import logging
import math
import textwrap
from typing import Any, Mapping, Sequence

from olmo_lns.arms import ARMS, arm_from_text
from olmo_lns.errors import LNSConfigError
from olmo_lns.study import bundled_configs, yaml_files
from olmo_lns.study.data.corpora import CORPUS_BUILDERS
from olmo_lns.study.describe import Study
from olmo_lns.study.engines import ENGINES, Engine, Run, overrides_for

log = logging.getLogger("olmo_lns")

#: GPU -> dense bf16 FLOP/s of the SXM part (vendor data sheet).
GPUS = {"A100": 312e12, "H100": 989.5e12, "H200": 989.5e12}
#: Assumed share of a GPU's peak that training reaches, and factor on the time for evaluation and checkpoints.
UTILIZATION, MARGIN = 0.4, 1.25


def arm_problems(name: str, settings: Mapping[str, Any], engine: Engine) -> list[str]:
    """Return a message for each of the flat settings that contradicts the definition of an arm."""
    try:
        expected = engine.arm_settings(overrides_for(arm_from_text(name), engine))
    except LNSConfigError as error:
        return [str(error)]
    actual = engine.arm_settings(settings)
    return [
        f"{key} is {actual[key]!r}, but arm {name!r} needs {value!r}. Change the setting, or name the arm that it "
        "makes."
        for key, value in expected.items()
        if actual[key] != value
    ]


def compare_arms(runs: Sequence[Run], settings: Mapping[str, Mapping[str, Any]] | None = None) -> None:
    """Check that runs can be compared.

    Each run must have the settings of its arm. Runs of one size and seed may differ only in the settings of their arms.
    An engine has a list of settings that change the loss, and a list of settings that do not. If two runs differ in a
    setting of neither list, a warning is logged.

    :param settings: name of a run -> its flat settings, for the runs to check. None checks the configs of all runs.
    :raises LNSConfigError: if a run does not have the settings of its arm, or two runs differ. The message has the
        key and both values.
    """
    unknown: dict[str, str] = {}
    references: dict[tuple[str, int], Run] = {}
    if settings is None:
        settings = {run.name: run.settings for run in runs}
    for run in runs:
        if run.name not in settings:
            continue
        engine, current = run.engine, settings[run.name]
        if problems := arm_problems(run.arm, current, engine):
            raise LNSConfigError(f"Run {run.name} does not match its arm. {problems[0]}")
        reference = references.setdefault((run.size, run.seed), run)
        expected = settings[reference.name]
        has_rate = reference.rate is not None or run.rate is not None
        allowed = engine.arm_keys | {*(engine.rate_keys if has_rate else ())}
        for key in sorted({*current, *expected} - allowed):
            if current.get(key) == expected.get(key) or engine.ignored_keys.match(key):
                continue
            if not engine.compared_keys.match(key):
                values = f"{expected.get(key)!r} in {reference.name}, {current.get(key)!r} in {run.name}"
                unknown.setdefault(key, f"{key} ({values})")
            else:
                raise LNSConfigError(
                    f"{reference.name} and {run.name} differ in {key}: the first has {expected.get(key)!r}, the second "
                    f"has {current.get(key)!r}. Compared runs may differ only in the settings of their arms. Use the "
                    "same value in both configs."
                )
    if unknown:
        log.warning(
            "The compared runs differ in settings that olmo-lns does not recognize: %s. Check whether they change the "
            "loss.", "; ".join(unknown.values()),
        )  # fmt: skip


def find_problems(run: Run, gpus: int, *, has_layout: bool = True) -> list[str]:
    """Return the problems of a run on a number of GPUs.

    :param has_layout: False for a config file, for which nobody has named the number of GPUs.
    :raises LNSConfigError: if the framework cannot load the config or build the model.
    """
    workload, engine = run.workload, run.engine
    problems = arm_problems(run.arm, run.settings, engine) if run.arm else []
    problems += engine.problems(run.settings, gpus)
    if workload.steps and workload.warmup >= workload.steps:
        problems.append(
            f"The warm-up has {workload.warmup} steps, but the run has only {workload.steps}. The warm-up must end "
            "before the run does. Change one of the two."
        )
    if has_layout and (problem := workload.batch_problem(gpus)):
        problems.append(problem)
    run.require_model()
    return problems


def hours(run: Run, gpu: str) -> float:
    """Return the hours of a run on one GPU: :attr:`Workload.flops` at :data:`UTILIZATION` of the peak."""
    return run.workload.flops / (GPUS[gpu] * UTILIZATION) / 3600


def planned_hours(study: Study, run: Run) -> float:
    """Return the hours of a run on all its GPUs, times :data:`MARGIN`."""
    return hours(run, study.gpu) * MARGIN / math.prod(study.layout(run))


def table(study: Study, runs: Sequence[Run]) -> str:
    """Return a text table with one line per size, followed by the totals. Short names fit in 80 columns."""
    gpu = study.gpu
    width = max(4, *(len(run.size_and_rate) for run in runs))
    lines = [f"{'size':<{width}} runs params tokens   steps  {gpu} h GPUs     a run"]
    for size in dict.fromkeys(run.size_and_rate for run in runs):
        runs_of_size = [run for run in runs if run.size_and_rate == size]
        run = runs_of_size[0]
        workload, gpus, gpu_hours = run.workload, math.prod(study.layout(run)), hours(run, gpu)
        if workload.steps:
            tokens, steps = _format_number(workload.tokens), f"{workload.steps:,}"
            cost, duration = f"{gpu_hours:,.1f}", _format_hours(gpu_hours / gpus)
        else:  # a duration in epochs
            tokens = steps = cost = duration = "–"
        lines.append(
            f"{size:<{width}} {len(runs_of_size):>4} {_format_number(run.parameter_count):>6} {tokens:>6} {steps:>7} "
            f"{cost:>7} {gpus:>4} {duration:>9}"
        )
    labels = ", ".join(ARMS[arm].label for arm in dict.fromkeys(run.arm for run in runs) if arm)
    totals = (
        f"All {len(runs)} runs{f' ({labels})' if labels else ''}: {sum(run.workload.flops for run in runs):.2e} FLOPs, "
        f"{sum(hours(run, gpu) for run in runs):,.0f} {gpu} hours. Estimates at {UTILIZATION:.0%} of the dense bf16 "
        "peak, without evaluation, checkpoints and queues."
    )
    return "\n".join([*lines, "", textwrap.fill(totals, 80)])


def describe_needed_data(study: Study, runs: Sequence[Run]) -> str:
    """Return the number of tokens that the longest run reads, and the command that checks the data."""
    if study.data in CORPUS_BUILDERS:
        return "data: text of this Python, which `study launch … --run` makes; nothing is downloaded"
    workload = max((run.workload for run in runs), key=lambda workload: workload.tokens)
    if not workload.steps:
        return "data: not checked, because the duration is in epochs"
    folder = "$OLMO_DATA_DIR" if study.engine.data_variable == "OLMO_DATA_DIR" else "FOLDER"  # MEGATRON_DATA is a list
    if study.data:
        folder = str(study.path.parent / study.data)
    rows = workload.steps * workload.batch_size
    return (
        f"data: {_format_number(workload.tokens)} tokens (docs/data.md); to check them:\n"
        f"  olmo-lns data check {folder} --sequence {workload.sequence_length} --rows {rows}"
    )


def _format_hours(value: float) -> str:
    return f"{value:.3g} h" if value < 48 else f"{value / 24:.1f} days"


def _format_number(number: float) -> str:
    for limit, unit in ((1e9, "B"), (1e6, "M")):
        if number >= limit:
            return f"{number / limit:.3g}{unit}"
    return f"{number:,.0f}"


def print_plan(
    name: str, only: Sequence[str] | None, *, gpus: int | None, nodes: int | None, gpu: str | None
) -> list[str]:
    """Print the plan of a description or a config file, and return its problems.

    :param name: a file, or a name in the pack.
    :param only, gpus, nodes, gpu: options of the command line.
    :raises LNSConfigError: if the file cannot be read, or the runs differ in more than the arm.
    """
    path = bundled_configs.find_config(name, "study")
    keys = yaml_files.read_text(path)
    is_description = "arms" in keys
    if is_description:
        study = Study.load(path)
    elif engine := next((engine for engine in ENGINES.values() if engine.identifying_key in keys), None):
        study = Study.from_config(path, engine)
    else:
        raise LNSConfigError(
            f"{path} is neither a description of a study, which has a key arms, nor a training config of OLMo, "
            "OLMo-core or Megatron. Pass one of these."
        )
    study = study.with_options(gpus, nodes, gpu)
    runs, problems, loaded = study.select_runs(only), list[str](), list[Run]()
    has_layout = is_description or gpus is not None
    for run in runs:
        label = run.name if is_description else path.name
        try:
            found = find_problems(run, math.prod(study.layout(run)), has_layout=has_layout)
            problems += [f"{label}: {problem}" for problem in found]
            loaded.append(run)
        except LNSConfigError as error:
            problems.append(f"{label}: {error}")
    if loaded == runs and is_description:
        compare_arms(runs)
    if loaded:
        print(f"{table(study, loaded)}\n\n{describe_needed_data(study, loaded)}")
    if study.engine.skipped_check():
        print(f"note: {study.engine.skipped_check()}")
    return problems
