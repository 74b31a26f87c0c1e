"""The loss of one run by step, and what is said of a damaged file."""

from __future__ import annotations

import re
import statistics
from dataclasses import dataclass, field
from pathlib import Path

from olmo_lns.errors import LNSConfigError

__all__ = ["Curve", "number", "text_of"]

ANSI = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Curve:
    """Loss (nats per token) by optimizer step. :param total: the steps the run was to make, None where unknown.

    :param heldout: loss on held-out data, at the steps after which it was measured.
    """

    losses: dict[int, float]
    total: int | None
    source: str
    heldout: dict[int, float] = field(default_factory=dict)

    @property
    def last(self) -> int:
        return max(self.losses, default=0)

    def final(self, fraction: float, steps: int) -> tuple[float, float, int]:
        """``(mean, standard deviation, number of points)`` of the losses in the last ``fraction`` of ``steps``."""
        tail = [loss for step, loss in self.losses.items() if step > steps - max(1, round(fraction * steps))]
        if not tail:
            raise LNSConfigError(f"{self.source}: no loss in the last {fraction:.0%} of {steps} steps: log more often")
        return statistics.fmean(tail), statistics.stdev(tail) if len(tail) > 1 else 0.0, len(tail)


def number(path: Path, step: int, text: str) -> float:
    """:raises LNSConfigError: ``text`` is no number; the file and the step are named."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        raise LNSConfigError(f"{path}: damaged: loss {text!r} at step {step} is not a number") from None


def text_of(path: Path) -> str:
    """A log without its colours, up to its last whole line: a kill may cut one inside a number.

    :raises LNSConfigError: damaged.
    """
    raw = path.read_bytes()
    if b"\0" in raw:
        raise LNSConfigError(f"{path}: damaged: NUL bytes at offset {raw.index(0)}; restore it or rerun the run")
    try:
        return ANSI.sub("", raw[: raw.rfind(b"\n") + 1].decode())
    except UnicodeDecodeError as error:
        raise LNSConfigError(f"{path}: damaged: not text at byte {error.start}; restore it or rerun the run") from error
