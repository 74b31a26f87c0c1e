"""Angular distance between the states of the residual stream, for all pairs of layers in one pass.

State ``l`` (1-based) is the input of block ``l``, and state ``L + 1`` is the raw output of the last block. The distance
is that of the Curse of Depth paper (after Gromov et al., arXiv 2403.17887)::

    d(l, l + n) = mean over tokens of  arccos( cos(h_l, h_{l+n}) ) / pi      in [0, 1]

A block that changes nothing has distance 0. The cosine is computed in float64 and clamped. For nearly equal
states rounding can make it larger than 1, where arccos is NaN.
"""

from __future__ import annotations

import math
from typing import Sequence

import torch
from torch import nn

from olmo_lns.diagnostics.capture import Batches, find_blocks, run_observed
from olmo_lns.diagnostics.results import Measurement

#: Tokens per matrix product, to bound the float64 copy of the states.
CHUNK = 512


def pairwise_angles(states: torch.Tensor) -> torch.Tensor:
    """Return the angles between all states of each token, as a fraction of pi.

    :param states: (tokens, states, d_model), floating. The angle to a zero vector is 1/2.
    :returns: (tokens, states, states) in [0, 1], float64.
    """
    states = states.double()
    gram = torch.bmm(states, states.transpose(1, 2))
    norm = gram.diagonal(dim1=1, dim2=2).sqrt().clamp_min(torch.finfo(gram.dtype).tiny)
    cosine = gram / norm.unsqueeze(1) / norm.unsqueeze(2)
    return cosine.clamp_(-1.0, 1.0).arccos_().div_(math.pi)


def angular_distance(
    model: nn.Module,
    blocks: Sequence[nn.Module] | None,
    batches: Batches,
    device: torch.device | str = "cpu",
) -> Measurement:
    """Average d(l, l + n) over the tokens of ``batches`` for all pairs.

    The arguments are those of ``block_output_variance``. The result's column ``d<n>`` has d(l, l + n) for block l, or
    None if l + n is above L + 1. ``d1`` is the angle by which block l turns the residual stream.

    :raises LNSError: if the batches have no token, or states are not finite. The message names the blocks.

    Example: ``angular_distance(model, None, [torch.arange(64)[None]]).blocks["d1"]`` has one number per block.
    """
    blocks = find_blocks(model) if blocks is None else blocks
    count = len(blocks) + 1
    total, tokens = torch.zeros(count, count, dtype=torch.float64), 0
    for calls, mask in run_observed(model, blocks, batches, device):
        states = [state.flatten(0, -2) for state in (*(call.input for call in calls), calls[-1].output)]
        for chunk in mask.flatten().nonzero().squeeze(1).split(CHUNK):
            total += pairwise_angles(torch.stack([state[chunk] for state in states], dim=1)).sum(dim=0).cpu()
        tokens += int(mask.sum())
    mean = (total / tokens).tolist()
    columns = {f"d{n}": [mean[i][i + n] if i + n < count else None for i in range(count - 1)] for n in range(1, count)}
    return Measurement("angular", tokens, columns)
