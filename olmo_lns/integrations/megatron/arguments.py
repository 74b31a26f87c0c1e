"""From Megatron's arguments to its config: the parser's options, and the mark on the ``TransformerConfig``.

A marked config has the fields of a ``Selection`` as attributes. A language model that is built from it gets the scheme
in :mod:`olmo_lns.integrations.megatron.models`.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any, Callable

from olmo_lns import hook
from olmo_lns.errors import LNSConfigError
from olmo_lns.integrations.megatron import layers
from olmo_lns.integrations.megatron.flags import Selection, add_flags

Function = Callable[..., Any]
#: Modules that hold the functions without which a scheme cannot run: in every program, and in Megatron's own launches.
CORE = ("megatron.core.models.gpt.gpt_model",)
TRAINING = (
    *CORE,
    "megatron.training.arguments",
    "megatron.training.training",
    "megatron.training.checkpointing",
)
#: Megatron's argument with the checkpoint of the model that ModelOpt distils from. That model is Pre-LN.
TEACHER = "export_kd_teacher_load"


def add_arguments(original: Function) -> Function:
    """Wrap ``add_megatron_arguments``: add this package's options to Megatron's parser."""
    return lambda parser: add_flags(original(parser))


def config_from_args(original: Function) -> Function:
    """Wrap ``core_transformer_config_from_args``: mark the config with the selection in the arguments."""

    def core_transformer_config_from_args(args: Any, *rest: Any, **kwargs: Any) -> Any:
        config = original(args, *rest, **kwargs)
        if (selection := Selection.of(args).check()) == Selection():
            return config
        hook.require_wrapped("megatron", TRAINING)
        if _is_teacher(args):
            layers.print_once("ModelOpt's teacher: no LayerNorm Scaling")
        else:
            mark(config, selection)
        return config

    return core_transformer_config_from_args


def _is_teacher(args: Any) -> bool:
    """Return true for the arguments of ModelOpt's teacher, a changed copy of the launch's arguments."""
    launched = getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)
    return launched is not None and launched is not args and bool(getattr(args, TEACHER, None))


def launched_arguments() -> Any:
    """Return the arguments of the running launch."""
    from megatron.training.global_vars import get_args

    return get_args()


def is_config(value: object) -> bool:
    """Return true for a ``TransformerConfig``, or one of its subclasses, such as a provider of Megatron Bridge."""
    from megatron.core.transformer.transformer_config import TransformerConfig  # Megatron may be half imported above

    return isinstance(value, TransformerConfig)


def mark(target: Any, selection: Selection) -> None:
    """Store a selection in a config, or in the one in ``target.transformer``.

    :raises LNSConfigError: no ``TransformerConfig``, one with another scheme, or one with an unsupported setting.
    """
    config = getattr(target, "transformer", target)
    if not is_config(config):
        raise LNSConfigError(
            f"found a {type(target).__name__}, expected a TransformerConfig, a built model or a list of its chunks."
        )
    current = Selection.of(config)
    if current.layernorm_scaling and selection.layernorm_scaling and current.scheme != selection.scheme:
        raise LNSConfigError(f"this {type(config).__name__} has {current.scheme} already: start from a fresh config.")
    if selection.layernorm_scaling:
        layers.check_config(config)
    chosen = selection if selection.layernorm_scaling else current
    replace(chosen, no_scaled_init=current.no_scaled_init or selection.no_scaled_init).check().store(config)
