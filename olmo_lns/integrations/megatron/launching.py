"""Wrappers around ``megatron.training``: flags, config, the built model."""

from __future__ import annotations

import argparse
import functools
from typing import Any, Callable

from olmo_lns.errors import LNSConfigError
from olmo_lns.integrations import norm_sites
from olmo_lns.integrations.megatron.building import describe, say, use_plain_initialization
from olmo_lns.integrations.megatron.layers import check_scheme, count_sites
from olmo_lns.integrations.megatron.settings import Settings, add_flags, mark
from olmo_lns.integrations.megatron.upstream import CORE, TRAINING
from olmo_lns.integrations.patching import require_verified
from olmo_lns.schemes import PRE_LN

__all__ = ["add_arguments", "config_from_args", "model_built"]


def add_arguments(original: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's own options, then ours."""

    def add_megatron_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        return add_flags(original(parser))

    return add_megatron_arguments


def config_from_args(original: Callable[..., Any]) -> Callable[..., Any]:
    """Mark the config with the settings of the arguments and choose the initialization."""

    def core_transformer_config_from_args(args: Any, config_class: type | None = None) -> Any:
        config = original(args, config_class)
        settings = Settings.of(args).check()
        if settings == Settings():
            return config
        require_verified(CORE, TRAINING)
        check_scheme(settings.scheme, int(config.num_layers))
        mark(config, settings)
        settings.store(args)  # with the exponent spelled out, for the checkpoint
        if settings.scaled_init_off:
            use_plain_initialization(config)
            if not settings.active:  # otherwise part of the start-up line
                say(describe(config, off=True))
        return config

    return core_transformer_config_from_args


def model_built(original: Callable[..., Any]) -> Callable[..., Any]:
    """After a model is finished: it has the scheme that the arguments say, and they say the scheme that it has."""

    @functools.wraps(original)
    def build(*args: Any, **kwargs: Any) -> Any:
        from megatron.training.global_vars import get_args

        result = original(*args, **kwargs)
        model = result[0] if isinstance(result, tuple) else result
        chunks = model if isinstance(model, list) else [model]
        if (settings := Settings.of(get_args())).active:
            _require_sites(chunks, settings)
        else:
            _take_over(get_args(), chunks)
        return result

    return build


def _take_over(args: Any, chunks: list[Any]) -> None:
    """What the model's provider laid on it by ``apply`` goes into the arguments, by which a checkpoint is compared.

    :raises LNSConfigError: two schemes, or one that is in no block.
    """
    # From the configs: a pipeline stage without a layer has no site, and its arguments are compared all the same.
    configs = [module.config for chunk in chunks for module in chunk.modules() if hasattr(module, "config")]
    applied = {_of_built(config) for config in configs if Settings.of(config).active}
    if len(applied) > 1:
        raise LNSConfigError(
            f"one model with {' and '.join(sorted(str(each.record()) for each in applied))}, by apply(): its "
            "checkpoints can name one of them. Apply the same scheme everywhere, in the same way."
        )
    for settings in applied:
        _require_sites(chunks, settings)
        settings.store(args)
        say(f"{settings.flag}: not given but applied to the model; checkpoints of this run name it")


def _of_built(config: Any) -> Settings:
    """The settings of a config as its model was drawn: ``apply`` on a built model comes after the initialization."""
    plain = config.output_layer_init_method is config.init_method
    return Settings.of_scheme(Settings.of(config).scheme, keep_scaled_init=not plain)


def _require_sites(chunks: list[Any], settings: Settings) -> None:
    """:raises LNSConfigError: no block of this process's part of the model has the scheme, or it has another.

    What a checkpoint will say of itself is what the arguments say: here the built model is held to them.
    """
    for chunk in chunks:
        if (found := norm_sites.read_back(chunk)) not in (settings.scheme, PRE_LN):
            raise LNSConfigError(f"{settings.scheme} was asked for, but the model was built with {found}.")
    if any(count_sites(chunk) or _has_empty_stack(chunk) for chunk in chunks):
        return
    inner = chunks[0]
    while hasattr(inner, "module"):  # DDP, Float16Module
        inner = inner.module
    kind = type(inner)
    raise LNSConfigError(
        f"{settings.flag} was given, but {kind.__module__}.{kind.__name__} was built without it in a single block: it "
        "holds no layers of Megatron Core's TransformerBlock (as with --use-legacy-models), or only a vision tower. "
        "Use a model of megatron.core, or drop the flag."
    )


def _has_empty_stack(chunk: Any) -> bool:
    """Whether a pipeline stage holds a decoder with no layer in it, only an embedding or the loss."""
    stacks = ("TransformerBlock", "HybridStack", "MambaStack")
    return any(type(module).__name__ in stacks and not len(module.layers) for module in chunk.modules())
