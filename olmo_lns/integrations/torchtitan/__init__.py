"""The schemes in torchtitan; the public names are in :mod:`olmo_lns.torchtitan`.

An override of torchtitan's config tree marks norms. The end of ``Decoder.__init__`` scales the marked norms, measures
them and writes the start-up line. The other wrappers check: that an override had an effect, that weights are drawn as
requested, and that a checkpoint has the scheme of the run.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from olmo_lns.hook import on_import, wrap

__all__ = ["register"]

#: Module of torchtitan -> the wrapped functions, each with the module and name of its wrapper.
_WRAPPED = {
    "torchtitan.models.common.decoder": {
        "Decoder.__init__": ("model", "wrap_init"),
        "Decoder.init_states": ("initialization", "wrap_init_states"),
    },
    "torchtitan.trainer": {"Trainer.train": ("model", "wrap_train")},
    "torchtitan.components.checkpointer.dcp": {
        "CheckpointManager.dcp_save": ("checkpoint", "wrap_save"),
        "CheckpointManager.dcp_load": ("checkpoint", "wrap_load"),
    },
}


def register() -> None:
    """Arrange that models and checkpoints follow a scheme once torchtitan's modules are imported. Idempotent."""
    for name in _WRAPPED:
        on_import(name, _wrap)


def _wrap(module: ModuleType) -> None:
    for path, (ours, name) in _WRAPPED[module.__name__].items():
        wrap(f"{module.__name__}:{path}", getattr(importlib.import_module(f"{__name__}.{ours}"), name))
