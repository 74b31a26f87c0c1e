"""Which wrapper goes where, and when."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, Callable

from olmo_lns.errors import LNSConfigError
from olmo_lns.integrations.autoload import on_import
from olmo_lns.integrations.patching import is_patched, replace

__all__ = ["in_tree", "install", "install_core"]

_CORE = (
    "megatron.core.transformer.transformer_layer",
    "megatron.core.transformer.transformer_block",
    "megatron.core.transformer.multi_token_prediction",
    "megatron.core.ssm.mamba_block",
    "megatron.core.models.hybrid.hybrid_block",
)
_TRAINING = (
    "megatron.training.argument_utils",
    "megatron.training.arguments",
    "megatron.training.checkpointing",
    "megatron.training.yaml_arguments",
)
_installed: set[str] = set()


def install() -> None:
    """Core and training. Idempotent.

    :raises LNSConfigError: called too late: other modules hold the unextended functions by name.
    """
    for name in _TRAINING:
        if name not in _installed and (module := sys.modules.get(name)) is not None and not _is_loading(module):
            raise LNSConfigError(
                f"olmo_lns.integrations.megatron.register() came after the import of {name}: call it first, or "
                "start the script with `python -m olmo_lns <script>`."
            )
    install_core()
    _arrange(_TRAINING)


def install_core() -> None:
    """Only the constructors of Megatron Core, all that ``apply`` needs. Idempotent, never too late."""
    _arrange(_CORE)


def in_tree() -> bool:
    """Whether this Megatron has LayerNorm Scaling in its own source (``patches/megatron``)."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    return "layernorm_scaling" in getattr(TransformerConfig, "__dataclass_fields__", {})


def _arrange(names: tuple[str, ...]) -> None:
    for name in names:
        if name not in _installed:
            _installed.add(name)
            on_import(name, _extend)


def _extend(module: ModuleType) -> None:
    from olmo_lns.integrations.megatron.report import say
    from olmo_lns.integrations.megatron.upstream import TARGETS

    if in_tree():
        say("this Megatron has LayerNorm Scaling in its own source; the plugin leaves it to it")
        return
    wrappers = _wrappers()
    for key, target in TARGETS.items():
        path, _, qualname = target.path.partition(":")
        if path == module.__name__ and key in wrappers and _defines(module, qualname):
            replace(target, wrappers[key])


def _wrappers() -> dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]]:
    from olmo_lns.integrations.megatron import building, checkpoint, launching

    return {
        "layer": building.transformer_layer,
        "block": building.transformer_block,
        "mtp": building.mtp_layer,
        "mamba_stack": building.hybrid_stack,
        "hybrid_stack": building.hybrid_stack,
        "flags": launching.add_arguments,
        "config": launching.config_from_args,
        "config_until_0_17": launching.config_from_args,
        "yaml": launching.load_yaml,
        "load_args": checkpoint.load_args,
        "load_base": checkpoint.load_base,
    }


def _defines(module: ModuleType, qualname: str) -> bool:
    """Symbols that some versions have elsewhere are skipped where they are only imported."""
    head = qualname.split(".")[0]
    owner = getattr(module, head, None)
    if head in ("MambaStack", "core_transformer_config_from_args"):
        return owner is not None and owner.__module__ == module.__name__ and not is_patched(owner)
    return True


def _is_loading(module: ModuleType) -> bool:
    return bool(getattr(module.__spec__, "_initializing", False))
