"""The draw of the residual output projections (attention's and feed-forward's last matrix).

A value of its own, beside the scheme: ``plain`` like every other matrix, ``scaled`` with the
standard deviation times 1/sqrt(2·L), ``depth_scaled`` times 1/sqrt(2·l), ``upstream`` as the
framework does it. L is the number of blocks, l the block's 1-based number.
"""

from __future__ import annotations

import math

from olmo_lns.errors import LNSConfigError, did_you_mean
from olmo_lns.schemes.registry import Scheme

INITIALIZATIONS = ("plain", "scaled", "depth_scaled", "upstream")


def factor(initialization: str, layer_number: int, n_layers: int) -> float:
    """Return the factor on the plain standard deviation in block ``layer_number``.

    :raises LNSConfigError: ``upstream``, which only the framework can tell, or an unknown name.

    Example: ``factor("scaled", 3, 8)`` is 0.25, ``factor("depth_scaled", 8, 12)`` too.
    """
    if initialization == "plain":
        return 1.0
    if initialization == "scaled":
        return 1.0 / math.sqrt(2.0 * n_layers)
    if initialization == "depth_scaled":
        return 1.0 / math.sqrt(2.0 * layer_number)
    raise LNSConfigError(f"initialization {initialization!r} has no factor of its own")


def resolve(asked: str, scheme: Scheme) -> str:
    """``asked``, or what the scheme has when nothing was asked for (``""``): plain, and upstream without one.

    :raises LNSConfigError: an unknown name.
    """
    name = asked or scheme.definition.initialization
    if name not in INITIALIZATIONS:
        raise LNSConfigError(
            f"unknown initialization {name!r}{did_you_mean(name, INITIALIZATIONS)}: "
            f"expected one of {', '.join(INITIALIZATIONS)}"
        )
    return name
