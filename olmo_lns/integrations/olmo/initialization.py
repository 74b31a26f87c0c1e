"""Scaled initialization off: draw the residual output projections without their depth factor.

``attn_out`` and ``ff_out`` of block l (1-based) of L blocks are drawn by OLMo with the standard
deviation of the other matrices times a depth factor: 1/sqrt(2·l) for ``init_fn: mitchell``,
1/sqrt(2·L) for ``full_megatron``, 1 for ``normal``. LNS replaces that factor, and the paper finds
the two together worse than LNS alone (arXiv 2502.05795, footnote 1 and section 6).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from olmo_lns.errors import LNSConfigError

__all__ = ["depth_factor", "remove_depth_factor"]


def depth_factor(init_fn: Any, layer_number: int, n_layers: int) -> float:
    """The factor that OLMo's ``init_fn`` puts on the residual projections of a block.

    :param layer_number: 1-based index of the block.
    :raises LNSConfigError: an ``init_fn`` whose depth factor is not known.
    """
    name = str(init_fn)
    if name == "normal":
        return 1.0
    if name == "mitchell":
        return 1.0 / math.sqrt(2.0 * layer_number)
    if name == "full_megatron":
        return 1.0 / math.sqrt(2.0 * n_layers)
    raise LNSConfigError(
        f"init_fn {name!r}: its depth factor is not known; use normal, mitchell or full_megatron, "
        "or OLMO_LNS_SCALED_INIT=keep"
    )


@torch.no_grad()
def remove_depth_factor(block: Any) -> None:
    """Divide the freshly drawn ``attn_out`` and ``ff_out`` of an OLMo block by their depth factor.

    To be called once after each draw (``block.reset_parameters()``). Dividing the stock draw
    keeps the random stream, and is exact for OLMo's normals truncated at a multiple of their
    standard deviation. Works on meta tensors and on FSDP shards.
    """
    factor = depth_factor(block.config.init_fn, block.layer_id + 1, block.config.n_layers)
    if factor == 1.0:
        return
    block.attn_out.weight.div_(factor)
    block.ff_out.weight.div_(factor)
