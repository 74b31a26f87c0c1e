"""Diagnostics that need a backward pass: Jacobians of the blocks' residual maps, and gradient norms.

**Jacobian**, averaged over tokens (The Curse of Depth). For block l and a token at position t, with all earlier
positions fixed,

    J_t = d h_{l+1, t} / d h_{l, t}   (d x d)        J = mean over tokens of J_t

is the Jacobian of the whole residual map ``x -> x + Attn(Norm(x)) + ...``. A block that does nothing has J = I. The
distance of J to the identity is ``|J - I|_F / |I|_F``, 0 for a block that does nothing. The diagonal dominance is the
mean over rows of ``|J_ii| / sum_j |J_ij|``, 1 for a diagonal J.

A row costs one backward pass through the block. A small d allows all d rows (``exact``); a large d, only the rows of a
random sample of k coordinates (``projected``). Each sampled row is complete: the dominance is the mean over the sample,
and ``d/k * sum`` of the rows' squared distances is an unbiased estimate of the full sum.

**Gradient norm** per block and part of a block (Mix-LN). The loss is the mean per token over all the data. Norms are
Euclidean, over all parameters of a block or over those of one part.
"""

from __future__ import annotations

import math
import re
from typing import Any, Sequence

import torch
from torch import nn

from olmo_lns.diagnostics.capture import (
    Batches,
    BlockCall,
    evaluation_batches,
    find_blocks,
    require_finite,
    run_observed,
    sequence_losses,
)
from olmo_lns.diagnostics.results import Measurement
from olmo_lns.errors import LNSError

#: Largest width at which all rows are computed by default.
MAX_EXACT_WIDTH = 256
#: Default number of rows for a wider model.
SAMPLED_ROWS = 128
#: Maximum side of the sub-matrix for a heat map.
HEAT_MAP_SIZE = 64


def block_jacobians(
    model: nn.Module,
    blocks: Sequence[nn.Module] | None,
    batches: Batches,
    device: torch.device | str = "cpu",
    *,
    rows: int | None = None,
    seed: int = 0,
) -> Measurement:
    """Average J of every block over one random real position of each sequence in ``batches``.

    The result has the columns ``identity_distance``, ``diagonal_dominance`` and ``diagonal_mean``. Its details are
    ``method`` (``exact`` or ``projected``), ``width`` d, the 0-based ``coordinates`` of the computed rows, and for each
    block a heat map, the sub-matrix of J on ``heat_map_coordinates``.

    :param rows: number of coordinates to sample; None: all rows up to width 256, else 128.
    :param seed: seed of the positions and the coordinates.
    :raises LNSError: if the batches have no token, or a Jacobian is not finite. The message names the blocks.

    Example: ``block_jacobians(model, None, [torch.arange(64)[None]]).blocks["identity_distance"]``.
    """
    blocks = find_blocks(model) if blocks is None else blocks
    generator = torch.Generator().manual_seed(seed)
    coordinates, total, tokens = torch.empty(0, dtype=torch.long), torch.zeros(()), 0
    for calls, mask in run_observed(model, blocks, batches, device):
        sequences = mask.any(dim=1).nonzero().squeeze(1)
        positions = torch.multinomial(mask[sequences].double().cpu(), 1, generator=generator).squeeze(1)
        if not tokens:
            coordinates = _coordinates(calls[0].input.shape[-1], rows, generator)
        sums = [
            token_jacobian_rows(block, call, sequences, positions.to(device), coordinates).sum(dim=0)
            for block, call in zip(blocks, calls, strict=True)
        ]
        total = total + torch.stack(sums).double().cpu()
        tokens += len(sequences)
    return _summary(total / tokens, coordinates, tokens)


def _coordinates(width: int, rows: int | None, generator: torch.Generator) -> torch.Tensor:
    if rows is None:
        rows = width if width <= MAX_EXACT_WIDTH else SAMPLED_ROWS
    if rows >= width:
        return torch.arange(width)
    return torch.randperm(width, generator=generator)[:rows].sort().values


def token_jacobian_rows(
    block: nn.Module, call: BlockCall, sequences: torch.Tensor, positions: torch.Tensor, coordinates: torch.Tensor
) -> torch.Tensor:
    """Return the rows ``coordinates`` of J_t for one token of each sequence in ``sequences``.

    :param call: call of the block at which J_t is evaluated; its input is (batch, sequence, d).
    :param sequences, positions: indices of the tokens in the batch, each (tokens,).
    :returns: (tokens, rows, d), float32.
    """
    tokens = (sequences, positions)
    with torch.enable_grad():
        leaf = call.input[tokens].detach().clone().requires_grad_()
        with torch.random.fork_rng():  # the random state is the caller's
            output = call.call.replay(block, call.input.detach().index_put(tokens, leaf))[tokens]
        # One row at a time: hand-written backward passes (of the norm, of fused attention) cannot be vectorised.
        rows = [
            torch.autograd.grad(output[:, coordinate].sum(), leaf, retain_graph=True)[0].float()
            for coordinate in coordinates.tolist()
        ]
    return torch.stack(rows, dim=1)


def _summary(rows: torch.Tensor, coordinates: torch.Tensor, tokens: int) -> Measurement:
    """Return the result. :param rows: averaged rows of J, (blocks, rows, width)."""
    row_numbers = torch.arange(len(coordinates))
    diagonal, error = rows[:, row_numbers, coordinates], rows.clone()
    error[:, row_numbers, coordinates] -= 1  # |J_i|^2 - 2 J_ii + 1 would cancel near the identity
    columns = {
        "identity_distance": (error.square().sum((1, 2)) / len(coordinates)).sqrt().tolist(),
        "diagonal_dominance": (diagonal.abs() / rows.abs().sum(2).clamp_min(1e-300)).mean(1).tolist(),
        "diagonal_mean": diagonal.mean(1).tolist(),
    }
    selected = torch.linspace(0, len(coordinates) - 1, min(HEAT_MAP_SIZE, len(coordinates))).round().long()
    heat_maps = rows[:, selected][:, :, coordinates[selected]].tolist()
    details = {
        "method": "exact" if len(coordinates) == rows.shape[2] else "projected",
        "rows": len(coordinates),
        "width": rows.shape[2],
        "coordinates": coordinates.tolist(),
        "heat_map_coordinates": coordinates[selected].tolist(),
        "heat_maps": [[[float(f"{value:.4g}") for value in row] for row in block] for block in heat_maps],
    }
    return Measurement("jacobian", tokens, columns, details)


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
