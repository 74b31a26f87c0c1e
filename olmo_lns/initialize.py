"""One helper for the initialization of the residual output projections, the same for OLMo and Megatron."""

from __future__ import annotations

from typing import Any, TypeVar

from olmo_lns.errors import LNSConfigError

__all__ = ["plain_initialization"]

C = TypeVar("C")


def plain_initialization(config: C) -> C:
    """Have a model's residual output projections drawn like every other matrix, without a factor of depth.

    Megatron and OLMo's ``full_megatron`` draw them times 1/sqrt(2L), OLMo's ``mitchell`` times 1/sqrt(2l). A scheme
    takes that factor off by itself, so this is for the Pre-LN that it is compared with; with a scheme it changes
    nothing, before or after the scheme is chosen.

    :param config: of the model, before it is built: OLMo's ``ModelConfig`` or ``TrainConfig``, Megatron Core's
        ``TransformerConfig``, or what has one in ``.transformer``. It is marked in place; a copy made by
        ``dataclasses.replace`` keeps the mark in Megatron and loses it in OLMo. Or a fresh model of transformers,
        whose GPT-2 is drawn times 1/sqrt(2L), too: its weights are multiplied.
    :returns: ``config``.
    :raises LNSConfigError: another object, a model was built from it before, or it asks for another initialization.
    :raises UpstreamChangedError: this OLMo or Megatron is not one that was verified.

    Example: ``plain_initialization(config)``, then ``OLMo(config)`` or ``GPTModel(config, ...)``.
    """
    olmo: Any = getattr(config, "model", config)
    megatron: Any = getattr(config, "transformer", config)
    if hasattr(olmo, "init_fn") and hasattr(olmo, "layer_norm_type"):
        from olmo_lns.integrations.olmo import register
        from olmo_lns.integrations.olmo.model import ask_for_plain_initialization as ask_olmo

        register()
        ask_olmo(olmo)
    elif hasattr(megatron, "output_layer_init_method"):
        from olmo_lns.integrations.megatron import plain_initialization as ask_megatron

        ask_megatron(megatron)
    elif hasattr(config, "base_model_prefix"):
        from olmo_lns.integrations.transformers.models import plain_initialization as draw

        draw(config)
    else:
        raise LNSConfigError(
            f"plain_initialization expects the config of an OLMo or a Megatron model before it is built, found a "
            f"{type(config).__name__}. In OLMo-core set init_method to normal or fan_in; other models: "
            "multiply those weights by sqrt(2L) once."
        )
    return config
