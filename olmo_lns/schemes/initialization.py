"""Initializations of the residual output projections, the last matrices of attention and feed-forward.

An initialization can be combined with any scheme. ``plain`` draws these matrices like all others. ``scaled`` multiplies
their standard deviation by 1/sqrt(2·L), ``depth_scaled`` by 1/sqrt(2·l), where L is the number of blocks and l the
1-based number of the block. ``upstream`` leaves the initialization of the framework as it is.
"""

from __future__ import annotations

import math

from olmo_lns.errors import LNSConfigError

INITIALIZATIONS = ("plain", "scaled", "depth_scaled", "upstream")


def std_factor(initialization: str, layer_number: int, n_layers: int) -> float:
    """Return the factor on the plain standard deviation in block ``layer_number``.

    :raises LNSConfigError: if the initialization is ``upstream``, whose factor depends on the framework, or is unknown.

    Example: ``std_factor("scaled", 3, 8)`` and ``std_factor("depth_scaled", 8, 12)`` are 0.25.
    """
    if initialization == "plain":
        return 1.0
    if initialization == "scaled":
        return 1.0 / math.sqrt(2.0 * n_layers)
    if initialization == "depth_scaled":
        return 1.0 / math.sqrt(2.0 * layer_number)
    raise LNSConfigError(
        f"The initialization {initialization!r} has no known factor. Use plain, scaled or depth_scaled."
    )
