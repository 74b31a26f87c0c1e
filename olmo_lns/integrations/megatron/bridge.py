"""Megatron Bridge: what it reads of Megatron-LM keeps its scheme, and what it writes for stock classes must have none.

Its functions are looked at by name: nothing of their arithmetic is replaced. Its own checkpoints need nothing from
here, since their ``run_config.yaml`` has the fields of the config and their tensors the record (:mod:`.checkpoint`).
"""

from __future__ import annotations

import inspect
from typing import Any, Callable

from olmo_lns.errors import LNSConfigError
from olmo_lns.integrations import norm_sites
from olmo_lns.integrations.megatron.checkpoint import compare_built
from olmo_lns.integrations.megatron.settings import Settings, mark
from olmo_lns.record import Record

__all__ = ["exported", "imported", "saved_config"]


def saved_config(original: Callable[..., Any]) -> Callable[..., Any]:
    """The config of a checkpoint of ``pretrain_gpt.py``, which copies fields of ``TransformerConfig`` alone."""

    def _transformer_config_from_args(args: Any, *rest: Any, **kwargs: Any) -> Any:
        config = original(args, *rest, **kwargs)
        if (settings := Settings.of(args)) != Settings():
            mark(config, settings)
        return config

    return _transformer_config_from_args


def exported(original: Callable[..., Any]) -> Callable[..., Any]:
    """The weights as they are, for a class of transformers that knows no factor."""
    signature = inspect.signature(original)

    def stream(*args: Any, **kwargs: Any) -> Any:
        for chunk in _chunks(signature.bind(*args, **kwargs).arguments["megatron_model"]):
            if not (scheme := norm_sites.read_back(chunk)).is_pre_ln:
                raise LNSConfigError(
                    f"Megatron Bridge writes this model's weights for a class without {scheme}: the result would run "
                    "as plain Pre-LN. Export the checkpoint with `olmo-lns export --format hf`, which folds it."
                )
        return original(*args, **kwargs)

    return stream


def imported(original: Callable[..., Any]) -> Callable[..., Any]:
    """Weights of transformers' classes are Pre-LN's: into a model with a scheme by permission only."""
    signature = inspect.signature(original)

    def load_weights_hf_to_megatron(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs).arguments
        for chunk in _chunks(call["megatron_model"]):
            name = getattr(call["hf_pretrained"], "model_name_or_path", "the Hugging Face model")
            compare_built(Record(), Record(norm_sites.read_back(chunk)), name)
        return original(*args, **kwargs)

    return load_weights_hf_to_megatron


def _chunks(model: Any) -> list[Any]:
    return list(model) if isinstance(model, (list, tuple)) else [model]
