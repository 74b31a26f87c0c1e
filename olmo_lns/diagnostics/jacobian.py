"""Token-averaged Jacobians of the blocks' residual maps.

For block l and a token at position t, with everything before t held fixed,

    J_t = d h_{l+1, t} / d h_{l, t}   (d x d)        J = mean over tokens of J_t

is the whole residual map ``x -> x + Attn(Norm(x)) + ...``, so a block that does nothing has J = I. Two
numbers a layer:

* distance to the identity ``|J - I|_F / |I|_F``, 0 for a block that does nothing;
* diagonal dominance, the mean over rows of ``|J_ii| / sum_j |J_ij|``, 1 for a diagonal J.

A row costs one backward pass through the block. All d rows are taken where d is small (``exact``);
else a random sample of k coordinates (``projected``): their rows are computed completely, so dominance
is the mean over a sample of rows and ``d/k * sum`` of their squared distances estimates the full one
without bias.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Callable, Sequence

import torch
from torch import nn

from olmo_lns.diagnostics.capture import Batches, block_input, by_block, first_tensor, run
from olmo_lns.errors import LNSError
from olmo_lns.models.blocks import body_forward, find_blocks

__all__ = ["EXACT_UP_TO", "JacobianResult", "block_jacobians", "token_jacobian_rows"]

#: Widest model for which all rows are taken, unless asked otherwise.
EXACT_UP_TO = 256
#: Rows of a wider model.
SAMPLED_ROWS = 128
#: Side of the sub-matrix kept for the heat map.
HEAT_MAP = 64


@dataclass(frozen=True)
class JacobianResult:
    """Numbers per block, block 1 first; see the module's text.

    :param method: ``"exact"`` or ``"projected"``. :param coordinates: 0-based rows that were computed.
    :param heat_maps: per block, the square sub-matrix of J on ``heat_map_coordinates``.
    :param tokens: tokens averaged over, one random position of each sequence. :param width: d.
    """

    method: str
    identity_distance: list[float]
    diagonal_dominance: list[float]
    diagonal_mean: list[float]
    heat_maps: list[list[list[float]]]
    heat_map_coordinates: list[int]
    coordinates: list[int]
    width: int
    tokens: int

    def frame(self) -> Any:
        """A pandas table with a row per block, ``block`` 1-based."""
        numbers = ("identity_distance", "diagonal_dominance", "diagonal_mean")
        columns: dict[str, Any] = {name: getattr(self, name) for name in numbers}
        columns |= {"method": self.method, "rows": len(self.coordinates), "width": self.width, "tokens": self.tokens}
        return by_block(columns)


def block_jacobians(
    model: nn.Module,
    blocks: Sequence[nn.Module] | None,
    batches: Batches,
    device: torch.device | str = "cpu",
    *,
    rows: int | None = None,
    seed: int = 0,
) -> JacobianResult:
    """Average J of every block over one random real position of each sequence in ``batches``.

    :param rows: coordinates to sample; None takes all up to a width of 256 and 128 beyond.
    :param seed: of the positions and the coordinates.
    :raises LNSError: no token, or a Jacobian that is not finite (the first such block is named).
    """
    blocks = find_blocks(model) if blocks is None else blocks
    generator = torch.Generator().manual_seed(seed)
    forward = body_forward(model)
    calls: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}
    coordinates, sums, tokens = torch.empty(0, dtype=torch.long), [torch.zeros(0)] * len(blocks), 0

    def recorded(ids: torch.Tensor, mask: torch.Tensor | None) -> None:
        with ExitStack() as stack:
            for index, block in enumerate(blocks):

                def keep(_: nn.Module, args: Any, kwargs: Any, index: int = index) -> None:
                    calls[index] = (args, kwargs)

                stack.callback(block.register_forward_pre_hook(keep, with_kwargs=True).remove)
            forward(ids, mask)

    for ids, mask in run(model, batches, device, recorded):
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
        real = real[(kept := real.any(dim=1))]
        positions = torch.multinomial(real.double().cpu(), 1, generator=generator).squeeze(1)
        if not tokens:
            coordinates = _coordinates(block_input(*calls[0]).shape[-1], rows, generator)
        for index, block in enumerate(blocks):
            alone, hidden = _of_input_alone(block, *calls[index])
            summed = token_jacobian_rows(alone, hidden, positions, coordinates, kept).sum(dim=0).double().cpu()
            if not bool(torch.isfinite(summed).all()):
                raise LNSError(f"block {index + 1} is the first whose Jacobian holds NaN or infinity: try fp32 or bf16")
            sums[index] = sums[index] + summed if tokens else summed
        tokens += len(positions)
        calls.clear()
    return _summary([total / tokens for total in sums], coordinates, tokens)


def _of_input_alone(
    block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor]:
    """A block as a function of its input, everything else as in a recorded call; and the input it was given."""
    hidden = block_input(args, kwargs)
    names = {name: value for name, value in kwargs.items() if value is not hidden}
    return lambda x: first_tensor(block(x, *args[1:], **names)), hidden


def _coordinates(width: int, rows: int | None, generator: torch.Generator) -> torch.Tensor:
    wanted = rows if rows is not None else (width if width <= EXACT_UP_TO else SAMPLED_ROWS)
    if wanted < 1:
        raise LNSError(f"--rows must be at least 1, found {wanted}")
    if wanted >= width:
        return torch.arange(width)
    return torch.randperm(width, generator=generator)[:wanted].sort().values


def token_jacobian_rows(
    block: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    positions: torch.Tensor,
    coordinates: torch.Tensor,
    kept: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rows ``coordinates`` of J_t for one position of each sequence.

    :param block: maps (batch, sequence, d) to the same shape. :param hidden: where to linearise it.
    :param positions: (sequences,) position t. :param kept: (batch,) which sequences count, default all.
    :returns: (sequences, rows, d), float32.
    """
    sequences = torch.arange(len(hidden)) if kept is None else kept.cpu().nonzero().squeeze(1)
    at = (sequences.to(hidden.device), positions.to(hidden.device))
    with torch.enable_grad():
        leaf = hidden[at].detach().clone().requires_grad_()
        output = block(hidden.detach().index_put(at, leaf))[at]
        # One row at a time: hand-written backward passes (our norm's, fused attention's) cannot be vectorised.
        rows = [
            torch.autograd.grad(output[:, coordinate].sum(), leaf, retain_graph=True)[0].float()
            for coordinate in coordinates.tolist()
        ]
    return torch.stack(rows, dim=1)


def _summary(means: Sequence[torch.Tensor], coordinates: torch.Tensor, tokens: int) -> JacobianResult:
    width = means[0].shape[1]
    local = torch.linspace(0, len(coordinates) - 1, min(HEAT_MAP, len(coordinates))).round().long()
    shown = coordinates[local]
    distance, dominance, diagonal = [], [], []
    for rows in means:
        own = rows.gather(1, coordinates.unsqueeze(1)).squeeze(1)
        # |J_i - e_i|^2 = |J_i|^2 - 2 J_ii + 1 would cancel near the identity.
        error = rows.scatter_add(1, coordinates.unsqueeze(1), -torch.ones(len(rows), 1, dtype=rows.dtype))
        distance.append(math.sqrt(float((error**2).sum()) / len(rows)))
        dominance.append(float((own.abs() / rows.abs().sum(dim=1).clamp_min(1e-300)).mean()))
        diagonal.append(float(own.mean()))
    return JacobianResult(
        method="exact" if len(coordinates) == width else "projected",
        identity_distance=distance,
        diagonal_dominance=dominance,
        diagonal_mean=diagonal,
        heat_maps=[[[float(f"{v:.4g}") for v in row] for row in rows[local][:, shown].tolist()] for rows in means],
        heat_map_coordinates=shown.tolist(),
        coordinates=coordinates.tolist(),
        width=width,
        tokens=tokens,
    )
