"""Store flags in Megatron's ``TransformerConfig``, and refuse settings that a scheme does not support.

A config with flags has the fields of ``MegatronFlags`` as attributes. :mod:`olmo_lns.integrations.megatron.model`
applies the scheme to every language model that is built from such a config.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from olmo_lns import environment
from olmo_lns.errors import LNSConfigError
from olmo_lns.integrations.megatron.flags import MegatronFlags

NORM_NOT_CALLED = "it reads the norm's parameters without calling the norm"
_NO_STREAM = "hyper-connections have no single residual stream"
_NO_DEPTH = "heterogeneous blocks have no common depth"
#: Attribute of the config -> the reason against LayerNorm Scaling with it.
_REFUSED = {
    "use_transformer_engine_op_fuser": NORM_NOT_CALLED,
    "inference_fuse_tp_communication": NORM_NOT_CALLED,
    "enable_mhc_connections": _NO_STREAM,
    "enable_hyper_connections": _NO_STREAM,
    "heterogeneous_block_specs": _NO_DEPTH,
    "heterogeneous_layers_config_path": _NO_DEPTH,
    "scale_layernorm_by_depth": "this patch of Megatron is the same method, which would scale twice",
    "batch_invariant_mode": "its RMSNorm replaces TE's forward, which a scaled norm does not run",
}


def is_config(value: object) -> bool:
    """Return true for a ``TransformerConfig``. Providers of Megatron Bridge are subclasses of it."""
    from megatron.core.transformer.transformer_config import TransformerConfig  # Megatron may be half imported above

    return isinstance(value, TransformerConfig)


def check_config(config: Any) -> None:
    """Check that LayerNorm Scaling supports the settings of a config.

    :raises LNSConfigError: if it does not support one. The message names it and gives the reason.
    """
    environment.check()
    refused = {name: reason for name, reason in _REFUSED.items() if getattr(config, name, None)}
    if getattr(config, "transformer_impl", "") == "inference_optimized":
        refused["transformer_impl"] = NORM_NOT_CALLED
    for name, reason in refused.items():
        setting = f"{name}={getattr(config, name)!r}"
        raise LNSConfigError(
            f"LayerNorm Scaling does not support {setting}: {reason}. Switch this setting or LayerNorm Scaling off."
        )


def store_flags(target: Any, flags: MegatronFlags) -> None:
    """Store flags in a config.

    :param target: a ``TransformerConfig``, or an object that has one in its attribute ``transformer``.
    :raises LNSConfigError: if ``target`` is neither, or if the config has another scheme or an unsupported setting.
    """
    config = getattr(target, "transformer", target)
    if not is_config(config):
        raise LNSConfigError(
            f"The argument has the type {type(target).__name__}. Expected a TransformerConfig, a built model or its "
            "chunks. Pass one of them."
        )
    current = MegatronFlags.of(config)
    if current.layernorm_scaling and flags.layernorm_scaling and current.scheme != flags.scheme:
        raise LNSConfigError(
            f"This {type(config).__name__} has the scheme {current.scheme} already. Make a new config."
        )
    if flags.layernorm_scaling:
        check_config(config)
    chosen = flags if flags.layernorm_scaling else current
    replace(chosen, no_scaled_init=current.no_scaled_init or flags.no_scaled_init).validated().store(config)
