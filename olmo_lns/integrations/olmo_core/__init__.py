"""The schemes in OLMo-core; the public names are in :mod:`olmo_lns.olmo_core`.

A block config that ``_CLASS_`` names builds OLMo-core's blocks and scales their norms. The wrappers only check: the
complete model is counted, its fresh weights are measured, and a checkpoint's ``config.json`` is compared on load.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from olmo_lns.hook import on_import, wrap

__all__ = ["register"]

#: Module of OLMo-core -> the wrapped function, and the module and name of its wrapper.
_WRAPPED = {
    "olmo_core.nn.transformer.config": ("TransformerConfig.build", "model", "wrap_build"),
    "olmo_core.nn.transformer.model": ("Transformer.init_weights", "model", "wrap_init_weights"),
    "olmo_core.train.checkpoint": ("Checkpointer.load", "checkpoint", "wrap_load"),
}


def register() -> None:
    """Arrange that models and checkpoints are checked once OLMo-core's modules are imported. Idempotent."""
    for name in _WRAPPED:
        on_import(name, _wrap)


def _wrap(module: ModuleType) -> None:
    path, ours, name = _WRAPPED[module.__name__]
    wrap(f"{module.__name__}:{path}", getattr(importlib.import_module(f"{__name__}.{ours}"), name))
