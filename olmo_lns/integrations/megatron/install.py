"""Which wrapper goes where, and when."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, Callable

from olmo_lns.errors import LNSConfigError
from olmo_lns.integrations.autoload import on_import
from olmo_lns.integrations.patching import Target, is_patched, replace

__all__ = ["install", "install_core"]

_CORE = (
    "megatron.core.transformer.transformer_layer",
    "megatron.core.transformer.transformer_block",
    "megatron.core.transformer.multi_token_prediction",
    "megatron.core.ssm.mamba_block",
    "megatron.core.models.hybrid.hybrid_block",
    "megatron.core.models.common.vision_module.vision_module",
    "megatron.core.models.vision.vit_model",
)
_TRAINING = (
    "megatron.training.argument_utils",
    "megatron.training.arguments",
    "megatron.training.checkpointing",
    "megatron.training.training",
    "megatron.post_training.checkpointing",
    "megatron.training.yaml_arguments",
)
_installed: set[str] = set()


def install() -> None:
    """Core and training. Idempotent.

    :raises LNSConfigError: called too late: other modules hold the unextended functions by name.
    """
    for name in _TRAINING:
        if name not in _installed and name in sys.modules:
            raise LNSConfigError(
                f"olmo_lns.integrations.megatron.register() came after the import of {name}: call it first, or "
                "start the script with `python -m olmo_lns <script>`."
            )
    install_core()
    _arrange(_TRAINING)


def install_core() -> None:
    """Only the constructors of Megatron Core, all that ``apply`` needs. Idempotent, never too late."""
    _arrange(_CORE)


def _arrange(names: tuple[str, ...]) -> None:
    for name in names:
        if name not in _installed:
            on_import(name, _extend)
            _installed.add(name)  # not before: a module that was refused is refused again


def _extend(module: ModuleType) -> None:
    for target, wrapper in _pairs():
        path, _, qualname = target.path.partition(":")
        if path == module.__name__ and _defines(module, qualname):
            replace(target, wrapper)


def _pairs() -> tuple[tuple[Target, Callable[[Callable[..., Any]], Callable[..., Any]]], ...]:
    from olmo_lns.integrations.megatron import building, checkpoint, launching, upstream

    return (
        (upstream.LAYER, building.transformer_layer),
        (upstream.BLOCK, building.transformer_block),
        (upstream.MTP, building.mtp_layer),
        (upstream.MAMBA_STACK, building.hybrid_stack),
        (upstream.HYBRID_STACK, building.hybrid_stack),
        (upstream.VISION, building.vision_tower),
        (upstream.VIT, building.vision_tower),
        (upstream.QWEN_VIT, building.vision_tower),
        (upstream.KIMI_VIT, building.vision_tower),
        (upstream.FLAGS, launching.add_arguments),
        (upstream.CONFIG_UNTIL_0_17, launching.config_from_args),
        (upstream.CONFIG, launching.config_from_args),
        (upstream.YAML, launching.load_yaml),
        (upstream.GET_MODEL, launching.model_built),
        (upstream.SETUP, launching.model_built),
        (upstream.LOAD_ARGS, checkpoint.load_args),
        (upstream.LOAD_BASE, checkpoint.load_base),
        (upstream.LOAD_MODELOPT, checkpoint.load_modelopt),
    )


def _defines(module: ModuleType, qualname: str) -> bool:
    """Symbols that some versions have elsewhere are skipped where they are only imported."""
    head = qualname.split(".")[0]
    owner = getattr(module, head, None)
    if head in ("MambaStack", "core_transformer_config_from_args"):
        return owner is not None and owner.__module__ == module.__name__ and not is_patched(owner)
    return True
