"""Copy a block for the probe.

The probe runs the copy and leaves the block of the model as it is. Later, when :mod:`olmo_lns.whole_model.confirmation`
compares all blocks, the blocks of the model run with the parameters of the copy for a moment.

The copy has random parameters. Many models start the last matrix of a branch at zero, or multiply the branch by a gate
that is zero at first. ``x + gate * mlp(norm(x))`` with a gate of 0 does not depend on the norm at all, so the probe
could not find the norm. The copy is in evaluation mode. It has fp32 parameters if the kernels of the block allow it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from olmo_lns.copying import deep_copy
from olmo_lns.probe.call import NotPreLN
from olmo_lns.shadow import RandomWeights, has_no_values, is_quantized


def random_copy(
    block: nn.Module,
    weights_from: nn.Module | None = None,
    memory: RandomWeights | None = None,
    dtype: Any = torch.float32,
) -> nn.Module:
    """Return a copy of ``block`` in evaluation mode, with random parameters or with those of ``weights_from``.

    :param weights_from: a module with the same structure, whose parameters the copy uses; None for random ones.
    :param memory: shared memory of several copies. The random parameters are views of it.
    :param dtype: floating dtype of the copy; None keeps the dtypes of the block.
    """
    if any(map(has_no_values, block.parameters())):
        raise NotPreLN("its weights are on the meta device or partitioned. Build or load them first")
    if any(map(is_quantized, block.parameters())):
        raise NotPreLN("its weights are quantized. Apply the scheme before the quantization")
    if weights_from is not None:
        pairs = zip(block.parameters(), weights_from.parameters(), strict=True)
        copied = deep_copy(block, {id(original): weight for original, weight in pairs})
    else:
        copied = (memory or RandomWeights()).copy(block, dtype=dtype)
    for gate in closed_gates(copied):
        gate.fill_(1.0)
    copied.eval()
    # Module.to() would drop the imaginary part of complex rotary tables.
    return copied if dtype is None else copied._apply(lambda t: t.to(dtype) if t.is_floating_point() else t)


def closed_gates(module: nn.Module) -> list[torch.Tensor]:
    """Return the buffers that contain a single 0. Such a buffer is a gate, which would hide its branch."""
    return [b for b in module.buffers() if b.is_floating_point() and b.numel() == 1 and not b.any()]


def set_training(module: nn.Module, trains: bool) -> None:
    """Set training or eval mode for all parts of a module, except that dropout stays off."""
    for part in module.modules():
        part.training = trains and not isinstance(part, nn.modules.dropout._DropoutNd)
