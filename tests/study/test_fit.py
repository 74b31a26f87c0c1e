"""The power law and its uncertainty against an independent computation."""

from __future__ import annotations

import math

import numpy as np
import pytest

from olmo_lns.study.collect.gather import Result
from olmo_lns.study.report.fit import PAPER, Point, paired, points, power_law


def point(parameters: int, loss: float) -> Point:
    return Point(str(parameters), parameters, 1, loss, None)


def result(size: str, parameters: int, arm: str, seed: int, loss: float | None, status: str = "complete") -> Result:
    return Result(f"{size}-{arm}-s{seed}", size, arm, seed, parameters, status, 1, 1, 1, loss, 0.0, 1, loss, None, "x")


def test_an_exact_power_law_is_recovered() -> None:
    law = power_law([point(n, 20 * n**-0.08) for n in (10**6, 10**7, 10**8, 10**9)])
    assert law is not None and (law.scale, law.alpha) == pytest.approx((20, 0.08))
    assert law.alpha_error == pytest.approx(0, abs=1e-9) and law(5e7) == pytest.approx(20 * 5e7**-0.08)


def test_the_error_is_the_regression_error() -> None:
    sizes, losses = [1e6, 3e6, 1e7, 4e7, 1e8], [5.1, 4.7, 4.45, 4.0, 3.9]
    law = power_law([point(int(n), loss) for n, loss in zip(sizes, losses, strict=True)])
    (slope, intercept), covariance = np.polyfit(np.log(sizes), np.log(losses), 1, cov=True)
    assert law is not None and law.alpha_error is not None
    assert (law.alpha, law.scale) == pytest.approx((-slope, math.exp(intercept)))
    assert law.alpha_error == pytest.approx(math.sqrt(covariance[0, 0]), rel=1e-9) and law.points == 5


def test_no_uncertainty_where_the_points_allow_none() -> None:
    assert power_law([point(10**6, 3.0)]) is None
    law = power_law([point(10**6, 3.0), point(10**7, 2.5)])
    assert law is not None and law.alpha_error is None and law(10**7) == pytest.approx(2.5)


def test_seeds_are_summed_up_and_the_unfinished_left_out() -> None:
    found = [result("a", 100, "lns", s, loss) for s, loss in ((1, 2.0), (2, 2.2), (3, 2.4))]
    found += [result("a", 100, "lns", 4, None, "incomplete"), result("b", 200, "lns", 1, 1.5)]
    a, b = points(found, "lns")
    assert (a.seeds, a.loss) == (3, pytest.approx(2.2)) and a.std == pytest.approx(0.2)
    assert (b.seeds, b.loss, b.std) == (1, 1.5, None)
    assert points(found, "preln") == []


def test_differences_are_paired_by_seed() -> None:
    found = [result("a", 1, "preln", s, loss) for s, loss in ((1, 3.0), (2, 4.0), (9, 9.0))]
    found += [result("a", 1, "lns", s, loss) for s, loss in ((1, 2.9), (2, 3.7), (3, 1.0))]
    mean, std, count = paired(found, "a", "lns") or (0.0, None, 0)
    assert (mean, count) == (pytest.approx(-0.2), 2) and std == pytest.approx(0.2 / math.sqrt(2))
    assert paired(found, "a", "preln_scaled_init") is None


def test_the_papers_points_are_the_published_ones() -> None:
    assert [(arm, loss) for _, n, arm, loss in PAPER if n == 7e9] == [("preln", 2.69), ("lns", 2.5)]
    assert [(arm, loss) for _, n, arm, loss in PAPER if n == 1e9] == [("preln", 3.13), ("lns", 2.89)]
