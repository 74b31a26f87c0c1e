"""The depth factors with which initializations draw the residual output projections.

These are the last matrices of attention and feed-forward. An initialization can be combined with any scheme. ``plain``
draws them like all other matrices. ``scaled`` multiplies their standard deviation by 1/sqrt(2·L), ``depth_scaled`` by
1/sqrt(2·l), where L is the number of blocks and l the 1-based number of the block. ``upstream`` leaves the
initialization of the framework as it is.
"""

from __future__ import annotations

import math
from typing import Callable

from olmo_lns.errors import LNSConfigError

#: Initialization -> the inverse of its depth factor, for the number of a block and the number of all blocks.
_INVERSES: dict[str, Callable[[int, int], float]] = {
    "plain": lambda layer_number, n_layers: 1.0,
    "scaled": lambda layer_number, n_layers: math.sqrt(2.0 * n_layers),
    "depth_scaled": lambda layer_number, n_layers: math.sqrt(2.0 * layer_number),
}
INITIALIZATIONS = (*_INVERSES, "upstream")
#: The initializations whose depth factor is known. The factor of the others depends on the framework.
KNOWN_INITIALIZATIONS = tuple(_INVERSES)
#: Initialization -> the inverse of its depth factor as text.
INVERSE_AS_TEXT = {"plain": "1", "scaled": "sqrt(2L)", "depth_scaled": "sqrt(2l)"}


def inverse_depth_factor(initialization: str, layer_number: int, n_layers: int) -> float:
    """Return the inverse of the factor on the plain standard deviation in a block. It is at least 1.

    :param layer_number: number of the block, from 1.
    :raises LNSConfigError: if the initialization is ``upstream``, whose factor depends on the framework, or is unknown.
    """
    if initialization not in _INVERSES:
        raise LNSConfigError(
            f"The initialization {initialization!r} has no known factor. Use plain, scaled or depth_scaled."
        )
    return _INVERSES[initialization](layer_number, n_layers)


def depth_factor(initialization: str, layer_number: int, n_layers: int) -> float:
    """Return the factor on the plain standard deviation in a block.

    :param layer_number: number of the block, from 1.
    :raises LNSConfigError: as in :func:`inverse_depth_factor`.

    Example: ``depth_factor("scaled", 3, 8)`` and ``depth_factor("depth_scaled", 8, 12)`` are 0.25.
    """
    return 1.0 / inverse_depth_factor(initialization, layer_number, n_layers)
