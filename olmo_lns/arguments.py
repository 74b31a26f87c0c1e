"""Types of command-line numbers: a value that makes no sense is wrong usage, said before anything is loaded."""

from __future__ import annotations

import argparse
import math
from typing import Callable

__all__ = ["above_zero", "at_least", "seed"]


def at_least(smallest: int) -> Callable[[str], int]:
    """A whole number that is no smaller.

    The function that is returned raises ``argparse.ArgumentTypeError``.
    """

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = smallest - 1
        if value < smallest:
            raise argparse.ArgumentTypeError(f"expected a whole number >= {smallest}, found {text!r}")
        return value

    return number


def seed(text: str) -> int:
    """A whole number that torch's generators take: from 0, below 2**63.

    :raises argparse.ArgumentTypeError: anything else.
    """
    value = at_least(0)(text)
    if value >= 1 << 63:
        raise argparse.ArgumentTypeError(f"expected a whole number below 2**63, found {text}")
    return value


def above_zero(text: str) -> float:
    """A finite number above 0, such as ``1e-3``.

    :raises argparse.ArgumentTypeError: anything else.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, found {text!r}")
    return value
