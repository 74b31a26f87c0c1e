"""Add options to Megatron's parser, and store their values in the ``TransformerConfig`` of the arguments."""

from __future__ import annotations

import sys
from typing import Any, Callable, Collection

from olmo_lns import hook
from olmo_lns.integrations.megatron.configs import store_flags
from olmo_lns.integrations.megatron.flags import MegatronFlags, add_flags
from olmo_lns.integrations.megatron.printing import print_once

Function = Callable[..., Any]
#: Modules that a scheme needs in launches of Megatron's own training scripts.
TRAINING_MODULES = (
    "megatron.training.arguments",
    "megatron.training.training",
    "megatron.training.checkpointing",
)
#: Megatron's argument with the checkpoint of the model that ModelOpt distils from. That model is Pre-LN.
TEACHER_LOAD_ARGUMENT = "export_kd_teacher_load"


def wrap_add_arguments(original: Function) -> Function:
    """Wrap ``add_megatron_arguments``: add this package's options to Megatron's parser."""
    return lambda parser: add_flags(original(parser))


def wrap_config_from_args(original: Function) -> Function:
    """Wrap ``core_transformer_config_from_args``: store the flags of the arguments in the config."""

    def core_transformer_config_from_args(args: Any, *rest: Any, **kwargs: Any) -> Any:
        config = original(args, *rest, **kwargs)
        if (flags := MegatronFlags.of(args).validated()) == MegatronFlags():
            return config
        hook.require_wrapped("megatron", TRAINING_MODULES)
        if _is_teacher(args):
            print_once("ModelOpt's teacher: no LayerNorm Scaling")
        else:
            store_flags(config, flags)
        return config

    return core_transformer_config_from_args


def _is_teacher(args: Any) -> bool:
    """Return true for the arguments of ModelOpt's teacher, which are a changed copy of those of the launch."""
    if not getattr(args, TEACHER_LOAD_ARGUMENT, None) or "megatron.training.global_vars" not in sys.modules:
        return False
    try:
        launched = launched_arguments()
    except AssertionError:  # Megatron's, before the arguments of the launch are complete
        return False
    return launched is not None and launched is not args


def passed_options(options: Collection[str]) -> list[str]:
    """Return the words of the command line that are one of ``options``, also those with ``=`` and a value."""
    return [word for word in sys.argv[1:] if word.split("=")[0] in options]


def launched_arguments() -> Any:
    """Return the arguments of the running launch."""
    from megatron.training.global_vars import get_args

    return get_args()
