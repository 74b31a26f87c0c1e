"""The schemes in OLMo-core; the public names are in :mod:`olmo_lns.olmo_core`.

Nothing of OLMo-core is replaced for training: a block config that ``_CLASS_`` names builds OLMo-core's own blocks and
scales their norms. Of its checkpointer, loading compares the folder's ``config.json`` with the built model.
"""

from __future__ import annotations

from types import ModuleType

from olmo_lns.hook import on_import, wrap

__all__ = ["register"]


def register() -> None:
    """Compare a checkpoint with the model that loads it, once OLMo-core's checkpointer is imported. Idempotent."""
    on_import("olmo_core.train.checkpoint", _wrap_checkpointer)


def _wrap_checkpointer(module: ModuleType) -> None:
    from olmo_lns.integrations.olmo_core.checkpoint import wrap_load

    wrap("olmo_core.train.checkpoint:Checkpointer.load", wrap_load)
