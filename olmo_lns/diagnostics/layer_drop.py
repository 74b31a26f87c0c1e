"""Measure the loss increase from removing one block without fine-tuning.

The block is bypassed in place, so its input becomes its output. It is not deleted from the list of blocks. The other
blocks therefore keep their numbers, and with the numbers their factors.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Iterator, Sequence

import torch
from torch import nn

from olmo_lns.diagnostics.capture import (
    Batches,
    BlockCall,
    evaluation_batches,
    find_blocks,
    observe,
    require_finite,
    sequence_losses,
)
from olmo_lns.diagnostics.results import Measurement
from olmo_lns.errors import LNSError


@contextmanager
def bypassed(block: nn.Module) -> Iterator[None]:
    """Make ``block`` return its input. The block still runs, to fill its slot of a key-value cache.

    :raises LNSError: if the block did not run on this data.
    """
    ran = False

    def return_input(_: int, call: BlockCall) -> Any:
        nonlocal ran
        ran = True
        return call.input if call.output is call.returned else (call.input, *call.returned[1:])

    with observe([block], return_input):
        yield
    if not ran:
        raise LNSError("A block did not run on these data. Every block must run. Pass data that all blocks read.")


@torch.no_grad()
def drop_layers(
    model: nn.Module,
    blocks: Sequence[nn.Module] | None,
    batches: Batches,
    device: torch.device | str = "cpu",
) -> Measurement:
    """Measure the loss on ``batches`` of the whole model and without each block, in one pass over the data.

    Needs L + 1 forward passes per batch. Parameters as in ``block_output_variance``.
    The columns of the result, in nats per token: ``loss`` without the block, its ``increase`` over the detail
    ``baseline_loss``, and ``increase_stderr``, for sequences as paired samples. ``tokens`` counts predicted tokens.

    :raises LNSError: if the batches have no token, or a loss is not finite.

    Example: ``drop_layers(model, None, [torch.arange(64)[None]]).blocks["loss"]`` has one number per removed block.
    """
    blocks = find_blocks(model) if blocks is None else blocks
    losses: list[torch.Tensor] = []  # one per batch: (1 + blocks, sequences), the whole model first
    counts: list[torch.Tensor] = []  # one per batch: predicted tokens of each sequence
    for ids, mask in evaluation_batches(model, batches, device):
        model_losses, count = sequence_losses(model, ids, mask)
        require_finite(model_losses)
        rows = [model_losses]
        for block in blocks:
            with bypassed(block):
                rows.append(sequence_losses(model, ids, mask)[0])
        losses.append(torch.stack(rows).double().cpu())
        counts.append(count.double().cpu())
    count, nll = torch.cat(counts), torch.cat(losses, dim=1)
    tokens = int(count.sum())
    if tokens == 0:
        raise LNSError("The data have no token to predict. Pass sequences of at least two tokens.")
    baseline, *loss_without = (nll.sum(1) / tokens).tolist()
    columns = {
        "loss": loss_without,
        "increase": [loss - baseline for loss in loss_without],
        "increase_stderr": _paired_stderr(nll[1:] - nll[0], count),
    }
    return Measurement("layer-drop", tokens, columns, {"baseline_loss": baseline})


def _paired_stderr(difference: torch.Tensor, count: torch.Tensor) -> list[float | None]:
    """Return the standard error of sum(difference) / sum(count), by linearization, or None for a single sequence.

    :param difference: (blocks, sequences). :param count: (sequences,) tokens.
    """
    if (sequences := int((count > 0).sum())) < 2:
        return [None] * len(difference)
    ratio = difference.sum(1, keepdim=True) / count.sum()
    squares = ((difference - ratio * count) ** 2).sum(1)
    stderr: list[float | None] = ((squares * sequences / (sequences - 1)).sqrt() / count.sum()).tolist()
    return stderr
