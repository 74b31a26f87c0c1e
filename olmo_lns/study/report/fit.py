"""Loss against parameters: seeds summed up, a power law, and its uncertainty where the points allow one."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Sequence

from olmo_lns.study.arms import BASELINE
from olmo_lns.study.collect.gather import COMPLETE, Result

__all__ = ["PAPER", "Point", "PowerLaw", "paired", "points", "power_law", "saved_parameters"]

#: Final training losses published in the paper (arXiv 2502.05795): 20B tokens, OLMo. (label, parameters, arm, loss).
PAPER = (
    ("paper, v1: 1B, The Pile", 1.0e9, "preln", 3.13),
    ("paper, v1: 1B, The Pile", 1.0e9, "lns", 2.89),
    ("paper: 7B", 7.0e9, "preln", 2.69),
    ("paper: 7B", 7.0e9, "lns", 2.50),
)


@dataclass(frozen=True)
class Point:
    """One size of one arm. :param std: over the seeds (n - 1), None for one seed: one run has no spread."""

    size: str
    parameters: int
    seeds: int
    loss: float
    std: float | None


@dataclass(frozen=True)
class PowerLaw:
    """``loss = scale * parameters ** -alpha``. :param alpha_error: standard error, None where it cannot be known.

    :param points: sizes fitted; two points define the line exactly and say nothing of its error.
    """

    scale: float
    alpha: float
    alpha_error: float | None
    points: int

    def __call__(self, parameters: float) -> float:
        return float(self.scale * parameters**-self.alpha)


def points(results: Sequence[Result], arm: str) -> list[Point]:
    """The complete runs of an arm, by size; incomplete and missing runs take no part."""
    found = []
    for size in dict.fromkeys(result.size for result in results):
        mine = [r for r in results if r.size == size and r.arm == arm and r.status == COMPLETE and r.loss is not None]
        if mine:
            losses = [r.loss for r in mine if r.loss is not None]
            std = statistics.stdev(losses) if len(losses) > 1 else None
            found.append(Point(size, mine[0].parameters, len(losses), statistics.fmean(losses), std))
    return sorted(found, key=lambda point: point.parameters)


def power_law(found: Sequence[Point]) -> PowerLaw | None:
    """Least squares of log loss on log parameters, each size once. None for fewer than two sizes.

    The error of the exponent is the usual one, from the residuals with n - 2 degrees of freedom.
    """
    n = len(found)
    if n < 2:
        return None
    x = [math.log(point.parameters) for point in found]
    y = [math.log(point.loss) for point in found]
    slope, intercept = statistics.linear_regression(x, y)
    error = None
    if n > 2:
        residuals = sum((b - intercept - slope * a) ** 2 for a, b in zip(x, y, strict=True))
        spread = sum((a - statistics.fmean(x)) ** 2 for a in x)
        error = math.sqrt(residuals / (n - 2) / spread)
    return PowerLaw(math.exp(intercept), -slope, error, n)


def saved_parameters(arm: Sequence[Point], base: Sequence[Point]) -> tuple[float, float, bool] | None:
    """``(N, needed, outside)``: the largest size of ``base``, and how many parameters ``arm`` needs for its loss.

    Both by their power laws; ``outside`` says that ``needed`` lies outside the sizes of ``arm``. None without two fits.
    """
    law, other = power_law(arm), power_law(base)
    if law is None or other is None or law.alpha <= 0:
        return None
    size = float(base[-1].parameters)
    needed = (law.scale / other(size)) ** (1 / law.alpha)
    return size, needed, not arm[0].parameters <= needed <= arm[-1].parameters


def paired(
    results: Sequence[Result], size: str, arm: str, base: str = BASELINE
) -> tuple[float, float | None, int] | None:
    """``loss(arm) - loss(base)`` over the seeds that both have: mean, standard deviation (None for one) and count."""
    by = {(r.arm, r.seed): r.loss for r in results if r.size == size and r.status == COMPLETE and r.loss is not None}
    gaps = [by[arm, seed] - by[base, seed] for (name, seed) in by if name == arm and (base, seed) in by]
    if not gaps:
        return None
    return statistics.fmean(gaps), statistics.stdev(gaps) if len(gaps) > 1 else None, len(gaps)
