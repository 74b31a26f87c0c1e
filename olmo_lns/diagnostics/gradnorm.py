"""Gradient norm per layer and kind of parameter (the Mix-LN paper's figure).

The gradient is that of the mean loss per token over all the data; norms are Euclidean, over all
parameters of a block (or of one kind in it). Parameters outside the blocks are listed by name.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Sequence

import torch
from torch import nn

from olmo_lns.diagnostics.capture import Batches, evaluating, token_loss, unpack
from olmo_lns.errors import LNSError
from olmo_lns.models.blocks import find_blocks

__all__ = ["KINDS", "GradNormResult", "gradient_norms", "kind_of"]

#: Kind -> pattern on a parameter's name inside its block, first match wins: norms before the part they sit in.
KINDS = {
    "norm": re.compile(r"norm|\bln_", re.IGNORECASE),
    "attention": re.compile(r"att|\b[qkv]_proj|\bq_a|\bkv_"),
    "mlp": re.compile(r"mlp|\bff|feed_forward|ffn|intermediate|^output\.|fc"),
}
OTHER = "other"


@dataclass(frozen=True)
class GradNormResult:
    """Per block (block 1 first): the total norm, by kind, and by parameter; outside: by parameter.

    :param loss: mean loss per token in nats. :param tokens: predicted tokens.
    """

    total: list[float]
    kinds: list[dict[str, float]]
    parameters: list[dict[str, float]]
    outside: dict[str, float]
    loss: float
    tokens: int

    def frame(self) -> Any:
        """A pandas table: a row per block and parameter (block 0 = outside the blocks); kinds, totals as own rows."""
        import pandas

        rows: list[tuple[Any, ...]] = []
        for block, (total, kinds, names) in enumerate(zip(self.total, self.kinds, self.parameters, strict=True), 1):
            rows.append((block, "all", "", total))
            rows += [(block, kind, "", norm) for kind, norm in kinds.items()]
            rows += [(block, kind_of(name), name, norm) for name, norm in names.items()]
        rows += [(0, "outside", name, norm) for name, norm in self.outside.items()]
        return pandas.DataFrame(rows, columns=["block", "kind", "parameter", "norm"])


def kind_of(name: str) -> str:
    """``norm``, ``attention``, ``mlp`` or ``other``, from a parameter's name inside its block."""
    return next((kind for kind, pattern in KINDS.items() if pattern.search(name)), OTHER)


def gradient_norms(
    model: nn.Module,
    blocks: Sequence[nn.Module] | None,
    batches: Batches,
    device: torch.device | str = "cpu",
    *,
    mask_token: int | None = None,
) -> GradNormResult:
    """Gradient norms of the mean loss over ``batches``; the model's own gradients are left untouched.

    Needs room for one gradient of every parameter, in its dtype. Dropout is off.

    :raises LNSError: no token to predict, a loss that is not finite, or a gradient (the deepest such block is named:
        from there the backward pass carries it to all before).
    """
    blocks = find_blocks(model) if blocks is None else blocks
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    kept = {name: p.grad for name, p in named.items()}
    loss_of = token_loss(model, mask_token)
    total, tokens, scale = 0.0, 0, 0
    try:
        for parameter in named.values():
            parameter.grad = None
        with evaluating(model), torch.enable_grad():
            for batch in batches:
                nll, valid = loss_of(*unpack(batch, device)[:2])
                count = int(valid.sum())
                scale = scale or count  # one divisor for all batches, so that sums do not overflow in fp16
                summed = nll.masked_fill(~valid.to(nll.device), 0).sum()
                if not bool(torch.isfinite(summed)):
                    raise LNSError(
                        "the loss is not finite: run `olmo-lns analyze variance` to see which block is first"
                    )
                if count:
                    (summed / scale).backward()
                total, tokens = total + float(summed.detach()), tokens + count
        if not tokens:
            raise LNSError("the data holds no token to predict: give sequences of at least two tokens")
        norms = {
            name: float(torch.linalg.vector_norm(p.grad.float())) * scale / tokens if p.grad is not None else 0.0
            for name, p in named.items()
        }
    finally:
        for name, parameter in named.items():
            parameter.grad = kept[name]
    return _by_block(model, blocks, norms, total / tokens, tokens)


def _by_block(
    model: nn.Module, blocks: Sequence[nn.Module], norms: dict[str, float], loss: float, tokens: int
) -> GradNormResult:
    names = {parameter: name for name, parameter in model.named_parameters()}
    parameters: list[dict[str, float]] = []
    inside: set[str] = set()
    for block in blocks:
        own = {local: names[p] for local, p in block.named_parameters() if names[p] in norms}
        inside.update(own.values())
        parameters.append({local: norms[name] for local, name in own.items()})
    bad = [i for i, block in enumerate(parameters, start=1) if not all(map(math.isfinite, block.values()))]
    if bad:
        raise LNSError(
            f"block {bad[-1]} is the deepest of {len(bad)} whose gradient holds NaN or infinity, and the backward pass "
            "carries it to those before: try fp32 or bf16"
        )
    kinds: list[dict[str, float]] = []
    for found in parameters:
        parts = {kind: [n for p, n in found.items() if kind_of(p) == kind] for kind in (*KINDS, OTHER)}
        kinds.append({kind: math.hypot(*some) for kind, some in parts.items() if some})
    return GradNormResult(
        total=[math.hypot(*block.values()) for block in parameters],
        kinds=kinds,
        parameters=parameters,
        outside={name: n for name, n in norms.items() if name not in inside},
        loss=loss,
        tokens=tokens,
    )
