"""Switch off Megatron's scaled initialization of the residual output projections.

``TransformerConfig`` gives them std/sqrt(2L) through ``output_layer_init_method``; every such
projection (attention, MLA, MLP, experts, latent MoE, MTP) takes its method from there, so the
finished config is the one place to change. Under ``use_mup`` the regular ``init_method`` already
carries the width factor 1/sqrt(width_mult): only the depth factor goes.
"""

from __future__ import annotations

from typing import Any

__all__ = ["describe", "restore_initialization", "use_plain_initialization"]

#: Where a config keeps the method that was taken from it.
_UPSTREAM = "output_layer_init_method_of_megatron"


def use_plain_initialization(config: Any) -> bool:
    """Let the output projections use ``config.init_method``.

    :returns: False where the config has no ``init_method`` yet (Megatron Bridge finalizes its
        configs later); call again when it has.
    """
    if getattr(config, "init_method", None) is None:
        return False
    if not hasattr(config, _UPSTREAM):
        setattr(config, _UPSTREAM, config.output_layer_init_method)
    config.output_layer_init_method = config.init_method
    return True


def restore_initialization(config: Any) -> None:
    """Give ``config``, or a copy of it, the method back that Megatron chose."""
    if hasattr(config, _UPSTREAM):
        config.output_layer_init_method = getattr(config, _UPSTREAM)
        delattr(config, _UPSTREAM)


def describe(config: Any, off: bool) -> str:
    """The policy in words, for the log."""
    if not off:
        return "scaled initialization kept (std/sqrt(2L) for output projections)"
    width = ", MuP's width factor kept" if getattr(config, "use_mup", False) else ""
    return f"scaled initialization off (output projections: init_method{width})"
