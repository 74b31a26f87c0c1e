"""Schemes in OLMo-core. The public names are in :mod:`olmo_lns.olmo_core`.

Users select the block config of this package with ``_CLASS_``. It builds OLMo-core's own blocks and scales their norms.
The functions that are wrapped here only check. They check that every block of the complete model has the scheme,
measure its fresh weights, and compare the ``config.json`` of a checkpoint when it is loaded.
"""

from __future__ import annotations

from types import ModuleType

from olmo_lns.hook import on_import, wrap

__all__ = ["register"]


def register() -> None:
    """Arrange that functions of OLMo-core are wrapped as soon as it is imported. A second call does nothing."""
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
