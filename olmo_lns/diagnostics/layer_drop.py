"""What removing one block costs, without fine-tuning.

The block is bypassed where it stands: its input becomes its output. The other blocks keep their place
and so their layer numbers: taking a block out of the list would shift every later LNS factor.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Iterator, Sequence

import torch
from torch import nn

from olmo_lns.diagnostics.capture import Batches, block_input, first_tensor, run
from olmo_lns.diagnostics.loss import token_loss
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

    def rows(self) -> list[dict[str, Any]]:
        """A row per removed block; block 0 is the whole model."""
        whole = {"block": 0, **self._loss_columns(self.baseline_loss, None)}
        rows = [whole] + [
            {"block": i, **self._loss_columns(loss, stderr)}
            for i, (loss, stderr) in enumerate(zip(self.loss, self.loss_stderr, strict=True), start=1)
        ]
        for name, task in self.tasks.items():
            scores, stderrs = [task.baseline, *task.without], [task.baseline_stderr, *task.without_stderr]
            for row, score, stderr in zip(rows, scores, stderrs, strict=True):
                row[f"{name}:{task.metric}"], row[f"{name}:stderr"] = score, stderr
                row[f"{name}:drop"] = task.baseline - score
        return rows

    def _loss_columns(self, loss: float, stderr: float | None) -> dict[str, Any]:
        return {
            "loss": loss,
            "perplexity": perplexity(loss),
            "loss_increase": loss - self.baseline_loss,
            "loss_increase_stderr": stderr,
        }


def perplexity(loss: float) -> float:
    """exp(loss), capped where a float ends (a removed block can ruin a model completely)."""
    return math.exp(min(loss, 700.0))


@contextmanager
def output_lengths(blocks: Sequence[nn.Module]) -> Iterator[list[int]]:
    """The length of the tuple that each block returns (0 = a bare tensor), filled in by what runs inside.

    :raises LNSError: a block did not run: what it costs to remove cannot be asked of this data.
    """
    lengths = [-1] * len(blocks)

    def hook(index: int, output: Any) -> None:
        first_tensor(output)  # raises on anything else
        lengths[index] = 0 if isinstance(output, torch.Tensor) else len(output)

    handles = [
        block.register_forward_hook(lambda _, __, output, index=index: hook(index, output))
        for index, block in enumerate(blocks)
    ]
    try:
        yield lengths
    finally:
        for handle in handles:
            handle.remove()
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


class _PairedLoss:
    """Sums over sequences from which means and paired standard errors follow; constant memory."""

    def __init__(self, models: int) -> None:
        self.nll = torch.zeros(models, dtype=torch.float64)
        self.d2, self.dn = torch.zeros_like(self.nll), torch.zeros_like(self.nll)
        self.n = self.n2 = self.sequences = 0.0

    def add(self, nll: torch.Tensor, count: torch.Tensor) -> None:
        """``nll`` (models, sequences) summed over each sequence's ``count`` (sequences,) tokens."""
        difference = nll - nll[:1]
        self.nll += nll.sum(1)
        self.d2 += (difference**2).sum(1)
        self.dn += (difference * count).sum(1)
        self.n += float(count.sum())
        self.n2 += float((count**2).sum())
        self.sequences += float((count > 0).sum())

    def stderr(self) -> list[float | None]:
        """Of the ratio sum(d) / sum(n), by its linearisation; None for a single sequence."""
        if self.sequences < 2:
            return [None] * (len(self.nll) - 1)
        ratio = (self.nll - self.nll[0]) / self.n
        squares = (self.d2 - 2 * ratio * self.dn + ratio**2 * self.n2).clamp_min(0)
        small = self.sequences / (self.sequences - 1)
        return ((squares * small).sqrt() / self.n)[1:].tolist()


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
    ``mask_token`` is for encoders (see :mod:`.loss`).
    :raises LNSError: no token, or a loss that is not finite.
    """
    blocks = find_blocks(model) if blocks is None else blocks
    loss, sums = token_loss(model, mask_token), _PairedLoss(len(blocks) + 1)
    lengths: list[int] = []

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
        sums.add(torch.stack(rows), valid.sum(1).double().cpu())

    images = is_vision_language(getattr(model, "config", None))
    for _ in run(model, batches, device, one_batch, with_images=images):
        pass
    if not sums.n:
        raise LNSError("the data holds no token to predict: sequences need at least two tokens")
    mean = (sums.nll / sums.n).tolist()
    return LayerDropResult(mean[0], mean[1:], sums.stderr(), int(sums.n))


def _per_sequence(nll: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    return nll.masked_fill(~valid.to(nll.device), 0).sum(1).double().cpu()
