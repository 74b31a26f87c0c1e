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
from typing import Any, Callable

import torch
import torch.distributed as dist

from olmo_lns.errors import LNSConfigError
from olmo_lns.integrations.olmo.types import INIT_FNS, has_scheme
from olmo_lns.schemes.initialization import factor

__all__ = ["apply_gains", "depth_factor", "initialization_of", "wrap_block_reset", "wrap_reset"]


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
    return str(getattr(block, "lns_initialization", "upstream"))


def wrap_block_reset(reset: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``OLMoBlock.reset_parameters``, which draws ``attn_out`` and ``ff_out`` with OLMo's depth factor.

    Multiplying the stock draw keeps the random stream, and is exact for OLMo's normals truncated at a multiple of
    their standard deviation. It works on meta tensors and on FSDP shards.
    """

    @torch.no_grad()
    def wrapped(self: Any) -> None:
        reset(self)
        wanted = initialization_of(self)
        if wanted == "upstream":
            return
        number, count = self.layer_id + 1, self.config.n_layers
        present, scale = depth_factor(self.config.init_fn, number, count), factor(wanted, number, count)
        for weight in (self.attn_out.weight, self.ff_out.weight):
            if present != 1.0:
                weight.div_(present)
            if scale != 1.0:
                weight.mul_(scale)

    return wrapped


def wrap_reset(reset: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``reset_parameters`` of the model or of a block class, which ask for ``init_fn`` by name.

    OLMo draws our initializations as ``normal``; the config keeps the name that defines the run.
    """

    def wrapped(self: Any) -> None:
        from olmo.config import InitFnType

        asked = self.config.init_fn  # hf_olmo passes a plain string
        if str(asked) in INIT_FNS:
            self.config.init_fn = InitFnType.normal
        try:
            reset(self)
        finally:
            self.config.init_fn = asked
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


@torch.no_grad()
def apply_gains(block: Any) -> None:
    """Multiply the freshly drawn weights of ``block`` by its ``lns_gains``; once after each draw.

    :raises LNSConfigError: the rows of ``v`` cannot be found in this process's shard.
    """
    for sub_layer, gains in block.lns_gains.items():
        for role, gain in gains:
            owner, modules = _ROLES[role]
            if owner != sub_layer:
                continue
            if role == "v" and not hasattr(block, "v_proj"):
                _rows_of_v(block).mul_(gain)
            for name in modules:
                if hasattr(block, name):
                    getattr(block, name).weight.mul_(gain)


def _rows_of_v(block: Any) -> torch.Tensor:
    """The last rows of the fused projection ``att_proj``; of a shard of FSDP, the elements that lie in them.

    FSDP (meta device: OLMo draws after it has sharded) leaves a 1-D piece of each parameter, and the pieces lie in the
    order of the ranks. With hybrid sharding each group of consecutive ranks has the whole.

    :raises LNSConfigError: the pieces of all ranks do not make whole parameters.
    """
    weight: torch.Tensor = block.att_proj.weight
    width, rows = block.config.d_model, block.fused_dims[2]
    if weight.dim() == 2:
        return weight[-rows:]
    total, sizes, rank = sum(block.fused_dims) * width, [weight.numel()], 0
    if dist.is_available() and dist.is_initialized():
        sizes, rank = [0] * dist.get_world_size(), dist.get_rank()
        dist.all_gather_object(sizes, weight.numel())
    first = sum(sizes[:rank]) % total
    if sum(sizes) % total or first + weight.numel() > total:
        raise LNSConfigError(
            f"the gain on the v rows of att_proj cannot be placed: this process has {weight.numel()} of {total} "
            f"elements, all ranks {sizes}, which are not consecutive parts. Use model.block_type: llama, whose v_proj "
            "is a matrix of its own, or initialize without meta device (model.init_device: cpu)."
        )
    return weight[max(0, total - rows * width - first) :]
