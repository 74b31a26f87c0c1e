"""Plain initialization of the residual output projections, for OLMo, Megatron and transformers."""

from __future__ import annotations

from typing import Any, TypeVar

from olmo_lns.errors import LNSConfigError

__all__ = ["plain_initialization"]

C = TypeVar("C")


def plain_initialization(config: C) -> C:
    """Initialize the residual output projections like every other matrix, without a depth factor.

    Megatron and OLMo's ``full_megatron`` draw these weights times 1/sqrt(2L), OLMo's ``mitchell`` times 1/sqrt(2l). A
    scheme removes that factor by itself. This function is for the Pre-LN baseline; with a scheme it changes nothing,
    before or after the scheme is selected.

    :param config: the model's config, before the model is built: OLMo's ``ModelConfig`` or ``TrainConfig``, Megatron
        Core's ``TransformerConfig``, or an object with one in ``.transformer``. The config is marked in place; a copy
        by ``dataclasses.replace`` keeps the mark in Megatron and loses it in OLMo. Or a fresh model of transformers,
        whose GPT-2 also has the factor 1/sqrt(2L): its weights are multiplied.
    :returns: ``config``.
    :raises LNSConfigError: another object, a config that built a model already, or one with another initialization.
    :raises UpstreamChangedError: this OLMo or Megatron lacks a function that is needed.

    Example: ``plain_initialization(config)``, then ``OLMo(config)`` or ``GPTModel(config, ...)``.
    """
    olmo: Any = getattr(config, "model", config)
    megatron: Any = getattr(config, "transformer", config)
    if hasattr(olmo, "init_fn") and hasattr(olmo, "layer_norm_type"):
        from olmo_lns.integrations.olmo import register
        from olmo_lns.integrations.olmo.model import request_plain_initialization as request_olmo

        register()
        request_olmo(olmo)
    elif hasattr(megatron, "output_layer_init_method"):
        from olmo_lns.integrations.megatron import plain_initialization as request_megatron

        request_megatron(megatron)
    elif hasattr(config, "base_model_prefix"):
        from olmo_lns.integrations.transformers.models import plain_initialization as draw

        draw(config)
    else:
        raise LNSConfigError(
            f"plain_initialization expects the config of an OLMo or a Megatron model before it is built, found a "
            f"{type(config).__name__}. In OLMo-core, set init_method to normal or fan_in. In other "
            "models, multiply the residual output projections by sqrt(2L) once."
        )
    return config
