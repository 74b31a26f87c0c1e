"""What a study costs: tokens, steps, FLOPs counted two ways, GPU-hours, checkpoint disk."""

from __future__ import annotations

import csv
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Sequence

from olmo_lns.study.arms import ARMS
from olmo_lns.study.engines.shape import GPUS
from olmo_lns.study.plan.compare import compare_planned
from olmo_lns.study.plan.spec import Run, Study

__all__ = ["Row", "rows", "table", "write_csv"]


@dataclass(frozen=True)
class Row:
    """:param flops: 6 N D plus attention (:attr:`Shape.flops`).

    :param flops_olmo: by OLMo's own counter, None for Megatron.
    :param checkpoint_gb: one checkpoint with optimizer state. GPU-hours are of ``flops``.
    """

    run: str
    size: str
    arm: str
    seed: int
    parameters: int
    steps: int
    tokens: int
    warmup_share: float
    flops: float
    flops_olmo: float | None
    hours_a100: float
    hours_h100: float
    hours_h200: float
    checkpoint_gb: float


def rows(study: Study, mfu: float) -> list[Row]:
    """One row per run, at a model FLOPs utilisation of ``mfu`` (0…1).

    :raises LNSConfigError: the arms differ in more than the arm.
    """
    compare_planned(study.runs)
    return [_row(run, mfu) for run in study.runs]


def _row(run: Run, mfu: float) -> Row:
    shape = run.shape
    parameters, per_token = run.engine.count(run)
    share = 1 - run.first_step / shape.steps  # a branch makes its own steps only
    hours = {f"hours_{name.lower()}": share * shape.gpu_hours(name, mfu) for name in GPUS}
    return Row(
        run=run.name,
        size=run.size,
        arm=run.arm,
        seed=run.seed,
        parameters=parameters,
        steps=shape.steps,
        tokens=shape.tokens,
        warmup_share=shape.warmup_share,
        flops=share * shape.flops,
        flops_olmo=None if per_token is None else share * per_token * shape.tokens,
        checkpoint_gb=shape.checkpoint_bytes / 1e9,
        **hours,
    )


def table(planned: Sequence[Row], mfu: float) -> str:
    """A Markdown table, one line per size, and the study's totals."""
    head = "| size | runs | parameters | steps | tokens | warm-up | FLOPs a run (6ND + attention) | by OLMo's counter "
    head += "| A100 h | H100 h | H200 h | checkpoint |\n" + "|---" * 12 + "|\n"
    body = ""
    for size in dict.fromkeys(row.size for row in planned):
        mine = [row for row in planned if row.size == size]
        row = mine[0]
        counted = "–" if row.flops_olmo is None else f"{row.flops_olmo:.2e}"
        body += (
            f"| {size} | {len(mine)} | {row.parameters:,} | {row.steps:,} | {row.tokens / 1e9:.3g}B "
            f"| {row.warmup_share:.1%} | {row.flops:.2e} | {counted} | {_hours(row.hours_a100)} "
            f"| {_hours(row.hours_h100)} | {_hours(row.hours_h200)} | {row.checkpoint_gb:.3g} GB |\n"
        )
    totals = [sum(getattr(row, key) for row in planned) for key in ("hours_a100", "hours_h100", "hours_h200")]
    disk = sum(row.checkpoint_gb for row in planned)
    arms = ", ".join(ARMS[arm].label for arm in dict.fromkeys(row.arm for row in planned))
    return (
        f"{head}{body}\nHours are GPU-hours of one run at {mfu:.0%} of the dense bf16 peak. All {len(planned)} runs "
        f"({arms}): {sum(row.flops for row in planned):.2e} FLOPs; {totals[0]:,.4g} A100, {totals[1]:,.4g} H100 or "
        f"{totals[2]:,.4g} H200 hours; {disk:,.4g} GB for one checkpoint of each."
    )


def _hours(hours: float) -> str:
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.3g}"


def write_csv(planned: Sequence[Row], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(asdict(planned[0])))
        writer.writeheader()
        writer.writerows(asdict(row) for row in planned)
