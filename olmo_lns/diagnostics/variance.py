"""Layerwise output variance: the growth of the residual stream from block to block.

For a token ``t`` and the raw output ``h`` of a block with ``d`` features::

    mean_t = 1/d sum_i h_ti        variance_t = 1/d sum_i (h_ti - mean_t)^2

in float32. Each block has the mean of ``variance_t`` over all tokens, its standard deviation over tokens,
the RMS ``sqrt(mean h^2)`` and the largest ``|h|``. Sums over tokens are in float64: the order and number of
batches or ranks do not matter.
"""

from __future__ import annotations

from typing import Any, Sequence

import torch
import torch.distributed as dist
from torch import nn

from olmo_lns.diagnostics.capture import Batches, first_tensor, not_finite, run_observed
from olmo_lns.diagnostics.results import Measurement
from olmo_lns.diagnostics.structure import find_blocks
from olmo_lns.errors import LNSError


class Moments:
    """Running sums over the tokens of block outputs, in constant memory.

    One row per block: tokens, per-token variances, their squares, mean squares; and the largest absolute values. The
    rows stay on the block's device until they are read.
    """

    def __init__(self, blocks: int) -> None:
        self._sums = [torch.zeros(4, dtype=torch.float64) for _ in range(blocks)]
        self._largest = [torch.zeros((), dtype=torch.float64) for _ in range(blocks)]

    @torch.no_grad()
    def add(self, block: int, hidden: torch.Tensor, mask: torch.Tensor | None = None) -> None:
        """Add a block's output: (batch, sequence, d_model), any floating dtype; mask True = real token."""
        tokens = hidden.detach().flatten(0, -2)
        if mask is not None:
            tokens = tokens[mask.to(hidden.device).flatten()]
        if not tokens.numel():
            return
        tokens = tokens.float()
        mean = tokens.mean(dim=-1, keepdim=True)
        centred = tokens - mean  # var_mean is 5 times slower on a CPU
        variance = torch.linalg.vecdot(centred, centred) / tokens.shape[-1]
        low, high = tokens.aminmax()
        variance, mean = variance.double(), mean.squeeze(-1).double()
        rows = torch.stack([torch.ones_like(variance), variance, variance**2, variance + mean**2]).sum(dim=1)
        self._sums[block] = rows + self._sums[block].to(rows)
        self._largest[block] = torch.maximum(torch.maximum(-low, high), self._largest[block].to(rows))

    def pool_ranks(self) -> None:
        """Sum over all ranks if torch.distributed runs."""
        if dist.is_available() and dist.is_initialized():
            device = "cuda" if dist.get_backend() == "nccl" else "cpu"
            sums, largest = (torch.stack([row.to(device) for row in some]) for some in (self._sums, self._largest))
            dist.all_reduce(sums)
            dist.all_reduce(largest, dist.ReduceOp.MAX)
            self._sums, self._largest = list(sums), list(largest)

    def first_bad_block(self) -> int | None:
        """Return the 1-based number of the first block with NaN or infinite activations, or None."""
        rows = torch.stack([row.to(self._sums[0].device) for row in self._sums])  # one synchronisation for all blocks
        bad = (~torch.isfinite(rows).all(dim=1)).nonzero()
        return int(bad[0]) + 1 if len(bad) else None

    def result(self, *, check: bool = True) -> Measurement:
        """Return the result with the columns ``variance``, ``variance_std``, ``rms`` and ``max``.

        :param check: False returns NaN for blocks whose activations are not finite, instead of raising.
        :raises LNSError: no token, or activations that are not finite (the message names the first such block).
        """
        if check and (bad := self.first_bad_block()):
            raise not_finite(f"block {bad} is the first whose output")
        count, *sums = torch.stack([row.cpu() for row in self._sums]).T
        if len(empty := (count == 0).nonzero()):
            raise LNSError(f"block {int(empty[0]) + 1} saw no token: expected every block to run")
        variance, square, power = (total / count for total in sums)
        columns = {
            "variance": variance.tolist(),
            "variance_std": (square - variance**2).clamp_min(0).sqrt().tolist(),
            "rms": power.sqrt().tolist(),
            "max": [float(value) for value in self._largest],
        }
        return Measurement("variance", int(count[0]), columns)


def block_output_variance(
    model: nn.Module,
    blocks: Sequence[nn.Module] | None,
    batches: Batches,
    device: torch.device | str = "cpu",
) -> Measurement:
    """Measure the variance of every block's raw output over all tokens of ``batches``.

    :param blocks: the blocks in order; None finds them.
    :param batches: token ids (batch, sequence), or mappings with ``input_ids`` and an ``attention_mask``.
    :param device: device of the ids. The model keeps its device, dtype and mode.
    :raises LNSError: no token, or activations that are not finite (the message names the first such block).

    Example: ``block_output_variance(model, None, [torch.arange(64)[None]]).blocks["variance"]``.
    """
    blocks = find_blocks(model) if blocks is None else blocks
    moments = Moments(len(blocks))

    def add(block: int, _: Any, __: Any, output: Any, mask: torch.Tensor | None) -> None:
        moments.add(block, first_tensor(output), mask)

    for _ in run_observed(model, blocks, batches, device, add):
        if moments.first_bad_block():
            break
    return moments.result()
