"""Measure the output variance of each block, the growth of the residual stream from block to block.

For a token ``t`` and the raw output ``h`` of a block with ``d`` features::

    mean_t = 1/d sum_i h_ti        variance_t = 1/d sum_i (h_ti - mean_t)^2

in float32. The result has, for each block, the mean and the standard deviation of ``variance_t`` over all tokens,
the RMS ``sqrt(mean h^2)`` and the largest ``|h|``. Sums over tokens are in float64, so the order and number of
batches or ranks do not matter.
"""

from __future__ import annotations

from typing import Sequence

import torch
import torch.distributed as dist
from torch import nn

from olmo_lns.diagnostics.capture import (
    Batches,
    BlockCall,
    evaluation_batches,
    find_blocks,
    observe,
    require_all_ran,
    require_first_run,
    run_model,
)
from olmo_lns.diagnostics.results import Measurement


class Moments:
    """Running sums over the tokens of block outputs, in constant memory, on the device of the outputs.

    Each block has a row: the number of tokens, and the sums of the variances, of their squares and of the mean
    squares of the tokens. A second tensor has the largest absolute values.
    """

    def __init__(self, blocks: int) -> None:
        self._sums = torch.zeros(blocks, 4, dtype=torch.float64)
        self._largest = torch.zeros(blocks, dtype=torch.float64)

    @property
    def tokens(self) -> int:
        """Number of tokens in the sums of a block."""
        return int(self._sums[0, 0])

    @torch.no_grad()
    def add(self, block: int, hidden: torch.Tensor, mask: torch.Tensor | None = None) -> None:
        """Add a block's output, (batch, sequence, d_model) in any floating dtype. :param mask: 0 marks padding."""
        self._sums, self._largest = self._sums.to(hidden.device), self._largest.to(hidden.device)
        tokens = hidden.detach().flatten(0, -2)
        if mask is not None:
            tokens = tokens[mask.to(hidden.device).flatten().bool()]
        if not tokens.numel():
            return
        tokens = tokens.float()
        mean = tokens.mean(dim=-1, keepdim=True)
        centered = tokens - mean  # var_mean is 5 times slower on a CPU
        variance = torch.linalg.vecdot(centered, centered) / tokens.shape[-1]
        low, high = tokens.aminmax()
        variance, mean = variance.double(), mean.squeeze(-1).double()
        self._sums[block] += torch.stack([torch.ones_like(variance), variance, variance**2, variance + mean**2]).sum(1)
        self._largest[block] = torch.maximum(torch.maximum(-low, high), self._largest[block])

    def pool_ranks(self) -> None:
        """Sum over all ranks if torch.distributed is initialized."""
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(self._sums)
            dist.all_reduce(self._largest, dist.ReduceOp.MAX)

    def columns(self) -> dict[str, list[float]]:
        """Return ``variance``, ``variance_std``, ``rms`` and ``max`` of every block. A block without tokens has NaN."""
        count, *sums = self._sums.cpu().T
        variance, square, power = (total / count for total in sums)
        return {
            "variance": variance.tolist(),
            "variance_std": (square - variance**2).clamp_min(0).sqrt().tolist(),
            "rms": power.sqrt().tolist(),
            "max": self._largest.tolist(),
        }


def block_output_variance(
    model: nn.Module,
    blocks: Sequence[nn.Module] | None,
    batches: Batches,
    device: torch.device | str = "cpu",
) -> Measurement:
    """Measure the variance of every block's raw output over all tokens of ``batches``.

    :param blocks: the blocks in order; None detects them.
    :param batches: token ids (batch, sequence), or mappings with ``input_ids`` and an ``attention_mask``.
    :param device: device of the ids. The model keeps its device, dtype and mode.
    :raises LNSError: if the batches have no token, or the outputs of blocks are not finite. The message names the
        blocks.

    Example: ``block_output_variance(model, None, [torch.arange(64)[None]]).blocks["variance"]``.
    """
    blocks = find_blocks(model) if blocks is None else blocks
    moments = Moments(len(blocks))
    for ids, mask in evaluation_batches(model, batches, device):
        ran: set[int] = set()

        def add(block: int, call: BlockCall, mask: torch.Tensor = mask, ran: set[int] = ran) -> None:
            require_first_run(block, ran)
            ran.add(block)
            moments.add(block, call.output, mask)  # now: the outputs of all blocks may exceed the memory

        with observe(blocks, add), torch.no_grad():
            run_model(model, ids, mask, logits=False)
        require_all_ran(ran, len(blocks))
    return Measurement("variance", moments.tokens, moments.columns())
