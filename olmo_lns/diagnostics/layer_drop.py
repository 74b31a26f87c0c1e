"""What removing one block costs, without fine-tuning.

The block is bypassed where it stands: its input becomes its output. The other blocks keep their place
and so their layer numbers: taking a block out of the list would shift every later LNS factor.
"""

from __future__ import annotations

import math
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Iterator, Sequence

import torch
from torch import nn

from olmo_lns.diagnostics.capture import Batches, block_input, by_block, first_tensor, run, token_loss
from olmo_lns.errors import LNSError
from olmo_lns.models.blocks import body_forward, find_blocks, is_vision_language

__all__ = ["LayerDropResult", "TaskScores", "bypassed", "drop_layers", "output_lengths"]


@dataclass(frozen=True)
class TaskScores:
    """One metric of one evaluation task: of the whole model and without each block, block 1 first."""

    metric: str
    baseline: float
    baseline_stderr: float | None
    without: list[float]
    without_stderr: list[float | None]

    @property
    def drop(self) -> list[float]:
        """Performance drop, score of the whole model minus score without the block."""
        return [self.baseline - score for score in self.without]


@dataclass(frozen=True)
class LayerDropResult:
    """Losses in nats per token, block 1 first.

    :param loss_stderr: standard error of (loss without the block - loss), sequences being the paired samples.
    :param tokens: predicted tokens. :param tasks: scores by task name.
    """

    baseline_loss: float
    loss: list[float]
    loss_stderr: list[float | None]
    tokens: int
    tasks: dict[str, TaskScores] = field(default_factory=dict)

    @property
    def increase(self) -> list[float]:
        """Loss without the block minus loss of the whole model."""
        return [loss - self.baseline_loss for loss in self.loss]

    def frame(self) -> Any:
        """A pandas table with a row per removed block; block 0 is the whole model."""
        losses = [self.baseline_loss, *self.loss]
        columns: dict[str, Any] = {
            "loss": losses,
            "perplexity": [math.exp(min(loss, 700.0)) for loss in losses],  # a removed block can ruin a model
            "loss_increase": [0.0, *self.increase],
            "loss_increase_stderr": [None, *self.loss_stderr],
        }
        for name, task in self.tasks.items():
            columns[f"{name}:{task.metric}"] = [task.baseline, *task.without]
            columns[f"{name}:stderr"] = [task.baseline_stderr, *task.without_stderr]
            columns[f"{name}:drop"] = [0.0, *task.drop]
        return by_block(columns, first=0)


@contextmanager
def output_lengths(blocks: Sequence[nn.Module]) -> Iterator[list[int]]:
    """The length of the tuple that each block returns (0 = a bare tensor), filled in by what runs inside.

    :raises LNSError: a block did not run: what it costs to remove cannot be asked of this data.
    """
    lengths = [-1] * len(blocks)

    def hook(index: int, output: Any) -> None:
        first_tensor(output)  # raises on anything else
        lengths[index] = 0 if isinstance(output, torch.Tensor) else len(output)

    with ExitStack() as stack:
        for index, block in enumerate(blocks):
            handle = block.register_forward_hook(lambda _, __, output, index=index: hook(index, output))
            stack.callback(handle.remove)
        yield lengths
    if -1 in lengths:
        raise LNSError(
            f"block {lengths.index(-1) + 1} did not run on this data: the vision branch of a model runs on records "
            "with an image (see --image-field) only"
        )


@contextmanager
def bypassed(block: nn.Module, length: int) -> Iterator[None]:
    """Inside, ``block`` returns its input, as a tensor (``length`` 0) or at the head of a tuple of Nones."""

    def identity(*args: Any, **kwargs: Any) -> Any:
        hidden = block_input(args, kwargs)
        return (hidden, *[None] * (length - 1)) if length else hidden

    own = block.__dict__.get("forward")  # accelerate puts its hook of a device_map there
    block.forward = identity
    try:
        yield
    finally:
        del block.forward
        if own is not None:
            block.forward = own


def drop_layers(
    model: nn.Module,
    blocks: Sequence[nn.Module] | None,
    batches: Batches,
    device: torch.device | str = "cpu",
    *,
    mask_token: int | None = None,
) -> LayerDropResult:
    """Loss on ``batches`` of the whole model and without each block in turn, in one pass over the data.

    Costs L + 1 forward passes a batch. Parameters as in ``block_output_variance``;
    ``mask_token`` is for encoders (see :func:`~olmo_lns.diagnostics.capture.token_loss`).

    :raises LNSError: no token, or a loss that is not finite.

    Example: ``drop_layers(model, None, [torch.arange(64)[None]]).loss`` has one number per removed block.
    """
    blocks = find_blocks(model) if blocks is None else blocks
    loss = token_loss(model, mask_token)
    lengths: list[int] = []
    sums: list[torch.Tensor] = []  # of each sequence: (models, sequences); and its number of tokens
    counts: list[torch.Tensor] = []

    def one_batch(ids: torch.Tensor, mask: torch.Tensor | None, **pictures: torch.Tensor) -> None:
        if not lengths:
            with output_lengths(blocks) as found, torch.no_grad():
                body_forward(model)(ids if pictures else ids[:1], None, **pictures)
            lengths.extend(found)
        nll, valid = loss(ids, mask, **pictures)
        rows = [_per_sequence(nll, valid)]
        if not bool(torch.isfinite(rows[0]).all()):
            raise LNSError("the loss of the whole model is not finite: run `olmo-lns analyze variance` to see where")
        for number, (block, length) in enumerate(zip(blocks, lengths, strict=True), start=1):
            with bypassed(block, length):
                rows.append(_per_sequence(*loss(ids, mask, **pictures)))
            if not bool(torch.isfinite(rows[-1]).all()):
                raise LNSError(f"the loss without block {number} is not finite: try --dtype fp32 or bf16")
        sums.append(torch.stack(rows))
        counts.append(valid.sum(1).double().cpu())

    images = is_vision_language(getattr(model, "config", None))
    for _ in run(model, batches, device, one_batch, with_images=images):
        pass
    count = torch.cat(counts)
    if not (tokens := int(count.sum())):
        raise LNSError("the data holds no token to predict: sequences need at least two tokens")
    nll = torch.cat(sums, dim=1)
    mean = (nll.sum(1) / tokens).tolist()
    return LayerDropResult(mean[0], mean[1:], _paired_stderr(nll[1:] - nll[0], count), tokens)


def _per_sequence(nll: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    return nll.masked_fill(~valid.to(nll.device), 0).sum(1).double().cpu()


def _paired_stderr(difference: torch.Tensor, count: torch.Tensor) -> list[float | None]:
    """Of the ratio sum(difference) / sum(count) over sequences, by its linearisation; None for a single sequence.

    :param difference: (blocks, sequences). :param count: (sequences,) tokens.
    """
    if (sequences := int((count > 0).sum())) < 2:
        return [None] * len(difference)
    ratio = difference.sum(1, keepdim=True) / count.sum()
    squares = ((difference - ratio * count) ** 2).sum(1)
    stderr: list[float | None] = ((squares * sequences / (sequences - 1)).sqrt() / count.sum()).tolist()
    return stderr
