"""The one call for those who build Megatron Core models themselves (Bridge, NeMo, own loops)."""

from __future__ import annotations

import gc
import sys
from typing import Any

from torch import nn

from olmo_lns.errors import LNSConfigError
from olmo_lns.integrations.binding import read_back
from olmo_lns.integrations.megatron.building import say_left_out, vision_towers
from olmo_lns.integrations.megatron.initialization import use_plain_initialization
from olmo_lns.integrations.megatron.install import install_core
from olmo_lns.integrations.megatron.layers import bind_layer, bound, check_config
from olmo_lns.integrations.megatron.report import say, start_up_line
from olmo_lns.integrations.megatron.settings import VISION, Settings
from olmo_lns.schemes import DEFAULT_EXPONENT, LNS, parse

__all__ = ["apply"]


def apply(
    target: Any,
    *,
    scheme: str = LNS.name,
    exponent: float = DEFAULT_EXPONENT,
    keep_scaled_init: bool = False,
    vision: bool = False,
) -> int:
    """Switch LayerNorm Scaling, or another scheme, on for a config, a built layer or a built model.

    Best on the config, before the model is built: then the layers get their factors and the
    plain initialization of the output projections when they are made, under any pipeline split.
    A built model gets the scheme only; its weights are as they were initialized or loaded.

    :param target: a ``TransformerConfig`` (or an object with one in ``.transformer``, such as
        ``GPTModelConfig``), a ``TransformerLayer``, or a module that holds some (``GPTModel``, a
        wrapped one, or a list of pipeline chunks).
    :param scheme: as after ``--norm-scheme``: ``sandwich``, ``lnsafterbranch:exponent=0.25``.
    :param exponent: short for ``lns:exponent=…``: of the factor ``l ** -exponent``; dimensionless, 0.5 in the paper
        (arXiv 2502.05795, section 4).
    :param vision: scale vision towers too, those of the model or the one built from this config; without it they are
        left as they are, the language decoder only is scaled.
    :param keep_scaled_init: keep Megatron's std/sqrt(2L) for the output projections; configs only.
    :returns: how many sub-layers have the scheme now: 0 for a config, 2 per layer otherwise.
    :raises LNSConfigError: a scheme is on already, a model was built from the config before, or the scheme, the config
        or a layer is not supported.
    :raises UpstreamChangedError: this Megatron is not one that was verified.
    """
    settings = _settings(scheme, exponent, keep_scaled_init)
    if isinstance(target, (list, tuple)):
        how: dict[str, Any] = {"exponent": exponent, "keep_scaled_init": keep_scaled_init, "vision": vision}
        return sum(apply(chunk, scheme=scheme, **how) for chunk in target)
    if isinstance(target, nn.Module):
        return _apply_to_module(target, settings, vision)
    config = getattr(target, "transformer", target)
    if not hasattr(config, "output_layer_init_method"):
        raise LNSConfigError(
            f"cannot apply {settings.scheme.definition.title} to {type(target).__name__}: expected a "
            "TransformerConfig, a TransformerLayer, or a module that holds some."
        )
    install_core()
    check_config(config, settings.scheme)
    _check_unused(config, settings, vision)
    settings.store(config)
    setattr(config, VISION, vision)
    if settings.scaled_init_off:
        use_plain_initialization(config)
    return 0


def _settings(text: str, exponent: float, keep_scaled_init: bool) -> Settings:
    """:raises LNSConfigError: an unknown scheme, Pre-LN, or an exponent beside another scheme."""
    scheme = parse(text)
    if scheme == LNS:
        return Settings(True, exponent, keep_scaled_init).check()
    if exponent != DEFAULT_EXPONENT:
        raise LNSConfigError(f"exponent={exponent!r} beside scheme {text!r}: write it in the scheme, name:exponent=…")
    if scheme.is_pre_ln:
        raise LNSConfigError("preln is what Megatron builds by itself: leave apply out.")
    return Settings.of_scheme(scheme, keep_scaled_init=keep_scaled_init).check()


def _check_unused(config: Any, settings: Settings, vision: bool) -> None:
    """:raises LNSConfigError: the config was given to ``apply`` or used for a model before."""
    found = Settings.of(config)
    # A vision tower's config is often a copy of the language model's: the same settings, and vision on top.
    if found.active and (
        (found.scheme, found.initialization) != (settings.scheme, settings.initialization) or not vision
    ):
        raise LNSConfigError(
            f"{found.scheme.definition.title} is on in this {type(config).__name__} already ({found.scheme}): call "
            "apply once, or start from a fresh config."
        )
    if _is_in_use(config):
        gc.collect()  # a model that nobody holds any more does not count
        if _is_in_use(config):
            raise LNSConfigError(
                f"a model was built from this {type(config).__name__} before: without a factor, and applied to the "
                "config it stays so. Call apply(config) before the model is built, or apply(model) on what was built."
            )


def _is_in_use(config: Any) -> bool:
    """Looked up among all living objects: a model built before the first ``apply`` left no other trace."""
    module = sys.modules.get("megatron.core.transformer.transformer_layer")
    if module is None:
        return False
    living = (x for x in gc.get_objects() if issubclass(type(x), module.TransformerLayer))
    return any(getattr(layer, "config", None) is config for layer in living)


def _apply_to_module(module: nn.Module, settings: Settings, vision: bool) -> int:
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
    from megatron.core.transformer.transformer_layer import TransformerLayer

    if settings.layernorm_scaling_keep_scaled_init:
        raise LNSConfigError("keep_scaled_init has no meaning for a built model: its weights are made already.")
    if bound(module):
        title = read_back(module).definition.title
        raise LNSConfigError(f"{title} is on in this {type(module).__name__} already.")
    towers = [] if vision else vision_towers(module)
    left = {id(child) for tower in towers for child in tower.modules()}
    layers = [child for child in module.modules() if isinstance(child, TransformerLayer) and id(child) not in left]
    if not layers:
        raise LNSConfigError(
            f"{type(module).__name__} holds no TransformerLayer{' outside a vision tower' if towers else ''}: nothing "
            "to scale."
        )
    for tower in towers:
        say_left_out(tower, tower.config, settings)
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
    say(start_up_line(module, config, initialization="weights as they were", hybrid=hybrid))
    return sites
