"""Gradient norm of each block, and of each part of a block (Mix-LN).

The loss is the mean per token over all the data. Norms are Euclidean, over all parameters of a block or over those of
one part.
"""

from __future__ import annotations

import math
import re
from typing import Any, Sequence

import torch
from torch import nn

from olmo_lns.diagnostics.capture import Batches, evaluation_batches, find_blocks, require_finite, sequence_losses
from olmo_lns.diagnostics.results import Measurement
from olmo_lns.errors import LNSError

#: Kind -> pattern of a parameter's name in its block. The first match counts: norms precede their sub-layer.
PARTS = {
    "norm": re.compile(r"norm|\bln_", re.IGNORECASE),
    "attention": re.compile(r"att|\b[qkv]_proj|\bq_a|\bkv_"),
    "mlp": re.compile(r"mlp|\bff|feed_forward|ffn|intermediate|^output\.|fc"),
}
OTHER = "other"


def block_part(name: str) -> str:
    """Return the part of a block that has a parameter of this name: ``norm``, ``attention``, ``mlp`` or ``other``."""
    return next((part for part, pattern in PARTS.items() if pattern.search(name)), OTHER)


def gradient_norms(
    model: nn.Module,
    blocks: Sequence[nn.Module] | None,
    batches: Batches,
    device: torch.device | str = "cpu",
) -> Measurement:
    """Measure the gradient norms of the mean loss over ``batches``, without changing the model's gradients.

    The gradient of every parameter must fit in memory, in its dtype. Dropout is off. The result has the columns
    ``total``, each part, and each parameter by its name in the block. Its details are the mean loss per token in nats
    and the norms of the parameters ``outside`` the blocks. ``tokens`` counts predicted tokens.

    :raises LNSError: if there is no token to predict, or the loss or a gradient is not finite. In the last case the
        message names the blocks. The problem begins in the last of them, because a backward pass goes from later to
        earlier blocks.

    Example: ``gradient_norms(model, None, [torch.arange(64)[None]]).blocks["total"]`` has one number per block.
    """
    blocks = find_blocks(model) if blocks is None else blocks
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    saved_gradients = {name: parameter.grad for name, parameter in parameters.items()}
    total_loss, tokens, divisor = 0.0, 0, 0
    try:
        for parameter in parameters.values():
            parameter.grad = None
        with torch.enable_grad():
            for ids, mask in evaluation_batches(model, batches, device):
                losses, counts = sequence_losses(model, ids, mask)
                require_finite(losses)
                count = int(counts.sum())
                if count == 0:
                    continue
                divisor = divisor or count  # the same for all batches; keeps fp16 sums from overflowing
                (losses.sum() / divisor).backward()
                total_loss += float(losses.detach().sum())
                tokens += count
        if not tokens:
            raise LNSError("The data have no token to predict. Pass sequences of at least two tokens.")
        norms = {
            name: 0.0 if p.grad is None else float(torch.linalg.vector_norm(p.grad.float())) * divisor / tokens
            for name, p in parameters.items()
        }
    finally:
        for name, parameter in parameters.items():
            parameter.grad = saved_gradients[name]
    return _by_block(model, blocks, norms, total_loss / tokens, tokens)


def _by_block(
    model: nn.Module, blocks: Sequence[nn.Module], norms: dict[str, float], loss: float, tokens: int
) -> Measurement:
    names = {parameter: name for name, parameter in model.named_parameters() if name in norms}
    block_norms = [{name: norms[names[p]] for name, p in block.named_parameters() if p in names} for block in blocks]
    columns: dict[str, list[Any]] = {"total": [math.hypot(*by_name.values()) for by_name in block_norms]}
    for part in (*PARTS, OTHER):
        part_norms = [[norm for name, norm in by_name.items() if block_part(name) == part] for by_name in block_norms]
        if any(part_norms):
            columns[part] = [math.hypot(*values) if values else None for values in part_norms]
    for name in [name for by_name in block_norms for name in by_name]:
        columns[name] = [by_name.get(name) for by_name in block_norms]
    inside = {names[p] for block in blocks for p in block.parameters() if p in names}
    outside = {name: norm for name, norm in norms.items() if name not in inside}
    return Measurement("gradnorm", tokens, columns, {"loss": loss, "outside": outside})
