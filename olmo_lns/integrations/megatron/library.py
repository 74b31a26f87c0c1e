"""The one call for those who build Megatron Core models themselves (Bridge, NeMo, own loops)."""

from __future__ import annotations

from typing import Any

from torch import nn

from olmo_lns.errors import LNSConfigError
from olmo_lns.integrations.megatron.initialization import use_plain_initialization
from olmo_lns.integrations.megatron.install import in_tree, install_core
from olmo_lns.integrations.megatron.layers import bind_layer, check_config, scaled_norms
from olmo_lns.integrations.megatron.report import say, start_up_line
from olmo_lns.integrations.megatron.settings import Settings
from olmo_lns.scale import DEFAULT_EXPONENT

__all__ = ["apply"]


def apply(target: Any, *, exponent: float = DEFAULT_EXPONENT, keep_scaled_init: bool = False) -> int:
    """Switch LayerNorm Scaling on for a config, a built layer or a built model.

    Best on the config, before the model is built: then the layers get their factors and the
    plain initialization of the output projections when they are made, under any pipeline split.
    A built model gets the factors only; its weights are as they were initialized or loaded.

    :param target: a ``TransformerConfig`` (or an object with one in ``.transformer``, such as
        ``GPTModelConfig``), a ``TransformerLayer``, or a module that holds some (``GPTModel``, a
        wrapped one, or a list of pipeline chunks).
    :param exponent: of the factor ``l ** -exponent``; dimensionless, 0.5 in the paper
        (arXiv 2502.05795, section 4).
    :param keep_scaled_init: keep Megatron's std/sqrt(2L) for the output projections; configs only.
    :returns: how many norms were scaled: 0 for a config, 2 per layer otherwise.
    :raises LNSConfigError: LNS is on already, or the config or a layer is not supported.
    :raises UpstreamChangedError: this Megatron is not one that was verified.
    """
    if in_tree():
        raise LNSConfigError(
            "this Megatron has LayerNorm Scaling in its own source: set config.layernorm_scaling = True instead."
        )
    settings = Settings(True, exponent, keep_scaled_init, False).check()
    if isinstance(target, (list, tuple)):
        return sum(apply(chunk, exponent=exponent, keep_scaled_init=keep_scaled_init) for chunk in target)
    if isinstance(target, nn.Module):
        return _apply_to_module(target, settings)
    config = getattr(target, "transformer", target)
    if not hasattr(config, "output_layer_init_method"):
        raise LNSConfigError(
            f"cannot apply LayerNorm Scaling to {type(target).__name__}: expected a TransformerConfig, a "
            "TransformerLayer, or a module that holds some."
        )
    install_core()
    check_config(config)
    settings.store(config)
    if settings.scaled_init_off:
        use_plain_initialization(config)
    return 0


def _apply_to_module(module: nn.Module, settings: Settings) -> int:
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
    from megatron.core.transformer.transformer_layer import TransformerLayer

    if settings.layernorm_scaling_keep_scaled_init:
        raise LNSConfigError("keep_scaled_init has no meaning for a built model: its weights are made already.")
    if scaled_norms(module):
        raise LNSConfigError(f"LayerNorm Scaling is on in this {type(module).__name__} already.")
    layers = [child for child in module.modules() if isinstance(child, TransformerLayer)]
    if not layers:
        raise LNSConfigError(f"{type(module).__name__} holds no TransformerLayer: nothing to scale.")
    depths = {
        id(inner): mtp.config.num_layers + mtp.layer_number
        for mtp in module.modules()
        if isinstance(mtp, MultiTokenPredictionLayer)
        for inner in mtp.modules()
        if isinstance(inner, TransformerLayer)
    }
    sites = sum(bind_layer(layer, settings, depth=depths.get(id(layer))) for layer in layers)
    config: Any = layers[0].config
    settings.store(config)
    hybrid = sites == len(layers)
    say(start_up_line(config, settings, scaled_norms(module), hybrid=hybrid, initialization="weights as they were"))
    return sites
