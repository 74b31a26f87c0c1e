"""LayerNorm Scaling in torchtitan: overrides that ``--override.imports`` names.

``./run_train.sh --override.imports olmo_lns.torchtitan.lns`` trains any of torchtitan's Pre-LN decoders with LayerNorm
Scaling. Users' commands and configs contain the names of the two functions, so the names never change.
"""

from __future__ import annotations

from typing import Any

from torchtitan.config import override
from torchtitan.models.common.nn_modules import RMSNorm

from olmo_lns.environment import DISABLE, is_set
from olmo_lns.integrations.torchtitan import register
from olmo_lns.integrations.torchtitan.blocks import NORMS
from olmo_lns.integrations.torchtitan.request import MarkedNorm, marked_norm

__all__ = ["lns", "plain_initialization"]

if not is_set(DISABLE):
    register()  # if the start-up hook did not

# The layers of the model itself: not those of a vision tower, and not the modules of multi-token prediction.
_LAYERS = [f"{model}layers.*.{norm}" for model in ("", "model.", "*.model.") for norm in NORMS.values()]
_FINAL_NORM = ["norm", "model.norm", "*.model.norm"]


@override(target=RMSNorm.Config, fqns=_LAYERS, description="LayerNorm Scaling (arXiv 2502.05795)")
def lns(
    config: Any, *, scheme: str = "lns", exponent: float | None = None, keep_scaled_init: bool = False
) -> MarkedNorm:
    """Select a scheme for a torchtitan model; torchtitan calls this function for each norm.

    :param config: torchtitan's config of a block's norm.
    :param scheme: ``lns``, or one of your own that only multiplies norms, such as ``name:key=value``.
    :param exponent: exponent p of the factor l ** -p of block l, counted from 1. None means 0.5, as in the paper.
    :param keep_scaled_init: true keeps torchtitan's initializers, which have a depth factor in most models.
    :returns: a config that builds the same norm, marked.
    :raises LNSConfigError: if a value is not allowed.

    Source: arXiv 2502.05795.

    Example: ``--override.imports 'olmo_lns.torchtitan.lns={"exponent": 0.25}'``.
    """
    return marked_norm(config, scheme, exponent, keep_scaled_init=keep_scaled_init, name=f"{__name__}.lns")


@override(target=RMSNorm.Config, fqns=_FINAL_NORM, description="initializers without a depth factor")
def plain_initialization(config: Any) -> MarkedNorm:
    """Remove the depth factor from the initializers of a stock model: the Pre-LN baseline of :func:`lns`.

    :param config: torchtitan's config of the final norm, which is marked and stays as it is.
    :returns: a config that builds the same norm, marked.

    Example: ``--override.imports olmo_lns.torchtitan.plain_initialization``.
    """
    return marked_norm(config, "preln", name=f"{__name__}.plain_initialization")
