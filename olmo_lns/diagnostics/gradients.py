"""Diagnostics that need a backward pass: Jacobians of the blocks' residual maps, and gradient norms.

**Jacobian**, averaged over tokens (The Curse of Depth). For block l and a token at position t, with all earlier
positions held fixed,

    J_t = d h_{l+1, t} / d h_{l, t}   (d x d)        J = mean over tokens of J_t

is the whole residual map ``x -> x + Attn(Norm(x)) + ...``, so a block that does nothing has J = I. The distance of J to
the identity is ``|J - I|_F / |I|_F``, 0 for a block that does nothing; the diagonal dominance is the mean over rows of
``|J_ii| / sum_j |J_ij|``, 1 for a diagonal J.

A row costs one backward pass through the block. For a small d all d rows are computed (``exact``), else the rows of a
random sample of k coordinates (``projected``). Each sampled row is complete: dominance is the mean over the sample, and
``d/k * sum`` of the rows' squared distances is an unbiased estimate of the full sum.

**Gradient norm** per block and kind of parameter (Mix-LN). The gradient is that of the mean loss per token over all
the data; norms are Euclidean, over all parameters of a block or of one kind in it.
"""

from __future__ import annotations

import math
import re
from typing import Any, Sequence

import torch
from torch import nn

from olmo_lns.diagnostics.capture import Batches, BlockCall, evaluated, run_observed, sequence_losses
from olmo_lns.diagnostics.results import Measurement
from olmo_lns.diagnostics.structure import find_blocks
from olmo_lns.errors import LNSError

#: Widest model for which all rows are computed by default.
EXACT_UP_TO = 256
#: Default number of rows for a wider model.
SAMPLED_ROWS = 128
#: Side of the sub-matrix kept for the heat map.
HEAT_MAP = 64


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

    The result's columns are ``identity_distance``, ``diagonal_dominance`` and ``diagonal_mean``; its details ``method``
    (``exact`` or ``projected``), ``width`` d, the 0-based ``coordinates`` of the computed rows, and for each block a
    heat map, the sub-matrix of J on ``heat_map_coordinates``.

    :param rows: number of coordinates to sample; None: all up to a width of 256, else 128.
    :param seed: seed of the positions and the coordinates.
    :raises LNSError: no token, or a Jacobian that is not finite (the message names the blocks).

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
    count = rows if rows is not None else (width if width <= EXACT_UP_TO else SAMPLED_ROWS)
    if count >= width:
        return torch.arange(width)
    return torch.randperm(width, generator=generator)[:count].sort().values


def token_jacobian_rows(
    block: nn.Module, call: BlockCall, sequences: torch.Tensor, positions: torch.Tensor, coordinates: torch.Tensor
) -> torch.Tensor:
    """Return the rows ``coordinates`` of J_t for one position of each of some sequences.

    :param call: the call of the block at the linearisation; its input is (batch, sequence, d).
    :param sequences, positions: indices of the tokens, as many of each.
    :returns: (tokens, rows, d), float32.
    """
    at = (sequences, positions)
    with torch.enable_grad():
        leaf = call.input[at].detach().clone().requires_grad_()
        output = call.repeat(block, call.input.detach().index_put(at, leaf)).output[at]
        # One row at a time: hand-written backward passes (of the norm, of fused attention) cannot be vectorised.
        rows = [
            torch.autograd.grad(output[:, coordinate].sum(), leaf, retain_graph=True)[0].float()
            for coordinate in coordinates.tolist()
        ]
    return torch.stack(rows, dim=1)


def _summary(rows: torch.Tensor, coordinates: torch.Tensor, tokens: int) -> Measurement:
    """Return the result. :param rows: (blocks, rows, width), the averaged rows of J."""
    indices = torch.arange(len(coordinates))
    shown_rows = torch.linspace(0, len(coordinates) - 1, min(HEAT_MAP, len(coordinates))).round().long()
    diagonal, error = rows[:, indices, coordinates], rows.clone()
    error[:, indices, coordinates] -= 1  # |J_i|^2 - 2 J_ii + 1 would cancel near the identity
    columns = {
        "identity_distance": (error.square().sum((1, 2)) / len(coordinates)).sqrt().tolist(),
        "diagonal_dominance": (diagonal.abs() / rows.abs().sum(2).clamp_min(1e-300)).mean(1).tolist(),
        "diagonal_mean": diagonal.mean(1).tolist(),
    }
    heat_maps = rows[:, shown_rows][:, :, coordinates[shown_rows]].tolist()
    details = {
        "method": "exact" if len(coordinates) == rows.shape[2] else "projected",
        "rows": len(coordinates),
        "width": rows.shape[2],
        "coordinates": coordinates.tolist(),
        "heat_map_coordinates": coordinates[shown_rows].tolist(),
        "heat_maps": [[[float(f"{value:.4g}") for value in row] for row in block] for block in heat_maps],
    }
    return Measurement("jacobian", tokens, columns, details)


#: Kind -> pattern of a parameter's name in its block; the first match wins, so norms come before their sub-layer.
PARTS = {
    "norm": re.compile(r"norm|\bln_", re.IGNORECASE),
    "attention": re.compile(r"att|\b[qkv]_proj|\bq_a|\bkv_"),
    "mlp": re.compile(r"mlp|\bff|feed_forward|ffn|intermediate|^output\.|fc"),
}
OTHER = "other"


def kind_of(name: str) -> str:
    """Return ``norm``, ``attention``, ``mlp`` or ``other`` for a parameter's name in its block."""
    return next((kind for kind, pattern in PARTS.items() if pattern.search(name)), OTHER)


def gradient_norms(
    model: nn.Module,
    blocks: Sequence[nn.Module] | None,
    batches: Batches,
    device: torch.device | str = "cpu",
) -> Measurement:
    """Measure the gradient norms of the mean loss over ``batches``, without changing the model's gradients.

    Needs memory for one gradient of every parameter, in its dtype. Dropout is off. The result's columns are ``total``,
    each kind, and each parameter by its name in the block; its details are the mean loss per token in nats, and the
    norms of the parameters ``outside`` the blocks. ``tokens`` counts predicted tokens.

    :raises LNSError: no token to predict, or a loss or gradient that is not finite. The message names the blocks; the
        backward pass carries the values from the last of them to the earlier ones.

    Example: ``gradient_norms(model, None, [torch.arange(64)[None]]).blocks["total"]`` has one number per block.
    """
    blocks = find_blocks(model) if blocks is None else blocks
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    kept = {name: p.grad for name, p in named.items()}
    total, tokens, scale = 0.0, 0, 0
    try:
        for parameter in named.values():
            parameter.grad = None
        with torch.enable_grad():
            for ids, mask in evaluated(model, batches, device):
                losses, counts = sequence_losses(model, ids, mask)
                if not (count := int(counts.sum())):
                    continue
                scale = scale or count  # one divisor for all batches, so that sums do not overflow in fp16
                (losses.sum() / scale).backward()
                total, tokens = total + float(losses.detach().sum()), tokens + count
        if not tokens:
            raise LNSError("the data has no token to predict: give sequences of at least two tokens")
        norms = {
            name: float(torch.linalg.vector_norm(p.grad.float())) * scale / tokens if p.grad is not None else 0.0
            for name, p in named.items()
        }
    finally:
        for name, parameter in named.items():
            parameter.grad = kept[name]
    return _by_block(model, blocks, norms, total / tokens, tokens)


def _by_block(
    model: nn.Module, blocks: Sequence[nn.Module], norms: dict[str, float], loss: float, tokens: int
) -> Measurement:
    names = {parameter: name for name, parameter in model.named_parameters() if name in norms}
    parameters = [{own: norms[names[p]] for own, p in block.named_parameters() if p in names} for block in blocks]
    columns: dict[str, list[Any]] = {"total": [math.hypot(*own.values()) for own in parameters]}
    for kind in (*PARTS, OTHER):
        parts = [[norm for name, norm in own.items() if kind_of(name) == kind] for own in parameters]
        if any(parts):
            columns[kind] = [math.hypot(*some) if some else None for some in parts]
    columns |= {name: [own.get(name) for own in parameters] for own in parameters for name in own}
    inside = {names[p] for block in blocks for p in block.parameters() if p in names}
    outside = {name: norm for name, norm in norms.items() if name not in inside}
    return Measurement("gradnorm", tokens, columns, {"loss": loss, "outside": outside})
