"""Check through which norms a block of torchtitan reads its stream.

The forward of the block runs with its own norms, and with small substitutes for attention and feed-forward.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from olmo_lns import probe
from olmo_lns.errors import LNSConfigError

#: Sub-layer -> the name of the norm before it, which is the same in all blocks of torchtitan.
NORMS = {"attn": "attention_norm", "ff": "ffn_norm"}


class _Branch(nn.Module):
    """A small linear map that replaces attention or feed-forward."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(dim, device="cpu"))

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.gain * x.roll(1, -1)


def check_block(block: nn.Module, dim: int, *, number: int) -> None:
    """Check that a block reads its stream through its two norms, and has no other norm around its branches.

    Attention and feed-forward are replaced for this check, because they may be large or need a GPU.

    :param block: the block, which is not changed. Its weights may be on the meta device.
    :param dim: the hidden size.
    :param number: number of the block, from 1, for error messages.
    :raises LNSConfigError: if the block is not Pre-LN in its two norms.
    :raises MeasurementError: if the block cannot be called as ``block(x, attention_masks, positions)``.
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
    """Return a copy with weights on the CPU for a norm of the stream, and a small linear map for other modules."""
    parameters = dict(child.named_parameters())
    if any(parameter.shape != (dim,) for parameter in parameters.values()) or list(child.children()):
        return _Branch(dim)
    norm = copy.copy(child)
    norm._parameters = {
        name: nn.Parameter(torch.ones(dim, device="cpu", dtype=torch.float32)) for name in child._parameters
    }
    return norm
