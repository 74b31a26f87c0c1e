"""What a study over learning rate, depth and tokens says, from its table of results alone.

The best rate of an arm is chosen on one seed, and what is said of the arm is said of the others where there are any.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from itertools import pairwise
from typing import Iterable, Sequence

from olmo_lns.study.arms import ARMS
from olmo_lns.study.results import COMPLETE, Result

__all__ = ["Best", "Gap", "Group", "crossings", "groups", "interval", "is_map", "losses_by_tokens"]

#: The variant of runs at a constant rate, from which the end points branch off: they are no end points themselves.
TRUNK = "trunk"


@dataclass(frozen=True)
class Best:
    """The rate of an arm with the lowest loss on the choosing seed.

    :param rates: how many were tried. :param edge: ``lowest`` or ``highest`` where it is an end of them.
    """

    rate: float
    loss: float
    rates: int
    edge: str


@dataclass(frozen=True)
class Gap:
    """``loss(arm) - loss(base)``, each at its own best rate, seed by seed.

    :param chosen_on: the seeds are the one on which the rates were chosen: the difference is not independent of them.
    """

    values: tuple[float, ...]
    chosen_on: bool

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)


@dataclass(frozen=True)
class Group:
    """The complete runs of one depth, width, budget and variant, at all rates, arms and seeds."""

    layers: int
    width: int
    steps: int
    tokens: int
    variant: str
    runs: tuple[Result, ...]

    @property
    def arms(self) -> list[str]:
        """In the order of the table of arms."""
        present = {run.arm for run in self.runs}
        return [arm for arm in ARMS if arm in present]

    @property
    def rates(self) -> list[float]:
        return sorted({_rate(run) for run in self.runs})

    @property
    def parameters(self) -> int:
        return self.runs[0].parameters

    @property
    def choosing(self) -> int:
        """The seed that has seen the most rates; the lowest of several."""
        seeds = sorted({run.seed for run in self.runs})
        return max(seeds, key=lambda seed: len({_rate(run) for run in self.runs if run.seed == seed}))

    def loss(self, arm: str, rate: float, seed: int) -> float | None:
        found = (run for run in self.runs if (run.arm, _rate(run), run.seed) == (arm, rate, seed))
        run = next(found, None)
        return None if run is None else outcome(run)

    def by_rate(self, arm: str) -> dict[float, float]:
        """Rate -> loss on the choosing seed."""
        losses = {rate: self.loss(arm, rate, self.choosing) for rate in self.rates}
        return {rate: loss for rate, loss in losses.items() if loss is not None}

    def best(self, arm: str) -> Best | None:
        """None where the choosing seed has no run of the arm."""
        losses = self.by_rate(arm)
        if not losses:
            return None
        rate = min(losses, key=lambda rate: losses[rate])
        edge = "" if len(losses) == 1 else "lowest" if rate == min(losses) else "highest" if rate == max(losses) else ""
        return Best(rate, losses[rate], len(losses), edge)

    def gap(self, arm: str, base: str) -> Gap | None:
        """None where either arm has no best rate, or one only because it was tried at one, or no seed has both."""
        one, other = self.best(arm), self.best(base)
        if one is None or other is None or min(one.rates, other.rates) == 1 < max(one.rates, other.rates):
            return None
        found = {}
        for seed in sorted({run.seed for run in self.runs}):
            here, there = self.loss(arm, one.rate, seed), self.loss(base, other.rate, seed)
            if here is not None and there is not None:
                found[seed] = here - there
        # One rate was no choice.
        chose = {self.choosing} if max(one.rates, other.rates) > 1 else set()
        independent = [value for seed, value in found.items() if seed not in chose]
        if not found:
            return None
        return Gap(tuple(independent or found.values()), not independent)


def outcome(run: Result) -> float:
    """Held-out loss of a complete run, or its training loss where the study has no held-out text."""
    loss = run.heldout if run.heldout is not None else run.loss
    assert loss is not None
    return loss


def _rate(run: Result) -> float:
    assert run.learning_rate is not None
    return run.learning_rate


def _placed(results: Iterable[Result]) -> list[Result]:
    return [run for run in results if run.status == COMPLETE and run.layers is not None and run.learning_rate]


def is_map(results: Sequence[Result]) -> bool:
    """Whether some depth and width was trained at more than one rate."""
    seen: dict[tuple[int | None, int | None], set[float | None]] = {}
    for run in results:
        seen.setdefault((run.layers, run.width), set()).add(run.learning_rate)
    return any(len(rates - {None}) > 1 for rates in seen.values())


def groups(results: Iterable[Result]) -> list[Group]:
    """By width, then variant (none first), depth and tokens; runs without a place or an end take no part."""
    found: dict[tuple[int, str, int, int], list[Result]] = {}
    for run in _placed(results):
        key = (run.width or 0, "" if run.variant == "" else run.variant, run.layers or 0, run.tokens)
        found.setdefault(key, []).append(run)
    return [
        Group(layers, width, runs[0].steps, tokens, variant, tuple(runs))
        for (width, variant, layers, tokens), runs in sorted(found.items())
        if variant != TRUNK
    ]


def losses_by_tokens(found: Sequence[Group]) -> list[list[Group]]:
    """The groups of one depth, width and variant that have several budgets, by tokens."""
    series: dict[tuple[int, int, str], list[Group]] = {}
    for group in found:
        series.setdefault((group.width, group.layers, group.variant), []).append(group)
    return [sorted(each, key=lambda group: group.tokens) for each in series.values() if len(each) > 1]


def crossings(series: Sequence[tuple[int, float]]) -> list[tuple[int, int]]:
    """Consecutive budgets between which a difference changes its sign."""
    return [(before[0], after[0]) for before, after in pairwise(series) if before[1] * after[1] < 0]


def interval(values: Sequence[float]) -> float | None:
    """Half the width of the 95 % interval of the mean (Student's t); None for fewer than two values."""
    if len(values) < 2:
        return None
    return _student(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


def _student(freedom: int) -> float:
    """The 97.5 % point of Student's distribution, by bisection on Simpson's rule."""
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)

    def share(t: float, parts: int = 2000) -> float:
        heights = [(1 + (t * i / parts) ** 2 / freedom) ** (-(freedom + 1) / 2) for i in range(parts + 1)]
        return scale * t / parts / 3 * (heights[0] + heights[-1] + 4 * sum(heights[1::2]) + 2 * sum(heights[2:-1:2]))

    low, high = 1.0, 13.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if share(middle) < 0.475 else (low, middle)
    return (low + high) / 2
