"""The calls for those who build Megatron Core models themselves: Megatron Bridge, NeMo, loops of one's own."""

from __future__ import annotations

import functools
import gc
import inspect
import sys
import types
from dataclasses import replace
from typing import Any

from torch import nn

from olmo_lns.errors import LNSConfigError
from olmo_lns.integrations.megatron import upstream
from olmo_lns.integrations.megatron.building import (
    inside_mtp,
    say,
    say_left_out,
    start_up_line,
    use_plain_initialization,
)
from olmo_lns.integrations.megatron.layers import attach_layer, check_config, count_sites, layers_of
from olmo_lns.integrations.megatron.registration import install_core
from olmo_lns.integrations.megatron.settings import VISION, Settings, mark
from olmo_lns.integrations.norm_sites import read_back
from olmo_lns.integrations.patching import check_target, require_verified
from olmo_lns.schemes import DEFAULT_EXPONENT, LNS, Scheme, parse


def apply(
    target: Any,
    *,
    scheme: str = LNS.name,
    exponent: float = DEFAULT_EXPONENT,
    keep_scaled_init: bool = False,
    vision: bool = False,
) -> int:
    """Switch LayerNorm Scaling, or another scheme, on for a config, a built layer or a built model.

    Best on the config, before the model is built: then the layers get their factors and the plain initialization of
    the output projections when they are made, under any pipeline split. A built model gets the scheme only; its
    weights stay as they were initialized or loaded.

    :param target: a ``TransformerConfig`` (or an object with one in ``.transformer``, such as ``GPTModelConfig``), a
        ``TransformerLayer``, or a module that holds some (``GPTModel``, a wrapped one, or a list of pipeline chunks).
    :param scheme: as after ``--norm-scheme``: ``sandwich``, ``lnsafterbranch:exponent=0.25``.
    :param exponent: of the factor ``l ** -exponent``, dimensionless, 0.5 in the paper (arXiv 2502.05795, section 4);
        short for ``lns:exponent=…``.
    :param keep_scaled_init: keep Megatron's std/sqrt(2L) for the output projections; for configs only.
    :param vision: scale the vision towers of the model, or the one built from this config, too. By default they stay
        Megatron's own and only the language decoder is scaled.
    :returns: how many sub-layers have the scheme now: 0 for a config, 2 per layer otherwise.
    :raises LNSConfigError: a scheme is on already, a model was built from the config before, or the scheme, the config
        or a layer is not supported.
    :raises UpstreamChangedError: this Megatron is not one that was verified.

    Example: ``apply(config)``, then ``GPTModel(config, ...)``; or ``apply(model, exponent=0.25)``.
    """
    settings = _settings(scheme, exponent, keep_scaled_init)
    if isinstance(target, (list, tuple)):
        return sum(
            apply(each, scheme=scheme, exponent=exponent, keep_scaled_init=keep_scaled_init, vision=vision)
            for each in target
        )
    if isinstance(target, nn.Module):
        return _apply_to_module(target, settings, vision)
    config = getattr(target, "transformer", target)
    if not hasattr(config, "output_layer_init_method"):
        raise LNSConfigError(
            f"cannot apply {settings.scheme.definition.title} to {type(target).__name__}: expected a "
            "TransformerConfig, a TransformerLayer, or a module that holds some."
        )
    check_config(config, settings.scheme)
    found = Settings.of(config)
    # A vision tower's config is often a copy of the language model's: the same settings, and vision on top.
    if found.active and not (vision and _same(found, settings)):
        raise LNSConfigError(
            f"{found.scheme.definition.title} is on in this {type(config).__name__} already ({found.scheme}): call "
            "apply once, or start from a fresh config."
        )
    _mark_unused(config, settings, vision)
    return 0


def ask_for_plain_initialization(config: Any) -> None:
    """What :func:`olmo_lns.plain_initialization` does to a Megatron config."""
    found = Settings.of(config)
    if found.scaled_init_off:
        return
    if found.active:
        raise LNSConfigError("plain_initialization(config) contradicts keep_scaled_init=True: leave one of them out.")
    _mark_unused(config, Settings(no_scaled_init=True), getattr(config, VISION, False))


def layer_spec(
    config: Any,
    spec: Any = None,
    *,
    scheme: str = LNS.name,
    exponent: float = DEFAULT_EXPONENT,
    keep_scaled_init: bool = False,
    vp_stage: int | None = None,
) -> Any:
    """The spec of a GPT model's layers under a scheme, for those who hand Megatron Core a spec of their own.

    Megatron builds each layer from the norms, linear layers and attention that the spec names, and then the layer gets
    the scheme of its number; nothing of Megatron is replaced for it. ``config`` is marked as :func:`apply` marks it,
    with ``output_layer_init_method`` set to the plain one.

    :param config: the ``TransformerConfig`` that the model is built from.
    :param spec: a ``ModuleSpec`` of a ``TransformerLayer``, a ``TransformerBlockSubmodules``, or a function of the
        config (and of ``vp_stage``) that returns one, such as Megatron Bridge's ``transformer_layer_spec``. Default:
        Megatron's ``get_gpt_decoder_block_spec`` with Transformer Engine where it is installed, else the local layers.
    :param scheme: like ``exponent`` and ``keep_scaled_init`` as in :func:`apply`.
    :param vp_stage: the stage of a virtual pipeline.
    :returns: a spec of the same kind, for ``GPTModel(transformer_layer_spec=...)``.
    :raises LNSConfigError: the config or the spec is not supported, or the config has another scheme.
    :raises UpstreamChangedError: this Megatron is not one that was verified.

    Example: ``GPTModel(config, layer_spec(config, get_gpt_layer_local_spec()), ...)``
    """
    settings = _settings(scheme, exponent, keep_scaled_init)
    check_target(upstream.target("TransformerLayer.__init__"))
    check_config(config, settings.scheme)
    if (found := Settings.of(config)).active and not _same(found, settings):
        raise LNSConfigError(
            f"the config has {found.scheme} already ({found.initialization} initialization): {settings.scheme} "
            f"({settings.initialization}) was asked for."
        )
    mark(config, settings, vision=getattr(config, VISION, False))
    if settings.scaled_init_off:
        use_plain_initialization(config)
    if spec is None:
        from megatron.core.extensions.transformer_engine import HAVE_TE
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

        spec = functools.partial(
            get_gpt_decoder_block_spec, use_transformer_engine=HAVE_TE, normalization=config.normalization
        )
    if not hasattr(spec, "submodules") and not hasattr(spec, "layer_specs"):
        knows_stage = "vp_stage" in inspect.signature(spec).parameters
        spec = spec(config, vp_stage=vp_stage) if knows_stage else spec(config)
    return _with_scheme(spec, settings)


def _with_scheme(spec: Any, settings: Settings) -> Any:
    from megatron.core.transformer.transformer_block import TransformerBlock
    from megatron.core.transformer.transformer_layer import TransformerLayer

    if hasattr(spec, "layer_specs"):
        return replace(spec, layer_specs=[_with_scheme(each, settings) for each in spec.layer_specs])
    kind = getattr(spec, "module", None)
    if isinstance(kind, type) and issubclass(kind, TransformerBlock):
        return replace(spec, submodules=_with_scheme(spec.submodules, settings))
    if not (isinstance(kind, type) and issubclass(kind, TransformerLayer)):
        raise LNSConfigError(
            f"{getattr(kind, '__name__', spec)!r} is not the spec of a TransformerLayer: layer_spec knows GPT models; "
            "call apply(config) for others."
        )
    return replace(spec, module=_layer_class(kind), params={**spec.params, "lns_settings": settings})


class SchemeLayer:
    """Mixin in front of Megatron's class of layers: the built layer gives itself the scheme of its spec."""

    def __init__(self, config: Any, *args: Any, lns_settings: Settings, **kwargs: Any) -> None:
        if lns_settings.scaled_init_off:
            use_plain_initialization(config)
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        if inside_mtp.get() or count_sites(self):  # type: ignore[arg-type]
            return  # by the wrapped constructors, which found the settings on the config
        if kwargs.get("is_mtp_layer") or getattr(config, "mtp_num_layers", None):
            raise LNSConfigError("MTP layers under a layer spec need the plugin's numbers: unset OLMO_LNS_DISABLE.")
        attach_layer(self, lns_settings)


@functools.cache
def _layer_class(base: type) -> type:
    if issubclass(base, SchemeLayer):
        return base
    body = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return types.new_class(base.__name__, (SchemeLayer, base), exec_body=lambda space: space.update(body))


def _settings(text: str, exponent: float, keep_scaled_init: bool) -> Settings:
    """:raises LNSConfigError: an unknown scheme, Pre-LN, or an exponent beside another scheme."""
    scheme = parse(text)
    if exponent != DEFAULT_EXPONENT:
        if scheme != LNS:
            raise LNSConfigError(f"exponent={exponent!r} beside {text!r}: write it in the scheme, name:exponent=…")
        scheme = Scheme.of(LNS.name, exponent=exponent)
    if scheme.is_pre_ln:
        raise LNSConfigError("preln is what Megatron builds by itself: leave apply out.")
    return Settings.of_scheme(scheme, keep_scaled_init=keep_scaled_init).check()


def _same(one: Settings, other: Settings) -> bool:
    return (one.scheme, one.initialization) == (other.scheme, other.initialization)


def _mark_unused(config: Any, settings: Settings, vision: bool) -> None:
    """Give ``config`` the settings, unless a model was built from it, which left no other trace than itself.

    :raises LNSConfigError: somebody holds a layer that was built from ``config``.
    :raises UpstreamChangedError: this Megatron Core is not one that was verified.
    """
    install_core()
    require_verified(upstream.CORE)
    module = sys.modules.get("megatron.core.transformer.transformer_layer")
    gc.collect()  # a model that nobody holds any more does not count
    layers = (x for x in gc.get_objects() if module is not None and issubclass(type(x), module.TransformerLayer))
    if any(getattr(layer, "config", None) is config for layer in layers):
        raise LNSConfigError(
            f"a model was built from this {type(config).__name__} before: without a factor, and applied to the "
            "config it stays so. Call apply(config) before the model is built, or apply(model) on what was built."
        )
    mark(config, settings, vision=vision)
    if settings.scaled_init_off:
        use_plain_initialization(config)


def _apply_to_module(module: nn.Module, settings: Settings, vision: bool) -> int:
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer

    if settings.layernorm_scaling_keep_scaled_init:
        raise LNSConfigError("keep_scaled_init has no meaning for a built model: its weights are made already.")
    if count_sites(module):
        title = read_back(module).definition.title
        raise LNSConfigError(f"{title} is on in this {type(module).__name__} already.")
    towers = [] if vision else _vision_towers(module)
    left = {id(child) for tower in towers for child in tower.modules()}
    layers = [child for child in layers_of(module) if id(child) not in left]
    if not layers:
        raise LNSConfigError(
            f"{type(module).__name__} holds no TransformerLayer{' outside a vision tower' if towers else ''}: nothing "
            "to scale."
        )
    for tower in towers:
        say_left_out(tower, tower.config, settings)
    mtps = [child for child in module.modules() if isinstance(child, MultiTokenPredictionLayer)]
    depths = {id(inner): mtp.config.num_layers + mtp.layer_number for mtp in mtps for inner in layers_of(mtp)}
    sites = sum(attach_layer(layer, settings, depth=depths.get(id(layer))) for layer in layers)
    config: Any = layers[0].config
    settings.store(config)
    say(start_up_line(module, config, initialization="weights as they were", hybrid=sites == len(layers)))
    return sites


def _vision_towers(model: nn.Module) -> list[Any]:
    """The vision towers in ``model``; those of ``vit_model`` share no base class of their own."""
    from megatron.core.models.common.vision_module.vision_module import VisionModule

    module = sys.modules.get("megatron.core.models.vision.vit_model")
    names = ("ViTModel", "QwenVLViTModel", "KimiViTModel")
    kinds = (VisionModule, *(getattr(module, name) for name in names if module is not None))
    return [child for child in model.modules() if isinstance(child, kinds)]
