"""Several budgets from one run: a trunk at a constant rate, and from its checkpoints branches in which the rate falls.

Each branch ends a run of its own length, so that a loss can be drawn against tokens without a run for every length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Mapping

from olmo_lns.errors import LNSConfigError

__all__ = ["Horizons"]


@dataclass(frozen=True)
class Horizons:
    """:param steps: optimizer steps of each budget, rising.

    :param decay: the last part of each, in which the rate falls: in (0, 1).
    """

    steps: tuple[int, ...]
    decay: float

    @classmethod
    def of(cls, raw: Mapping[str, Any], path: Path) -> Horizons | None:
        """Of a description; None where it has none.

        :raises LNSConfigError: steps that do not rise, or a decay outside (0, 1).
        """
        if "horizons" not in raw:
            if "decay" in raw:
                raise LNSConfigError(f"{path}: decay belongs to horizons: list their steps, or remove it")
            return None
        steps, decay = tuple(int(step) for step in raw["horizons"]), float(raw.get("decay", 0.1))
        if not 0 < decay < 1:
            raise LNSConfigError(f"{path}: decay {decay}: expected a share of the steps between 0 and 1")
        found = cls(steps, decay)
        starts = (0, *found.starts)
        if not steps or any(later <= earlier for earlier, later in pairwise(starts)):
            raise LNSConfigError(
                f"{path}: horizons {list(steps)}: expected rising numbers of steps, such as [100, 200]"
            )
        return found

    @property
    def starts(self) -> tuple[int, ...]:
        """The step of the trunk at which each branch leaves it."""
        return tuple(round(step * (1 - self.decay)) for step in self.steps)

    @property
    def every(self) -> int:
        """Steps between the trunk's checkpoints, so that there is one at every start."""
        return math.gcd(*self.starts)
