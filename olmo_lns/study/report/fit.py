"""The numbers of a report: seeds summed up, each arm at its best rate, a power law with its uncertainty."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Sequence

import pandas as pd
from scipy import stats

from olmo_lns.study.arms import BASELINE
from olmo_lns.study.collect.results import COMPLETE, Result
from olmo_lns.study.plan.spec import Study

__all__ = ["PowerLaw", "best", "complete", "difference", "power_law", "saved_parameters", "summary"]


def complete(study: Study, results: Sequence[Result]) -> pd.DataFrame:
    """The complete runs, a row each. ``group`` is the size without its rate; ``rate`` is NaN where none is tried."""
    runs = {run.name: run for run in study.runs}
    found = pd.DataFrame([asdict(result) for result in results], columns=[field.name for field in fields(Result)])
    found = found.assign(
        group=[runs[name].group for name in found.run],
        rate=pd.Series([runs[name].rate for name in found.run], index=found.index, dtype="float64"),
    )
    return found[(found.status == COMPLETE) & found.loss.notna()].astype({"loss": float, "heldout": float})


def best(found: pd.DataFrame) -> pd.DataFrame:
    """Of each size and arm the runs at the rate whose mean loss is lowest."""
    mean = found.groupby(["group", "arm", "size"]).loss.transform("mean")
    return found[mean == mean.groupby([found.group, found.arm]).transform("min")]


def summary(found: pd.DataFrame, arm: str, column: str = "loss") -> pd.DataFrame:
    """By size, smallest first: ``parameters``, ``seeds``, ``mean``, ``std`` (n - 1; NaN for one seed) and ``rate``."""
    mine = found[(found.arm == arm) & found[column].notna()].groupby("group", sort=False)
    table = mine.agg(
        parameters=("parameters", "first"),
        seeds=(column, "size"),
        mean=(column, "mean"),
        std=(column, "std"),
        rate=("rate", "first"),
    )
    return table.sort_values("parameters")


def difference(found: pd.DataFrame, group: str, arm: str, base: str = BASELINE) -> pd.Series:
    """``loss(arm) - loss(base)`` of each seed that both have."""
    by = found[found.group == group].pivot_table(index="seed", columns="arm", values="loss")
    return (by[arm] - by[base]).dropna() if {arm, base} <= set(by) else pd.Series(dtype=float)


@dataclass(frozen=True)
class PowerLaw:
    """``loss = scale * parameters ** -alpha``. :param error: standard error of alpha, None where it cannot be known.

    :param points: sizes fitted; two points define the line exactly and say nothing of its error.
    """

    scale: float
    alpha: float
    error: float | None
    points: int

    def __call__(self, parameters: float) -> float:
        return float(self.scale * parameters**-self.alpha)


def power_law(points: pd.DataFrame) -> PowerLaw | None:
    """Least squares of log loss on log parameters, each size once. None for fewer than two sizes."""
    if len(points) < 2:
        return None
    line = stats.linregress(*(points[name].map(math.log) for name in ("parameters", "mean")))
    error = float(line.stderr) if len(points) > 2 else None
    return PowerLaw(math.exp(line.intercept), float(-line.slope), error, len(points))


def saved_parameters(arm: pd.DataFrame, base: pd.DataFrame) -> tuple[float, float, bool] | None:
    """``(N, needed, outside)``: the largest size of ``base``, and how many parameters ``arm`` needs for its loss.

    Both by their power laws; ``outside`` says that ``needed`` lies outside the sizes of ``arm``. None without two fits.
    """
    law, other = power_law(arm), power_law(base)
    if law is None or other is None or law.alpha <= 0:
        return None
    size = float(base.parameters.max())
    needed = (law.scale / other(size)) ** (1 / law.alpha)
    return size, needed, not arm.parameters.min() <= needed <= arm.parameters.max()
