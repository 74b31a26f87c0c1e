"""Types of command-line arguments, checked before anything is loaded."""

from __future__ import annotations

import argparse
import math
from typing import Callable

#: dtype on the command line -> torch's name; :data:`olmo_lns.norm.dtypes.DTYPES` has the dtypes themselves.
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def at_least(smallest: int, below: float = math.inf) -> Callable[[str], int]:
    """A whole number that is no smaller, and smaller than ``below``.

    The function that is returned raises ``argparse.ArgumentTypeError``.

    Example: ``parser.add_argument("--steps", type=at_least(1))``.
    """
    expected = f"a whole number >= {smallest}" + ("" if below == math.inf else f" and < {below}")

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = smallest - 1
        if not smallest <= value < below:
            raise argparse.ArgumentTypeError(f"expected {expected}, found {text!r}")
        return value

    return number


#: A whole number that torch's generators take.
seed = at_least(0, below=1 << 63)


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
