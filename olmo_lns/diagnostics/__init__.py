"""The papers' diagnostics: output variance, angular distance, layer removal, Jacobians, gradient norms.

Definitions and the layout of the result files are in ``docs/diagnostics.md``; every diagnostic is
``olmo-lns analyze <what>`` and a function here that takes a model and an iterable of batches.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

__all__ = ["MEASURES", "Measure"]


@dataclass(frozen=True)
class Measure:
    """One diagnostic, without torch, so that ``--help`` does not load it.

    :param title: for help and reports. :param module: below this package.
    :param function: of the module, which runs it. :param result: class of what the function returns.
    :param numbers: attribute of the result: a number of every block, block 1 first. :param shows: what they are.
    :param tokens: read by default, None for all. :param longest: longest sequence unless asked otherwise.
    :param pools: it pools over the ranks of torchrun.
    """

    title: str
    module: str
    function: str
    result: str
    numbers: str
    shows: str
    tokens: int | None = 65_536
    longest: int = 2048
    pools: bool = False

    def loaded(self, name: str) -> Any:
        """What the module calls ``name``."""
        return getattr(importlib.import_module(f"{__name__}.{self.module}"), name)


MEASURES = {
    "variance": Measure(
        "Output variance of every block", "variance", "block_output_variance", "VarianceResult",
        "variance", "output variance", 262_144, pools=True,
    ),
    "angular": Measure(
        "Angular distance between all pairs of layers", "angular", "angular_distance", "AngularResult",
        "adjacent", "angular distance d(l, l+1), fraction of pi", 262_144, pools=True,
    ),
    "layer-drop": Measure(
        "Performance drop of removing each block", "layer_drop", "drop_layers", "LayerDropResult",
        "increase", "loss increase without the block, nats/token",
    ),
    "jacobian": Measure(
        "Token-averaged Jacobian of every block", "gradients", "block_jacobians", "JacobianResult",
        "identity_distance", "distance of the Jacobian to the identity", None, 64,
    ),
    "gradnorm": Measure(
        "Gradient norm per layer and parameter kind", "gradients", "gradient_norms", "GradNormResult",
        "total", "gradient norm",
    ),
}  # fmt: skip
