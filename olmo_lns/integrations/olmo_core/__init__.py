"""The schemes in OLMo-core; the public names are in :mod:`olmo_lns.olmo_core`.

A block config that ``_CLASS_`` names builds OLMo-core's blocks and scales their norms. The wrappers only check: the
complete model is counted, its fresh weights are measured, and a checkpoint's ``config.json`` is compared on load.
"""

from __future__ import annotations

from types import ModuleType

from olmo_lns.hook import on_import, wrap

__all__ = ["register"]


def register() -> None:
    """Arrange that models and checkpoints are checked once OLMo-core's modules are imported. Idempotent."""
    on_import("olmo_core.nn.transformer.config", _wrap_config)
    on_import("olmo_core.nn.transformer.model", _wrap_model)
    on_import("olmo_core.train.checkpoint", _wrap_checkpointer)


def _wrap_config(module: ModuleType) -> None:
    from olmo_lns.integrations.olmo_core.model import wrap_build

    wrap("olmo_core.nn.transformer.config:TransformerConfig.build", wrap_build)


def _wrap_model(module: ModuleType) -> None:
    from olmo_lns.integrations.olmo_core.model import wrap_init_weights

    wrap("olmo_core.nn.transformer.model:Transformer.init_weights", wrap_init_weights)


def _wrap_checkpointer(module: ModuleType) -> None:
    from olmo_lns.integrations.olmo_core.checkpoint import wrap_load

    wrap("olmo_core.train.checkpoint:Checkpointer.load", wrap_load)
