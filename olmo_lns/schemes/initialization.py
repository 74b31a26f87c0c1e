"""Initialization of the residual output projections (attention's and feed-forward's last matrix).

It is independent of the scheme: ``plain`` like every other matrix, ``scaled`` with the standard
deviation times 1/sqrt(2·L), ``depth_scaled`` times 1/sqrt(2·l), ``upstream`` as in the framework.
L is the number of blocks, l the block's 1-based number.
"""

from __future__ import annotations

import math

from olmo_lns.errors import LNSConfigError

INITIALIZATIONS = ("plain", "scaled", "depth_scaled", "upstream")


def std_factor(initialization: str, layer_number: int, n_layers: int) -> float:
    """Return the factor on the plain standard deviation in block ``layer_number``.

    :raises LNSConfigError: ``upstream``, whose factor only the framework knows, or an unknown name.

    Example: ``std_factor("scaled", 3, 8)`` and ``std_factor("depth_scaled", 8, 12)`` are 0.25.
    """
    if initialization == "plain":
        return 1.0
    if initialization == "scaled":
        return 1.0 / math.sqrt(2.0 * n_layers)
    if initialization == "depth_scaled":
        return 1.0 / math.sqrt(2.0 * layer_number)
    raise LNSConfigError(f"initialization {initialization!r} has no known factor: give plain, scaled or depth_scaled")
