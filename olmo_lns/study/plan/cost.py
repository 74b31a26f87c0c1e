"""What a study costs: FLOPs counted two ways, GPU-hours, days, memory, checkpoint disk."""

from __future__ import annotations

import csv
import math
import re
import textwrap
from pathlib import Path
from typing import Any, Sequence

from olmo_lns.study.arms import ARMS
from olmo_lns.study.data.corpora import BUILT
from olmo_lns.study.engines.base import GPUS
from olmo_lns.study.plan.check import check_batches, compare_planned
from olmo_lns.study.plan.spec import Run, Study, published

#: A job is planned on this GPU, at this share of its peak, with this margin for evaluation and checkpoints.
GPU, UTILISATION, MARGIN = "A100", 0.4, 1.25


def _gpu_hours(run: Run, gpu: str, mfu: float) -> float:
    return run.own_share * run.shape.flops / (GPUS[gpu].peak * mfu) / 3600


def rows(study: Study, mfu: float = UTILISATION, *, gpu: str = GPU, gpus: int | None = None) -> list[dict[str, Any]]:
    """A mapping for each run, the columns of :func:`write_csv`.

    ``flops`` is 6 N D plus attention (:attr:`Shape.flops`); the hours follow from it. ``flops_counted`` is the
    count of the framework, None where it has no counter. ``days`` is for the run on its GPUs. ``memory_gb`` is an
    estimate for a GPU, None without one. ``checkpoint_gb`` is one checkpoint with optimizer state.

    :param mfu: model FLOPs utilisation, 0…1. :param gpus: of a run, instead of the description's.
    :raises LNSConfigError: the arms differ in more than the arm, or the GPUs do not divide a batch.
    """
    compare_planned(study.runs)
    check_batches(study, study.runs, gpus)
    return [_row(run, mfu, gpu, gpus or study.gpus(run)) for run in study.runs]


def _row(run: Run, mfu: float, gpu: str, gpus: int) -> dict[str, Any]:
    shape = run.shape
    parameters, per_token = run.engine.count(run.config, run.loaded)
    memory = run.engine.machine(run.settings).memory(shape, gpus)
    return {
        "run": run.name,
        "size": run.size,
        "arm": run.arm,
        "seed": run.seed,
        "parameters": parameters,
        "steps": shape.steps,
        "tokens": shape.tokens,
        "warmup_share": shape.warmup / shape.steps,
        "flops": run.own_share * shape.flops,
        "flops_counted": None if per_token is None else run.own_share * per_token * shape.tokens,
        **{f"hours_{name.lower()}": _gpu_hours(run, name, mfu) for name in GPUS},
        "gpus": gpus,
        "days": _gpu_hours(run, gpu, mfu) / gpus / 24,
        "memory_gb": None if memory is None else memory / 1e9,
        "checkpoint_gb": shape.checkpoint_bytes / 1e9,
    }


def table(planned: Sequence[dict[str, Any]], mfu: float, gpu: str) -> str:
    """One line per size, in 80 columns where its name is short; and the study's totals."""
    width, hours = max(len(row["size"]) for row in planned), f"hours_{gpu.lower()}"
    lines, full = [f"{'size':<{width}} runs params tokens   steps  {gpu} h GPUs     a run GB/GPU checkpoint"], []
    for size in dict.fromkeys(row["size"] for row in planned):
        mine = [row for row in planned if row["size"] == size]
        row = mine[0]
        memory = "–" if row["memory_gb"] is None else f"{row['memory_gb']:.0f}"
        lines.append(
            f"{size:<{width}} {len(mine):>4} {_short(row['parameters']):>6} {_short(row['tokens']):>6} "
            f"{row['steps']:>7,} {_hours(row[hours]):>7} {row['gpus']:>4} {duration(86400 * row['days']):>9} "
            f"{memory:>6} {row['checkpoint_gb']:>7.3g} GB"
        )
        if (row["memory_gb"] or 0) * 1e9 > GPUS[gpu].memory:
            full.append(f"{size}: {memory} GB by the estimate, more than {gpu} has")
    total = {
        key: sum(row[key] for row in planned) for key in ("flops", "hours_a100", "hours_h100", "days", "checkpoint_gb")
    }
    arms = ", ".join(ARMS[arm].label for arm in dict.fromkeys(row["arm"] for row in planned))
    text = (
        f"All {len(planned)} runs ({arms}): {total['flops']:.2e} FLOPs, {_hours(total['hours_a100'])} A100 or "
        f"{_hours(total['hours_h100'])} H100 hours; one after the other {duration(86400 * total['days'])} on {gpu}s; "
        f"{total['checkpoint_gb']:,.4g} GB for one checkpoint of each. Estimates at {mfu:.0%} of the dense bf16 peak, "
        "without evaluation, checkpoints and queues."
    )
    return "\n".join([*lines, "", textwrap.fill(text, 80), *full])


def around(study: Study, launch: str) -> str:
    """The data, the command, and the published results of these runs; in 80 columns.

    :param launch: the command without the way in which the runs are started.
    """
    shown = published()["tables"].get(study.published, {"measure": "", "title": "", "cells": {}})
    make = "prepare c4 …" if shown["measure"] == "perplexity" else "fetch dolma -o FOLDER"
    make += f", then {study.engine.data_format}" if study.engine.data_format else ""
    tokens = _short(max(run.shape.tokens for run in study.runs))
    data = f"{tokens} tokens in ${study.engine.data_variable}; have none? olmo-lns data {make} (docs/data.md)"
    if study.data:
        data = "text that the launch makes" if study.data in BUILT else str(study.path.parent / study.data)
    where = "" if study.launch.command == "train" else f", in the folder that has {study.launch.command}"
    jobs = "" if study.data in BUILT else ", or --slurm JOBS for sbatch"
    lines = [f"data: {data}", f"command: {launch} --run{where}{jobs}"]
    cells = [
        f"{size}: " + ", ".join(f"{ARMS[arm].label} {value:g}" for arm, value in found.items())
        for size, found in shown["cells"].items()
        if size in study.groups
    ]
    if cells:
        lines.append(f"published {shown['measure']} ({shown['title']}): {'; '.join(cells)}")
    return "\n".join(textwrap.fill(line, 80, subsequent_indent="  ", break_on_hyphens=False) for line in lines)


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


def write_csv(planned: Sequence[dict[str, Any]], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(planned[0]))
        writer.writeheader()
        writer.writerows(planned)


def planned_hours(study: Study, run: Run, gpu: str = GPU, mfu: float = UTILISATION, gpus: int | None = None) -> float:
    """Hours of a run on its GPUs, with :data:`MARGIN`."""
    return _gpu_hours(run, gpu, mfu) * MARGIN / (gpus or study.gpus(run))


def time_note(size: str, hours: float, time: object, gpu: str = GPU) -> str | None:
    """A note where ``--time`` is shorter than a run, else None."""
    given = _hours_of(str(time))
    if given >= hours:
        return None
    jobs = f"about {math.ceil(hours / given)} jobs one after the other" if given else "no time at all"
    return (
        f"{size}: a run takes about {hours:.3g} h on {gpu}s by the plan, --time is {time}: {jobs}, each from the last "
        "checkpoint"
    )


def _hours_of(time: str) -> float:
    """Slurm's ``--time``: ``minutes[:seconds]``, ``hours:minutes:seconds`` or ``days-hours[:minutes[:seconds]]``.

    Anything else, such as ``UNLIMITED``, is infinite.
    """
    if not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", time):
        return math.inf
    days, _, rest = time.rpartition("-")
    numbers = [*map(float, rest.split(":")), 0.0, 0.0]
    hours, minutes, seconds = numbers[:3] if days or time.count(":") == 2 else (0.0, *numbers[:2])
    return 24 * float(days or 0) + hours + minutes / 60 + seconds / 3600
