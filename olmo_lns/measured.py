"""The kinds of measurements of a built model, and their text in the start-up line.

Logs of earlier runs contain these texts, so they do not change. docs/compatibility.md explains each text of the line.
"""

from __future__ import annotations

from enum import Enum
from typing import Collection


class Measured(Enum):
    """One kind of measurement. Its value is its text in the start-up line, which lists the kinds in this order."""

    #: Blocks were run. They read their stream through the norms that have a factor, and through no others.
    SITES = "sites"
    #: With the plan of Pre-LN, the forward that replaces a block's own gives the same output.
    BLOCK = "block"
    #: The output of each norm is its factor times the output before.
    OUTPUT = "output"
    #: The gradient of each norm's input is its factor times the gradient before.
    GRADIENT = "gradient"
    #: The gradient was measured like that for each norm, except for norms that are fused with a linear layer.
    GRADIENT_UNLESS_FUSED = "gradient where no linear layer is fused"
    #: The residual output projections have the standard deviation that their initialization gives.
    INITIALIZATION = "initialization"
    #: The config names the requested initialization, but no weight was measured. Either the weights have no values in
    #: this process, or their standard deviation is not known.
    INITIALIZATION_IN_CONFIG = "initialization (read back)"


def describe(measured: Collection[Measured], *, sites_not_run: str = "") -> str:
    """Return the text of the start-up line about measurements, such as ``measured: sites, output, gradient``.

    :param sites_not_run: why the blocks could not be run to measure the sites. The line then says so.
    """
    texts = [each.value for each in Measured if each in measured]
    return f"measured: {', '.join([f'not the sites ({sites_not_run})', *texts] if sites_not_run else texts)}"
