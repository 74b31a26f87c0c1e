"""The papers' diagnostics: output variance, angular distance, layer removal, Jacobians, gradient norms.

Definitions and the layout of the result files are in ``docs/diagnostics.md``; every diagnostic is
``olmo-lns analyze <what>`` and a function here that takes a model and an iterable of batches.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MEASURES", "Measure"]


@dataclass(frozen=True)
class Measure:
    """One diagnostic, without torch, so that ``--help`` does not load it.

    :param title: for help and reports. :param shows: what its table shows of each block.
    :param function: ``module:name`` below this package. :param tokens: read by default, None for all.
    :param longest: longest sequence that is taken unless asked otherwise. :param pools: over the ranks of torchrun.
    """

    title: str
    shows: str
    function: str
    tokens: int | None = 65_536
    longest: int = 2048
    pools: bool = False


MEASURES = {
    "variance": Measure(
        "Output variance of every block", "output variance", "variance:block_output_variance", 262_144, pools=True
    ),
    "angular": Measure(
        "Angular distance between all pairs of layers",
        "angular distance d(l, l+1), fraction of pi",
        "angular:angular_distance",
        262_144,
        pools=True,
    ),
    "layer-drop": Measure(
        "Performance drop of removing each block",
        "loss increase without the block, nats/token",
        "layer_drop:drop_layers",
    ),
    "jacobian": Measure(
        "Token-averaged Jacobian of every block",
        "distance of the Jacobian to the identity",
        "gradients:block_jacobians",
        None,
        64,
    ),
    "gradnorm": Measure("Gradient norm per layer and parameter kind", "gradient norm", "gradients:gradient_norms"),
}
