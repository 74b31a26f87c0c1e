"""Mark Megatron's ``TransformerConfig`` with a selection, and refuse settings that a scheme does not support.

A marked config has the fields of a ``Selection`` as attributes. :mod:`olmo_lns.integrations.megatron.model` applies the
scheme to every language model that is built from a marked config.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from olmo_lns import environment
from olmo_lns.errors import LNSConfigError
from olmo_lns.integrations.megatron.flags import Selection

BYPASSED = "it reads the norm's parameters without calling the norm"
_NO_STREAM = "hyper-connections have no single residual stream"
_NO_DEPTH = "heterogeneous blocks have no common depth"
#: Attribute of the config -> the reason against LayerNorm Scaling with it.
_REFUSED = {
    "use_transformer_engine_op_fuser": BYPASSED,
    "inference_fuse_tp_communication": BYPASSED,
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
        refused["transformer_impl"] = BYPASSED
    for name, reason in refused.items():
        setting = f"{name}={getattr(config, name)!r}"
        raise LNSConfigError(
            f"LayerNorm Scaling does not support {setting}: {reason}. Switch this setting or LayerNorm Scaling off."
        )


def mark_config(target: Any, selection: Selection) -> None:
    """Store a selection in a config.

    :param target: a ``TransformerConfig``, or an object that has one in its attribute ``transformer``.
    :raises LNSConfigError: if ``target`` is neither, or if the config has another scheme or an unsupported setting.
    """
    config = getattr(target, "transformer", target)
    if not is_config(config):
        raise LNSConfigError(
            f"The argument has the type {type(target).__name__}. Expected a TransformerConfig, a built model or its "
            "chunks. Pass one of them."
        )
    current = Selection.of(config)
    if current.layernorm_scaling and selection.layernorm_scaling and current.scheme != selection.scheme:
        raise LNSConfigError(
            f"This {type(config).__name__} has the scheme {current.scheme} already. Make a new config."
        )
    if selection.layernorm_scaling:
        check_config(config)
    chosen = selection if selection.layernorm_scaling else current
    replace(chosen, no_scaled_init=current.no_scaled_init or selection.no_scaled_init).validated().store(config)
