"""Gains of a scheme on freshly drawn weights (DeepNorm's), by role: ``v``, ``o``, ``ff_in``, ``ff_out``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from olmo_lns.errors import LNSConfigError

__all__ = ["apply", "keep", "of"]

#: Role -> sub-layer and module; ``v`` is a part of ``att_proj`` in a sequential block.
_ROLES = {"v": ("attn", "v_proj"), "o": ("attn", "attn_out"), "ff_in": ("ff", "ff_proj"), "ff_out": ("ff", "ff_out")}


def keep(block: Any, sub_layer: str, gains: tuple[tuple[str, float], ...]) -> None:
    """Note on ``block`` what :func:`apply` is to multiply by."""
    setattr(block, f"lns_gains_{sub_layer}", gains)


def of(block: Any, sub_layer: str) -> tuple[tuple[str, float], ...]:
    """The gains of ``block``, as its plan for ``sub_layer`` names them."""
    found: tuple[tuple[str, float], ...] = getattr(block, f"lns_gains_{sub_layer}")
    return found


@torch.no_grad()
def apply(block: Any) -> None:
    """Multiply the freshly drawn weights of ``block``; once after each draw.

    :raises LNSConfigError: the rows of ``v`` cannot be found in this process's shard.
    """
    for sub_layer in ("attn", "ff"):
        for role, gain in of(block, sub_layer):
            owner, name = _ROLES[role]
            if owner != sub_layer:
                continue
            if role == "v" and not hasattr(block, name):
                _rows_of_v(block).mul_(gain)
            else:
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
