"""The cost of removing one block without fine-tuning, in loss and in scores of lm-evaluation-harness tasks.

The block is bypassed in place: its input becomes its output. The other blocks keep their layer numbers.
Removing a block from the list would shift every later LNS factor.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Iterator, Sequence
from unittest import mock

import torch
from torch import nn

from olmo_lns.diagnostics.capture import Batches, block_input, first_tensor, run, token_loss
from olmo_lns.diagnostics.results import Measurement
from olmo_lns.diagnostics.structure import find_blocks
from olmo_lns.errors import LNSError


@contextmanager
def bypassed(block: nn.Module) -> Iterator[None]:
    """Make ``block`` return its input; the block still runs, to fill its slot of a key-value cache.

    :raises LNSError: the block did not run on this data.
    """
    ran = False

    def give_input(_: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        nonlocal ran
        ran = True
        first_tensor(output)  # raises for an unknown output
        hidden = block_input(args, kwargs)
        return hidden if isinstance(output, torch.Tensor) else (hidden, *output[1:])

    handle = block.register_forward_hook(give_input, with_kwargs=True)
    try:
        with mock.patch.object(block, "_compiled_call_impl", None):  # compiled code ignores a later hook
            yield
    finally:
        handle.remove()
    if not ran:
        raise LNSError("a block did not run on this data: give data that runs every block")


def drop_layers(
    model: nn.Module,
    blocks: Sequence[nn.Module] | None,
    batches: Batches,
    device: torch.device | str = "cpu",
) -> Measurement:
    """Measure the loss on ``batches`` of the whole model and without each block, in one pass over the data.

    Costs L + 1 forward passes per batch. Parameters as in ``block_output_variance``.
    The result's columns, in nats per token: ``loss`` without the block, its ``increase`` over the detail
    ``baseline_loss``, and the ``increase_stderr`` with the sequences as paired samples. ``tokens`` are predicted ones.

    :raises LNSError: no token, or a loss that is not finite.

    Example: ``drop_layers(model, None, [torch.arange(64)[None]]).blocks["loss"]`` has one number per removed block.
    """
    blocks = find_blocks(model) if blocks is None else blocks
    loss = token_loss(model)
    sums: list[torch.Tensor] = []  # losses by sequence, (models, sequences); and the sequences' numbers of tokens
    counts: list[torch.Tensor] = []

    def one_batch(ids: torch.Tensor, mask: torch.Tensor | None) -> None:
        nll, valid = loss(ids, mask)
        rows = [_per_sequence(nll, valid)]
        if not bool(torch.isfinite(rows[0]).all()):
            raise LNSError("the whole model's loss is not finite: `olmo-lns analyze variance` names the block")
        for number, block in enumerate(blocks, start=1):
            with bypassed(block):
                rows.append(_per_sequence(*loss(ids, mask)))
            if not bool(torch.isfinite(rows[-1]).all()):
                raise LNSError(f"the loss without block {number} is not finite: try --dtype fp32 or bf16")
        sums.append(torch.stack(rows))
        counts.append(valid.sum(1).double().cpu())

    for _ in run(model, batches, device, one_batch):
        pass
    count = torch.cat(counts)
    if not (tokens := int(count.sum())):
        raise LNSError("the data has no token to predict: give sequences of at least two tokens")
    nll = torch.cat(sums, dim=1)
    baseline, *losses = (nll.sum(1) / tokens).tolist()
    columns = {
        "loss": losses,
        "increase": [loss - baseline for loss in losses],
        "increase_stderr": _paired_stderr(nll[1:] - nll[0], count),
    }
    return Measurement("layer-drop", tokens, columns, {"baseline_loss": baseline})


def _per_sequence(nll: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    return nll.masked_fill(~valid, 0).sum(1).double().cpu()


def _paired_stderr(difference: torch.Tensor, count: torch.Tensor) -> list[float | None]:
    """Return the standard error of sum(difference) / sum(count), by linearisation; None for a single sequence.

    :param difference: (blocks, sequences). :param count: (sequences,) tokens.
    """
    if (sequences := int((count > 0).sum())) < 2:
        return [None] * len(difference)
    ratio = difference.sum(1, keepdim=True) / count.sum()
    squares = ((difference - ratio * count) ** 2).sum(1)
    stderr: list[float | None] = ((squares * sequences / (sequences - 1)).sqrt() / count.sum()).tolist()
    return stderr
