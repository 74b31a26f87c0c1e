"""Find the transformer blocks of a model, and run its body."""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch import nn

from olmo_lns.errors import LNSError

#: Encoders whose loss is that of masked tokens, not of the next one.
MASKED = ("bert", "distilbert", "modernbert", "roberta")
_LISTS = (nn.ModuleList, nn.ModuleDict)
#: A function of ids and mask.
Forward = Callable[[torch.Tensor, torch.Tensor | None], Any]


def is_olmo_model(model: nn.Module) -> bool:
    """Tell OLMo's own model class, without importing OLMo."""
    return any(c.__module__ == "olmo.model" and c.__name__ == "OLMo" for c in type(model).__mro__)


def model_type(model: nn.Module) -> str | None:
    """Hugging Face's ``config.model_type``, or None for other models."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    return kind if isinstance(kind, str) and hasattr(model, "base_model") else None


def is_masked_lm(kind: str | None) -> bool:
    """Tell a ``model_type`` of :data:`MASKED`, under a scheme or not."""
    return (kind or "").removeprefix("lns_") in MASKED


def find_blocks(model: nn.Module, path: str | None = None) -> list[nn.Module]:
    """Return the transformer blocks of ``model`` in order; block ``l`` of the papers is element ``l - 1``.

    They are the one outermost list of at least two modules of one class. OLMo's block groups count as their blocks,
    under FSDP too.

    :param path: dotted path of the list inside ``model``, when it is known.
    :raises LNSError: not found, or not sure which: the candidates are listed; or a single block.
    """
    candidates, found = _candidates(model), list[nn.Module]()
    if path is not None:
        found = [module for name, module in model.named_modules() if name == path and isinstance(module, _LISTS)]
    else:
        found = list(candidates.values())
    if len(found) != 1:
        where = "not sure which holds the blocks, name it with --blocks" if path is None else f"none at {path!r}"
        members = {name: list(module.children()) for name, module in candidates.items()}
        lists = [f"{name} ({len(m)} x {type(m[0]).__name__})" for name, m in members.items()]
        raise LNSError(
            f"{type(model).__name__} has no list of blocks: {where}. Candidates: "
            f"{', '.join(lists) or 'no list of two or more modules of one class'}"
        )
    inner = [getattr(block, "_fsdp_wrapped_module", block) for block in found[0].children()]
    groups = [list(each.children()) if isinstance(each, _LISTS) else [] for each in inner]
    blocks = [block for group in groups for block in group] if any(groups) else list(found[0].children())
    if len(blocks) < 2:
        raise LNSError(
            f"{type(model).__name__} has {len(blocks)} transformer block: expected at least 2, "
            "because every diagnostic here compares the layers of one model"
        )
    return blocks


def is_olmo_core_model(model: nn.Module) -> bool:
    """Tell OLMo-core's model, which numbers its blocks in a ModuleDict."""
    return isinstance(getattr(model, "blocks", None), nn.ModuleDict) and hasattr(model, "lm_head")


def _candidates(model: nn.Module) -> dict[str, nn.Module]:
    """Lists of at least two modules of one class, outermost only (a block's own lists do not count)."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if not isinstance(module, _LISTS) or any(name.startswith(f"{outer}.") for outer in found):
            continue
        blocks = list(module.children())
        if len(blocks) > 1 and len({type(block) for block in blocks}) == 1:
            found[name] = module
    return found


def body_forward(model: nn.Module) -> Forward:
    """Return a function that runs all blocks on ids and mask, without the head where the model allows it."""
    if is_olmo_model(model):
        return lambda ids, mask: model(ids, attention_mask=mask, last_logits_only=True)
    if is_olmo_core_model(model):
        return lambda ids, mask: _without_mask(model, ids, mask, logits_to_keep=1)
    if model_type(model) is not None:
        base: Any = model.base_model
        return lambda ids, mask: base(ids, attention_mask=mask, use_cache=False)
    return lambda ids, mask: model(ids) if mask is None else model(ids, attention_mask=mask)


def logits_of(model: nn.Module) -> Forward:
    """Return a function from ids and mask to logits of shape (batch, sequence, vocabulary)."""
    cached: dict[str, Any] = {"use_cache": False} if model_type(model) is not None else {}
    if is_olmo_core_model(model):
        return lambda ids, mask: _without_mask(model, ids, mask)

    def forward(ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        output = model(ids, attention_mask=mask, **cached) if mask is not None else model(ids, **cached)
        logits = output if isinstance(output, torch.Tensor) else getattr(output, "logits", None)
        if not isinstance(logits, torch.Tensor):
            raise LNSError(f"{type(model).__name__} returns no logits: this diagnostic needs a language-model head")
        return logits

    return forward


def _without_mask(model: nn.Module, ids: torch.Tensor, mask: torch.Tensor | None, **kwargs: Any) -> torch.Tensor:
    """Run OLMo-core's model, which ignores keywords that it doesn't know, a mask among them."""
    if mask is not None and not bool(mask.all()):
        raise LNSError("OLMo-core's models take no attention mask: give sequences of one length")
    logits: torch.Tensor = model(ids, **kwargs)
    return logits


def vocabulary_size(model: nn.Module) -> int:
    """Number of token ids the model was made for (padding rows of its embedding do not count)."""
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    if isinstance(size, int):
        return size
    embeddings = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
    if not embeddings:
        raise LNSError(f"{type(model).__name__} has no token embedding: expected a language model")
    return max(embeddings)
