"""Run one block of torchtitan on its norms and stand-ins for its branches, to find the norms that it reads through."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from olmo_lns import probe
from olmo_lns.errors import LNSConfigError

#: Sub-layer -> the norm before it, in each of torchtitan's blocks.
NORMS = {"attn": "attention_norm", "ff": "ffn_norm"}


class _Branch(nn.Module):
    """A linear map of the first argument, in the place of attention or feed-forward."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(dim, device="cpu"))

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.gain * x.roll(1, -1)


def check_block(block: nn.Module, dim: int, *, number: int) -> None:
    """Check that a block reads its stream through its two norms, and has no other norm around its branches.

    The block's own forward runs, with its norms and with stand-ins for attention and feed-forward, which may be large
    or need a GPU. :param block: its weights may be on the meta device; it is not changed. :param number: from 1.
    :raises LNSConfigError: the block is not Pre-LN in its two norms.
    :raises MeasurementError: the block cannot be called as ``block(x, attention_masks, positions)``.
    """
    example = copy.copy(block)
    example._modules = {name: _stand_in(child, dim) for name, child in block.named_children()}
    with torch.device("cpu"):
        call = probe.Call((torch.zeros(2, 8, dim, dtype=torch.float32), None, None), {}, 0)
        found = probe.pre_ln_sites(example, call, where=f"block {number}").names
    if set(found) != set(NORMS.values()):
        raise LNSConfigError(
            f"block {number} ({type(block).__name__}) reads its stream through {' and '.join(found)}. A scheme scales "
            f"{' and '.join(NORMS.values())}, and expects that a block reads its stream through these."
        )


def _stand_in(child: nn.Module, dim: int) -> nn.Module:
    """Return a copy of a norm of the stream with weights on the CPU; a stand-in for any other module."""
    parameters = dict(child.named_parameters())
    if any(parameter.shape != (dim,) for parameter in parameters.values()) or list(child.children()):
        return _Branch(dim)
    norm = copy.copy(child)
    norm._parameters = {
        name: nn.Parameter(torch.ones(dim, device="cpu", dtype=torch.float32)) for name in child._parameters
    }
    return norm
