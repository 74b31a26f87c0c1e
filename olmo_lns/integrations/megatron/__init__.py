"""LayerNorm Scaling for Megatron-LM and Megatron Core.

``register()`` adds ``--layernorm-scaling`` and its relatives to an unmodified ``pretrain_gpt.py``;
``apply()`` is the one call for those who build a model themselves. Importing them does not import Megatron.
"""

from __future__ import annotations

from typing import Any

from olmo_lns import hook
from olmo_lns.integrations.megatron.settings import Settings
from olmo_lns.schemes import DEFAULT_EXPONENT

__all__ = ["apply", "plain_initialization", "register"]

#: Models that attach by themselves: class -> the module that defines it, in one version or another.
MODELS = {
    "GPTModel": "megatron.core.models.gpt.gpt_model",
    "HybridModel": "megatron.core.models.hybrid.hybrid_model",
    "MambaModel": "megatron.core.models.mamba.mamba_model",
    "BertModel": "megatron.core.models.bert.bert_model",
    "T5Model": "megatron.core.models.T5.t5_model",
}
_LAUNCH = (
    *(f"megatron.training.{name}" for name in ("argument_utils", "arguments", "training", "checkpointing")),
    "megatron.post_training.checkpointing",
)


def register() -> None:
    """Arrange that each Megatron module is extended right after it is executed.

    It may be called twice, and changes nothing until ``--layernorm-scaling`` or ``--no-scaled-init`` is given.

    Example: ``register()``, then ``from megatron.training import pretrain``.
    """
    for name in (*MODELS.values(), *_LAUNCH):
        hook.on_import(name, _wrap)


def _wrap(module: Any) -> None:
    from olmo_lns.integrations.megatron.launch import wrap_module

    wrap_module(module)


def apply(target: Any, *, exponent: float = DEFAULT_EXPONENT, keep_scaled_init: bool = False) -> int:
    """Switch LayerNorm Scaling on for a config, or for a built model.

    Best on the config, before the model is built: then ``GPTModel`` and its relatives scale and measure their norms at
    the end of their constructors, under any pipeline split, with plain initialization of the output projections. A
    built model gets the factors only; its weights stay as they were initialized or loaded.

    :param target: a ``TransformerConfig``, an object with one in ``.transformer`` (``GPTModelConfig``), a provider of
        Megatron Bridge; or a built model, a part of one, or a list of its pipeline chunks, before DDP or FSDP wrap it.
    :param exponent: of the factor ``l ** -exponent``, dimensionless, 0.5 in the paper (arXiv 2502.05795, section 4).
    :param keep_scaled_init: keep Megatron's std/sqrt(2L) for the output projections; for configs only.
    :returns: how many norms are scaled now: 0 for a config, 2 per block otherwise.
    :raises LNSConfigError: another scheme is on, or the config or a layer is not supported.
    :raises MeasurementError: a scaled norm gives something else than the factor times its output before.
    :raises UpstreamChangedError: this Megatron lacks a function that is needed.

    Example: ``apply(config)``, then ``GPTModel(config, ...)``; or ``apply(model, exponent=0.25)``.
    """
    register()
    from olmo_lns.integrations.megatron.launch import apply_to

    return apply_to(target, Settings(True, exponent, keep_scaled_init).check())


def plain_initialization(config: Any) -> None:
    """Have the residual output projections of a model drawn like every other matrix, without std/sqrt(2L).

    :param config: a ``TransformerConfig`` or a provider, before its model is built.
    :raises LNSConfigError: it asks for scaled initialization.
    """
    register()
    from olmo_lns.integrations.megatron import launch

    launch.plain_initialization(config)
