"""Jacobians of the blocks' residual maps, averaged over tokens (The Curse of Depth).

For block l and a token at position t, with all earlier positions fixed,

    J_t = d h_{l+1, t} / d h_{l, t}   (d x d)        J = mean over tokens of J_t

is the Jacobian of the whole residual map ``x -> x + Attn(Norm(x)) + ...``. A block that does nothing has J = I. The
distance of J to the identity is ``|J - I|_F / |I|_F``, 0 for a block that does nothing. The diagonal dominance is the
mean over rows of ``|J_ii| / sum_j |J_ij|``, 1 for a diagonal J.

A row costs one backward pass through the block. If d is small, all d rows are computed (``exact``). If d is large, only
the rows of a random sample of k coordinates are computed (``projected``). Each sampled row is complete. The dominance
is then the mean over the sample, and ``d/k * sum`` of the rows' squared distances is an unbiased estimate of the full
sum.
"""

from __future__ import annotations

from typing import Sequence

import torch
from torch import nn

from olmo_lns.diagnostics.capture import Batches, BlockCall, find_blocks, run_observed
from olmo_lns.diagnostics.results import Measurement

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

    :param rows: number of coordinates to sample. None means all rows up to width 256, and 128 rows above it.
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

    :param call: call of the block at which J_t is evaluated. Its input is (batch, sequence, d).
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
