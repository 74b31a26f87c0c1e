"""The loss by which layer removal and gradients are measured."""

from __future__ import annotations

from typing import Any, Callable

import torch
import torch.nn.functional as F
from torch import nn

from olmo_lns.errors import LNSError
from olmo_lns.models.blocks import image_token, is_masked_lm, logits_of, model_type

__all__ = ["TokenLoss", "token_loss"]

#: Ids and mask (and a vision-language model's images, by keyword) -> negative log-likelihood in nats
#: (batch, positions), float32, and which positions count.
TokenLoss = Callable[..., tuple[torch.Tensor, torch.Tensor]]
#: An encoder predicts every seventh token (14 %, BERT's share), replaced by its mask token: no random draw,
#: so that all layers are judged on the same positions.
MASK_EVERY = 7


def token_loss(model: nn.Module, mask_token: int | None = None) -> TokenLoss:
    """Next-token loss of a decoder, or masked-token loss of an encoder (BERT).

    The placeholders of an image are no text: a vision-language model is not asked to predict them.

    :param mask_token: id of an encoder's mask token.
    :raises LNSError: an encoder without ``mask_token``.
    """
    logits, placeholder = logits_of(model), image_token(model)

    def next_token(ids: torch.Tensor, mask: torch.Tensor | None, **pictures: Any) -> tuple[torch.Tensor, torch.Tensor]:
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
        valid = real[:, 1:] & real[:, :-1]
        if placeholder is not None:
            valid = valid & (ids[:, 1:] != placeholder)
        return _nll(logits(ids, mask, **pictures)[:, :-1], ids[:, 1:]), valid

    def masked_token(ids: torch.Tensor, mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
        chosen = real & (torch.arange(ids.shape[1], device=ids.device) % MASK_EVERY == MASK_EVERY // 2)
        assert mask_token is not None
        return _nll(logits(ids.masked_fill(chosen, mask_token), mask), ids), chosen

    if not is_masked_lm(model_type(model)):
        return next_token
    if mask_token is None:
        raise LNSError(
            f"{type(model).__name__} predicts masked tokens: the id of its mask token is needed; "
            "give its tokenizer with --tokenizer"
        )
    return masked_token


def _nll(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    targets = targets.to(logits.device)
    # One sequence at a time: float32 logits of a whole batch can be larger than the model.
    return torch.stack([F.cross_entropy(x.float(), y, reduction="none") for x, y in zip(logits, targets, strict=True)])
