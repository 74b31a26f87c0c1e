"""The LayerNorm Scaling factor."""

from __future__ import annotations

import math
import operator

__all__ = ["DEFAULT_EXPONENT", "LARGEST_EXPONENT", "lns_factor"]

#: The paper's exponent: 1/sqrt(l) (arXiv 2502.05795, section 4).
DEFAULT_EXPONENT = 0.5
#: Up to this exponent the factor of block 10,000 is a normal fp32 number. Above it gains become zeros.
LARGEST_EXPONENT = 8.0


def lns_factor(layer_number: int, *, exponent: float = DEFAULT_EXPONENT) -> float:
    """Return the factor of both norms of block ``layer_number``.

    The factor of block l is ``l ** -exponent``. With the default exponent this is the paper's ``1/sqrt(l)``
    (arXiv 2502.05795, section 4).

    :param layer_number: 1-based, global index of the transformer block.
    :param exponent: dimensionless, from 0 (plain Pre-LN) to :data:`LARGEST_EXPONENT`.
    :returns: a Python float in (0, 1].
    :raises TypeError: if ``layer_number`` is not an integer.
    :raises ValueError: if ``layer_number < 1``, or the exponent is out of range.

    Example: ``lns_factor(4)`` is 0.5, ``lns_factor(4, exponent=0.25)`` is 0.707.
    """
    expected = "Expected an integer, which is 1 for the first block. Pass index + 1 if you count the blocks from 0."
    if isinstance(layer_number, bool):
        raise TypeError(f"layer_number is {layer_number!r}. {expected}")
    try:
        number = operator.index(layer_number)
    except TypeError:
        raise TypeError(f"layer_number is {layer_number!r}. {expected}") from None
    if number < 1:
        raise ValueError(f"layer_number is {number}. {expected}")
    if not 0 <= exponent < math.inf:  # also false for NaN
        raise ValueError(f"exponent must be a finite number >= 0, got {exponent!r}")
    if exponent > LARGEST_EXPONENT:
        raise ValueError(f"exponent must be at most {LARGEST_EXPONENT:g} (0.5 is the paper's), got {exponent:g}")
    return float(number**-exponent)
