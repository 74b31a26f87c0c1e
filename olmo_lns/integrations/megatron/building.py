"""Wrappers around the constructors of Megatron Core: layer, block, hybrid stack, MTP layer."""

from __future__ import annotations

import sys
from contextvars import ContextVar
from typing import Any, Callable

from torch import nn

from olmo_lns.errors import LNSConfigError
from olmo_lns.integrations.megatron.initialization import use_plain_initialization
from olmo_lns.integrations.megatron.layers import bind_layer, check_config, scaled_norms
from olmo_lns.integrations.megatron.report import say, start_up_line
from olmo_lns.integrations.megatron.settings import FLAGS, Settings

__all__ = ["hybrid_stack", "mtp_layer", "settings_of", "transformer_block", "transformer_layer"]

Init = Callable[..., None]

#: True while an MTP layer builds its inner layers, whose numbers mean something else per version.
_inside_mtp: ContextVar[bool] = ContextVar("olmo_lns_inside_mtp", default=False)


def settings_of(config: Any) -> Settings:
    """The settings a config was marked with.

    :raises LNSConfigError: the command line asked for LNS, but this config did not come from it:
        a model without factors must not be trained in silence.
    """
    if not hasattr(config, "layernorm_scaling"):
        training = sys.modules.get("megatron.training.global_vars")
        args = getattr(training, "_GLOBAL_ARGS", None)
        if args is not None and Settings.of(args) != Settings():
            raise LNSConfigError(
                f"{FLAGS[0]} or {FLAGS[3]} was given, but this {type(config).__name__} was not made by "
                "core_transformer_config_from_args and does not carry it: call "
                "olmo_lns.integrations.megatron.apply(config) before the model is built."
            )
    return Settings.of(config)


def transformer_layer(original: Init) -> Init:
    """Before: plain initialization. After: the factor on the layer's two norms."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        config = _config(args, kwargs)
        settings = settings_of(config)
        if settings.layernorm_scaling:
            check_config(config)
        if settings.scaled_init_off:
            use_plain_initialization(config)
        original(self, *args, **kwargs)
        if settings.layernorm_scaling and not _inside_mtp.get():
            bind_layer(self, settings)

    return __init__


def transformer_block(original: Init) -> Init:
    """After: two sites in each layer, or no model."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        config = _config(args, kwargs)
        settings = settings_of(config)
        if settings.layernorm_scaling:
            check_config(config)
        original(self, *args, **kwargs)
        if settings.layernorm_scaling:
            _count(self, per_layer=2)
            say(start_up_line(self.config, settings, scaled_norms(self)))

    return __init__


def hybrid_stack(original: Init) -> Init:
    """After: only attention and MLP/MoE layers, one site in each."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        settings = settings_of(self.config)
        if settings.layernorm_scaling:
            if _inside_mtp.get():
                raise LNSConfigError("LayerNorm Scaling does not support MTP layers of a hybrid model: drop one.")
            _count(self, per_layer=1)
            say(start_up_line(self.config, settings, scaled_norms(self), hybrid=True))

    return __init__


def mtp_layer(original: Init) -> Init:
    """After: the inner layer of MTP module k is block L + k.

    Its own number is not used: it is k in some versions, L + k in one, and 1 in others.
    """

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        token = _inside_mtp.set(True)
        try:
            original(self, *args, **kwargs)
        finally:
            _inside_mtp.reset(token)
        settings = settings_of(self.config)
        if settings.layernorm_scaling:
            depth = self.config.num_layers + self.layer_number
            inner = _layers_of(self)
            if len(inner) != 1 or bind_layer(inner[0], settings, depth=depth) != 2:
                raise LNSConfigError(
                    f"MTP layer {self.layer_number} holds {len(inner)} transformer layers, expected 1."
                )
            say(f"MTP layer {self.layer_number}: 2 sites, s as block {depth}")

    return __init__


def _config(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return kwargs["config"] if "config" in kwargs else args[0]


def _layers_of(module: nn.Module) -> list[nn.Module]:
    from megatron.core.transformer.transformer_layer import TransformerLayer

    return [child for child in module.modules() if isinstance(child, TransformerLayer)]


def _count(stack: Any, *, per_layer: int) -> None:
    for layer in stack.layers:
        if (found := len(scaled_norms(layer))) != per_layer:
            raise LNSConfigError(
                f"{type(layer).__name__} {getattr(layer, 'layer_number', '?')} of {type(stack).__name__} has {found} "
                f"scaled norms, expected {per_layer}: LayerNorm Scaling supports transformer layers only "
                "(no Mamba, GDN or custom layers)."
            )
