"""How the residual output projections of an OLMo block are drawn: with or without a depth factor.

``attn_out`` and ``ff_out`` of block l (1-based) of L blocks are drawn by OLMo with the standard
deviation of the other matrices times a depth factor: 1/sqrt(2·l) for ``init_fn: mitchell``,
1/sqrt(2·L) for ``full_megatron``, 1 for ``normal``. A scheme replaces that factor, and the paper
finds the two together worse than LNS alone (arXiv 2502.05795, footnote 1 and section 6).

``normal_scaled`` and ``normal_depth_scaled`` are ours: ``normal``, and the two projections times
one of those factors. ``full_megatron`` is no such thing: it also draws the head at 1/sqrt(d).
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import Any, Callable, Iterator

import torch

from olmo_lns.errors import LNSConfigError
from olmo_lns.integrations.olmo.types import INIT_FNS, has_scheme
from olmo_lns.schemes.initialization import factor

__all__ = ["ATTRIBUTE", "depth_factor", "initialization_of", "redraw", "wrap_reset"]

#: Where a block keeps what was decided when it was built; absent for ``upstream``.
ATTRIBUTE = "lns_initialization"


def depth_factor(init_fn: Any, layer_number: int, n_layers: int) -> float:
    """The factor that OLMo's ``init_fn`` puts on the residual projections of a block.

    :param layer_number: 1-based index of the block.
    :raises LNSConfigError: an ``init_fn`` whose depth factor is not known.
    """
    name = str(init_fn)
    if name == "normal" or name in INIT_FNS:
        return 1.0
    if name == "mitchell":
        return 1.0 / math.sqrt(2.0 * layer_number)
    if name == "full_megatron":
        return 1.0 / math.sqrt(2.0 * n_layers)
    raise LNSConfigError(
        f"init_fn {name!r}: its depth factor is not known; use normal, mitchell or full_megatron, "
        "or OLMO_LNS_INITIALIZATION=upstream"
    )


def initialization_of(block: Any) -> str:
    """What was decided when ``block`` was built."""
    return str(getattr(block, ATTRIBUTE, "upstream"))


@torch.no_grad()
def redraw(block: Any) -> None:
    """Give the freshly drawn ``attn_out`` and ``ff_out`` of an OLMo block the depth factor of its initialization.

    To be called once after each draw (``block.reset_parameters()``). Multiplying the stock draw
    keeps the random stream, and is exact for OLMo's normals truncated at a multiple of their
    standard deviation. Works on meta tensors and on FSDP shards.
    """
    wanted = initialization_of(block)
    if wanted == "upstream":
        return
    number, count = block.layer_id + 1, block.config.n_layers
    present, scale = depth_factor(block.config.init_fn, number, count), factor(wanted, number, count)
    for weight in (block.attn_out.weight, block.ff_out.weight):
        if present != 1.0:
            weight.div_(present)
        if scale != 1.0:
            weight.mul_(scale)


@contextmanager
def _as_normal(config: Any) -> Iterator[None]:
    """OLMo draws our initializations as ``normal``; the config keeps the name that defines the run."""
    from olmo.config import InitFnType

    asked = config.init_fn
    if str(asked) not in INIT_FNS:
        yield
        return
    config.init_fn = InitFnType.normal
    try:
        yield
    finally:
        config.init_fn = asked


def wrap_reset(reset: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``reset_parameters`` of the model or of a block class, which ask for ``init_fn`` by name."""

    def wrapped(self: Any) -> None:
        with _as_normal(self.config):
            reset(self)
        embedding_norm = getattr(getattr(self, "transformer", None), "emb_norm", None)
        if embedding_norm is not None and has_scheme(self.config.layer_norm_type):
            # OLMo never resets it: after meta device it would be what the memory held.
            embedding_norm.reset_parameters()

    return wrapped
