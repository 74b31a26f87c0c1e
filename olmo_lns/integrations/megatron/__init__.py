"""LayerNorm Scaling for Megatron-LM and Megatron Core.

``register()`` adds ``--layernorm-scaling`` and related flags to an unmodified ``pretrain_gpt.py``. ``apply()`` is for
scripts that build a model themselves. Importing this module does not import Megatron.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from olmo_lns import hook
from olmo_lns.integrations.megatron.flags import MegatronFlags
from olmo_lns.integrations.megatron.language_models import LANGUAGE_MODELS
from olmo_lns.schemes import DEFAULT_EXPONENT

__all__ = ["apply", "plain_initialization", "register"]


def register() -> None:
    """Arrange that functions of Megatron are wrapped as soon as their module is imported. A second call does nothing.

    The wrapped functions do the same as before until ``--layernorm-scaling`` or ``--no-scaled-init`` is passed.

    Example: ``register()``, then ``from megatron.training import pretrain``.
    """
    for name, model in LANGUAGE_MODELS.items():
        hook.on_import(name, _wrap_language_model, needed=model == "GPTModel")
    # The package megatron-core has no training scripts. command_line.TRAINING_MODULES names what a launch needs.
    hook.on_import("megatron.training.argument_utils", _wrap_config, needed=False)
    hook.on_import("megatron.training.arguments", _wrap_arguments, needed=False)
    hook.on_import("megatron.training.training", _wrap_training, needed=False)
    hook.on_import("megatron.training.checkpointing", _wrap_checkpointing, needed=False)
    hook.on_import("megatron.core.dist_checkpointing", _wrap_sharded_load, needed=False)
    hook.on_import("megatron.post_training.checkpointing", _wrap_modelopt, needed=False)


# A callback imports its wrappers when Megatron's module has been executed: they need torch.


def _wrap_language_model(module: ModuleType) -> None:
    from olmo_lns.integrations.megatron.model import wrap_model_init

    needed = LANGUAGE_MODELS[module.__name__] == "GPTModel"
    hook.wrap(f"{module.__name__}:{LANGUAGE_MODELS[module.__name__]}.__init__", wrap_model_init, needed=needed)


def _wrap_config(module: ModuleType) -> None:
    """Wrap the function that makes the config. From Megatron Core 0.18 on, ``argument_utils`` defines it."""
    from olmo_lns.integrations.megatron.command_line import wrap_config_from_args

    needed = module.__name__ == "megatron.training.arguments"  # may hold an import of the wrapped one
    hook.wrap(f"{module.__name__}:core_transformer_config_from_args", wrap_config_from_args, needed=needed)


def _wrap_arguments(module: ModuleType) -> None:
    from olmo_lns.integrations.megatron.command_line import wrap_add_arguments

    _wrap_config(module)
    hook.wrap("megatron.training.arguments:add_megatron_arguments", wrap_add_arguments)


def _wrap_training(module: ModuleType) -> None:
    from olmo_lns.integrations.megatron.model import wrap_model_built

    hook.wrap("megatron.training.training:get_model", wrap_model_built)
    hook.wrap("megatron.training.training:setup_model_and_optimizer", wrap_model_built)


def _wrap_checkpointing(module: ModuleType) -> None:
    from olmo_lns.integrations.megatron.checkpoint import wrap_load_args, wrap_load_base

    hook.wrap("megatron.training.checkpointing:load_args_from_checkpoint", wrap_load_args)
    hook.wrap("megatron.training.checkpointing:_load_base_checkpoint", wrap_load_base)


def _wrap_sharded_load(module: ModuleType) -> None:
    from olmo_lns.integrations.megatron.checkpoint import wrap_load_sharded

    hook.wrap("megatron.core.dist_checkpointing:load", wrap_load_sharded, needed=False)


def _wrap_modelopt(module: ModuleType) -> None:
    from olmo_lns.integrations.megatron.checkpoint import wrap_load_modelopt

    hook.wrap("megatron.post_training.checkpointing:load_modelopt_checkpoint", wrap_load_modelopt, needed=False)


def apply(
    target: Any,
    *,
    exponent: float = DEFAULT_EXPONENT,
    keep_scaled_init: bool = False,
    trained: bool | None = None,
) -> int:
    """Switch LayerNorm Scaling on for a config, or for a built model.

    If you can, pass the config before the model is built. ``GPTModel`` and the other language models then scale and
    measure their norms at the end of their constructors. This works under any pipeline split, and the output
    projections are initialized plainly. A built model only gets the factors, and its weights do not change.

    :param target: a ``TransformerConfig``, an object that has one in ``.transformer`` (``GPTModelConfig``), or a
        provider of Megatron Bridge. Alternatively a built model, a part of one, or a list of its pipeline chunks,
        before DDP or FSDP wrap it.
    :param exponent: exponent of ``l ** -exponent``, dimensionless, 0.5 in the paper (arXiv 2502.05795, section 4).
    :param keep_scaled_init: keep Megatron's std/sqrt(2L) for the output projections. It is for configs only.
    :param trained: as in :func:`olmo_lns.apply`. It is for built models only.
    :returns: the number of scaled norms, which is 0 for a config and 2 per block for a model.
    :raises LNSConfigError: if another scheme is on, or the config or a layer is not supported.
    :raises CheckpointMismatchError: if the weights were trained without a factor and ``trained`` is None.
    :raises MeasurementError: if the output of a scaled norm is not the factor times the output before.
    :raises UpstreamChangedError: if this version of Megatron lacks a function that is needed.

    Example: ``apply(config)``, then ``GPTModel(config, ...)``; or ``apply(model, exponent=0.25)``.
    """
    register()
    from olmo_lns.integrations.megatron.model import apply_to

    return apply_to(target, MegatronFlags(True, exponent, keep_scaled_init).validated(), trained)


def plain_initialization(config: Any) -> None:
    """Initialize the residual output projections of a model like every other matrix, without std/sqrt(2L).

    :param config: a ``TransformerConfig`` or a provider, before its model is built.
    :raises LNSConfigError: if the config keeps scaled initialization.
    :raises UpstreamChangedError: if this version of Megatron lacks a function that is needed.

    Example: ``plain_initialization(config)``, then ``GPTModel(config, ...)``.
    """
    register()
    from olmo_lns.integrations.megatron.configs import store_flags

    config = getattr(config, "transformer", config)
    hook.require_wrapped("megatron")
    store_flags(config, MegatronFlags(no_scaled_init=True))
    if config.init_method is None and not getattr(config, "use_mup", False):  # Megatron Bridge sets init_method later
        from megatron.core.utils import init_method_normal

        config.init_method = init_method_normal(config.init_method_std)
    config.output_layer_init_method = config.init_method
