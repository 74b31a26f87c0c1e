"""Angular distance between the states of the residual stream, for all pairs of layers in one pass.

State ``l`` (1-based) is the input of block ``l``; state ``L + 1`` is the raw output of the last block. As
in the Curse of Depth paper (after Gromov et al., arXiv 2403.17887)::

    d(l, l + n) = mean over tokens of  arccos( cos(h_l, h_{l+n}) ) / pi      in [0, 1]

A block that changes nothing gives 0. The cosine is computed in float64 and clamped: rounding leaves it
just above 1 for nearly equal states, where arccos is NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Sequence

import torch
import torch.distributed as dist
from torch import nn

from olmo_lns.diagnostics.capture import Batches, accumulator_dtype, group_device, not_finite, observe, run
from olmo_lns.errors import LNSError
from olmo_lns.models.blocks import body_forward, find_blocks

__all__ = ["AngularResult", "angular_distance", "pairwise_angles"]

#: Tokens per matrix product: bounds the float64 copy of the states.
CHUNK = 512


@dataclass(frozen=True)
class AngularResult:
    """``distance[l - 1][n - 1]`` is d(l, l + n), for l = 1..L and n = 1..L + 1 - l.

    :param variant: ``"all tokens"`` or ``"last token"`` (of each sequence).
    :param tokens: tokens averaged over, padding excluded.
    """

    distance: list[list[float]]
    variant: str
    tokens: int

    @property
    def adjacent(self) -> list[float]:
        """d(l, l + 1): how far block l turns the residual stream, block 1 first."""
        return [row[0] for row in self.distance]

    def rows(self) -> list[dict[str, Any]]:
        """A row per pair; ``layer`` = l and ``n`` are 1-based."""
        return [
            {"layer": layer, "n": n, "distance": d, "variant": self.variant, "tokens": self.tokens}
            for layer, row in enumerate(self.distance, start=1)
            for n, d in enumerate(row, start=1)
        ]


def pairwise_angles(states: torch.Tensor) -> torch.Tensor:
    """Angles between all states of each token, as a fraction of pi.

    :param states: (tokens, states, d_model), floating. A zero vector is at 1/2 from everything.
    :returns: (tokens, states, states) in [0, 1], float64 (float32 on MPS).
    """
    states = states.to(accumulator_dtype(states.device))
    gram = torch.bmm(states, states.transpose(1, 2))
    norm = gram.diagonal(dim1=1, dim2=2).sqrt().clamp_min(torch.finfo(gram.dtype).tiny)
    cosine = gram / norm.unsqueeze(1) / norm.unsqueeze(2)
    return cosine.clamp_(-1.0, 1.0).arccos_().div_(math.pi)


def angular_distance(
    model: nn.Module,
    blocks: Sequence[nn.Module] | None,
    batches: Batches,
    device: torch.device | str = "cpu",
    *,
    last_token: bool = False,
    all_ranks: bool = False,
) -> AngularResult:
    """d(l, l + n) for all pairs, averaged over the tokens of ``batches``; arguments as in ``block_output_variance``.

    :param last_token: average over the last real token of each sequence only.
    :raises LNSError: no token, or states that are not finite (the first block that made them so is named).
    """
    blocks = find_blocks(model) if blocks is None else blocks
    forward, count = body_forward(model), len(blocks) + 1
    states: list[torch.Tensor] = []
    sums = _Sums(count)

    def last_block(block: int, hidden: torch.Tensor) -> None:
        if block == count - 2:
            states.append(hidden)

    def watched(ids: torch.Tensor, mask: torch.Tensor | None) -> None:
        states.clear()
        with observe(blocks, on_input=lambda _, hidden: states.append(hidden), on_output=last_block):
            forward(ids, mask)

    for ids, mask in run(model, batches, device, watched, may_be_empty=all_ranks):
        sums.add(states, _select(ids, mask, last_token))
        if sums.bad_state is not None:
            break
    states.clear()
    if all_ranks:
        sums.pool_ranks()
    mean = sums.mean().cpu()
    distance = [[float(mean[i, j]) for j in range(i + 1, count)] for i in range(count - 1)]
    return AngularResult(distance, "last token" if last_token else "all tokens", sums.tokens)


def _select(ids: torch.Tensor, mask: torch.Tensor | None, last_token: bool) -> torch.Tensor:
    """Mask (batch, sequence) of the tokens that count."""
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
    if not last_token:
        return real
    position = torch.arange(ids.shape[1], device=ids.device)
    last = torch.where(real, position, -1).amax(dim=1, keepdim=True)
    return real & (position == last)


class _Sums:
    """Sum of the pairwise angles over tokens, their number, and the first state that was not finite (0-based)."""

    def __init__(self, states: int) -> None:
        self.total = torch.zeros(states, states, dtype=torch.float64)
        self.tokens = 0
        self.bad_state: int | None = None

    @torch.no_grad()
    def add(self, states: Sequence[torch.Tensor], selected: torch.Tensor) -> None:
        """Add the tokens that ``selected`` (batch, sequence) names; ``states`` as (batch, sequence, d_model) each."""
        device = states[0].device  # with device_map the blocks sit on several
        index = selected.flatten().nonzero().squeeze(1)
        flat = [state.flatten(0, -2) for state in states]
        self.total = self.total.to(device, accumulator_dtype(device))
        for chunk in index.split(CHUNK):
            tokens = torch.stack([state[chunk.to(state.device)].to(device) for state in flat], dim=1)
            finite = torch.isfinite(tokens).all(dim=2).all(dim=0)
            if not bool(finite.all()):
                self.bad_state = int((~finite).nonzero()[0])
                return
            self.total += pairwise_angles(tokens).sum(dim=0)
        self.tokens += len(index)

    def pool_ranks(self) -> None:
        """Add up over the ranks of torch.distributed, if it runs: a rank with bad states tells the others."""
        if not (dist.is_available() and dist.is_initialized()):
            return
        device = group_device()
        bad = torch.zeros(len(self.total), dtype=torch.float64, device=device)
        if self.bad_state is not None:
            bad[self.bad_state] = 1
        tokens = torch.tensor([self.tokens], dtype=torch.float64, device=device)
        packed = torch.cat([self.total.flatten().to(device, torch.float64), bad, tokens])
        dist.all_reduce(packed)
        states = len(self.total)
        self.total, self.tokens = packed[: states * states].view(states, states), int(packed[-1])
        found = packed[states * states : -1].nonzero()
        self.bad_state = int(found[0]) if len(found) else None

    def mean(self) -> torch.Tensor:
        """:raises LNSError: some state was not finite, or there was no token."""
        if self.bad_state is not None:
            state = self.bad_state
            raise not_finite(
                f"block {state} is the first whose output" if state else "the input of block 1 (the embedding)"
            )
        if not self.tokens:
            raise LNSError("no token was selected on any rank: expected at least one real token")
        return self.total / self.tokens
