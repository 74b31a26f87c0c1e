"""How the residual output projections of an OLMo block are drawn: with or without a depth factor.

``attn_out`` and ``ff_out`` of block l (1-based) of L blocks are drawn by OLMo with the standard
deviation of the other matrices times a depth factor: 1/sqrt(2·l) for ``init_fn: mitchell``,
1/sqrt(2·L) for ``full_megatron``, 1 for ``normal``. A scheme replaces that factor, and the paper
finds the two together worse than LNS alone (arXiv 2502.05795, footnote 1 and section 6).

``normal_scaled`` and ``normal_depth_scaled`` are ours: ``normal``, and the two projections times
one of those factors. ``full_megatron`` is no such thing: it also draws the head at 1/sqrt(d).

A scheme's own gains on freshly drawn weights (DeepNorm's) are by role: ``qkv``, ``v``, ``o``, ``ff_in``, ``ff_out``.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import Any, Callable, Iterator

import torch
import torch.distributed as dist

from olmo_lns.errors import LNSConfigError
from olmo_lns.integrations.olmo.types import INIT_FNS, has_scheme
from olmo_lns.schemes.initialization import factor

__all__ = [
    "ATTRIBUTE",
    "apply_gains",
    "depth_factor",
    "gains_of",
    "initialization_of",
    "keep_gains",
    "redraw",
    "wrap_reset",
]

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


#: Role -> sub-layer and modules, of which a block has some; ``v`` is a part of ``att_proj`` in a sequential block.
_ROLES = {
    "qkv": ("attn", ("att_proj", "q_proj", "k_proj", "v_proj")),
    "v": ("attn", ("v_proj",)),
    "o": ("attn", ("attn_out",)),
    "ff_in": ("ff", ("ff_proj",)),
    "ff_out": ("ff", ("ff_out",)),
}


def keep_gains(block: Any, sub_layer: str, gains: tuple[tuple[str, float], ...]) -> None:
    """Note on ``block`` what :func:`apply_gains` is to multiply by."""
    setattr(block, f"lns_gains_{sub_layer}", gains)


def gains_of(block: Any, sub_layer: str) -> tuple[tuple[str, float], ...]:
    """The gains of ``block``, as its plan for ``sub_layer`` names them."""
    found: tuple[tuple[str, float], ...] = getattr(block, f"lns_gains_{sub_layer}")
    return found


@torch.no_grad()
def apply_gains(block: Any) -> None:
    """Multiply the freshly drawn weights of ``block``; once after each draw.

    :raises LNSConfigError: the rows of ``v`` cannot be found in this process's shard.
    """
    for sub_layer in ("attn", "ff"):
        for role, gain in gains_of(block, sub_layer):
            owner, modules = _ROLES[role]
            if owner != sub_layer:
                continue
            if role == "v" and not hasattr(block, "v_proj"):
                _rows_of_v(block).mul_(gain)
            for name in modules:
                if hasattr(block, name):
                    getattr(block, name).weight.mul_(gain)


def _rows_of_v(block: Any) -> torch.Tensor:
    """The last rows of the fused projection ``att_proj``; of a shard of FSDP, the elements that lie in them."""
    weight: torch.Tensor = block.att_proj.weight
    width, rows = block.config.d_model, block.fused_dims[2]
    if weight.dim() == 2:
        return weight[-rows:]
    total = sum(block.fused_dims) * width
    first = _offset_of_shard(weight, total)
    return weight[max(0, total - rows * width - first) :]


def _offset_of_shard(weight: torch.Tensor, total: int) -> int:
    """Where this process's elements of a parameter begin in the whole of it.

    FSDP (meta device: OLMo draws after it has sharded) leaves a 1-D piece of each parameter, and
    the pieces lie in the order of the ranks. With hybrid sharding each group of consecutive
    ranks has the whole.

    :param total: elements of the whole parameter.
    :raises LNSConfigError: the pieces of all ranks do not make whole parameters.
    """
    sizes = [weight.numel()]
    if dist.is_available() and dist.is_initialized():
        mine = torch.tensor([weight.numel()], dtype=torch.int64, device=weight.device)
        gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, mine)
        sizes = [int(size) for size in gathered]
        first = sum(sizes[: dist.get_rank()]) % total
    else:
        first = 0
    if sum(sizes) % total or first + weight.numel() > total:
        raise LNSConfigError(
            f"the gain on the v rows of att_proj cannot be placed: this process has {weight.numel()} of {total} "
            f"elements, all ranks {sizes}, which are not consecutive parts. Use model.block_type: llama, whose v_proj "
            "is a matrix of its own, or initialize without meta device (model.init_device: cpu)."
        )
    return first
