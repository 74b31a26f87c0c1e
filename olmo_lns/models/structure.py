"""Where transformer blocks live, and how to run a model's body."""

from __future__ import annotations

import operator
from typing import Any, Callable, cast

import torch
from torch import nn

from olmo_lns.errors import LNSError

#: Encoders whose loss is that of masked tokens, not of the next one.
MASKED = ("bert", "distilbert", "modernbert", "roberta")
#: Of ids and mask.
Forward = Callable[[torch.Tensor, torch.Tensor | None], Any]


def is_olmo_model(model: nn.Module) -> bool:
    """Whether this is OLMo's own model class, told without importing OLMo."""
    return any(c.__module__ == "olmo.model" and c.__name__ == "OLMo" for c in type(model).__mro__)


def model_type(model: nn.Module) -> str | None:
    """Hugging Face's ``config.model_type``, or None for other models."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    return kind if isinstance(kind, str) and hasattr(model, "base_model") else None


def is_masked_lm(kind: str | None) -> bool:
    """Whether a ``model_type`` is one of :data:`MASKED`, under a scheme or not."""
    return (kind or "").removeprefix("lns_") in MASKED


def find_blocks(model: nn.Module, path: str | None = None) -> list[nn.Module]:
    """The transformer blocks of ``model`` in order; block ``l`` of the papers is element ``l - 1``.

    OLMo's model (with block groups too, under FSDP too) and OLMo-core's are known; any other model must hold exactly
    one outermost list of at least two modules of one class.

    :param path: dotted path of the list inside ``model``, when it is known.
    :raises LNSError: not found, or not sure which: the candidates are listed; or a single block.
    """
    if path is not None:
        blocks = _at(model, path)
    elif is_olmo_model(model):
        blocks = _olmo_blocks(model)
    elif is_olmo_core_model(model):
        blocks = list(cast(nn.ModuleDict, model.blocks).values())
    else:
        blocks = _only(model, _candidates(model), "transformer blocks")
    if len(blocks) < 2:
        raise LNSError(
            f"{type(model).__name__} has {len(blocks)} transformer block: expected at least 2, "
            "because every diagnostic here compares the layers of one model"
        )
    return blocks


def is_olmo_core_model(model: nn.Module) -> bool:
    """Whether ``model`` is OLMo-core's: it numbers its blocks in a ModuleDict."""
    return isinstance(getattr(model, "blocks", None), nn.ModuleDict) and hasattr(model, "lm_head")


def _olmo_blocks(model: nn.Module) -> list[nn.Module]:
    transformer: Any = model.transformer
    if hasattr(transformer, "block_groups"):
        # FSDP may have wrapped a group; the blocks are inside.
        groups = [getattr(group, "_fsdp_wrapped_module", group) for group in transformer.block_groups]
        return [block for group in groups for block in group]
    return list(transformer.blocks)


def _at(model: nn.Module, path: str) -> list[nn.Module]:
    module = operator.attrgetter(path)(model) if path in dict(model.named_modules()) else None
    if not isinstance(module, nn.ModuleList):
        raise LNSError(
            f"{type(model).__name__} has no list of blocks at {path!r} (found {type(module).__name__}). "
            f"Candidates: {_described(model)}"
        )
    return list(module)


def _candidates(model: nn.Module) -> dict[str, nn.ModuleList]:
    """Lists of at least two modules of one class, outermost only (a block's own lists do not count)."""
    found: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or any(name.startswith(f"{outer}.") for outer in found):
            continue
        if len(module) > 1 and len({type(block) for block in module}) == 1:
            found[name] = module
    return found


def _only(model: nn.Module, lists: dict[str, nn.ModuleList], what: str) -> list[nn.Module]:
    if len(lists) != 1:
        raise LNSError(
            f"not sure where the {what} of {type(model).__name__} are; name them with --blocks. "
            f"Candidates: {_described(model)}"
        )
    return list(next(iter(lists.values())))


def _described(model: nn.Module) -> str:
    lists = [f"{name} ({len(m)} x {type(m[0]).__name__})" for name, m in _candidates(model).items()]
    return ", ".join(lists) or "none: no list of two or more modules of one class"


def body_forward(model: nn.Module) -> Forward:
    """A function that runs all blocks on ids and mask, without the head where the model allows it."""
    if is_olmo_model(model):
        return lambda ids, mask: model(ids, attention_mask=mask, last_logits_only=True)
    if is_olmo_core_model(model):
        return lambda ids, mask: _without_mask(model, ids, mask, logits_to_keep=1)
    if model_type(model) is not None:
        base: Any = model.base_model
        return lambda ids, mask: base(ids, attention_mask=mask, use_cache=False)
    return lambda ids, mask: model(ids) if mask is None else model(ids, attention_mask=mask)


def logits_of(model: nn.Module) -> Forward:
    """A function from ids and mask to logits of shape (batch, sequence, vocabulary)."""
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
    """OLMo-core takes any keyword in silence, a mask among them."""
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
