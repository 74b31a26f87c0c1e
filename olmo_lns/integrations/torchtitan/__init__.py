"""Schemes in torchtitan. The public names are in :mod:`olmo_lns.torchtitan`.

An override of torchtitan's config tree marks norms. When ``Decoder.__init__`` has built the model, its wrapper scales
the marked norms, measures them and writes the start-up line. The other wrapped functions check that an override had an
effect, that weights are drawn as requested, and that a checkpoint has the scheme of the run.
"""

from __future__ import annotations

from types import ModuleType

from olmo_lns.hook import on_import, wrap

__all__ = ["register"]


def register() -> None:
    """Arrange that functions of torchtitan are wrapped as soon as it is imported. A second call does nothing."""
    on_import("torchtitan.models.common.decoder", _wrap_decoder)
    on_import("torchtitan.trainer", _wrap_trainer)
    on_import("torchtitan.components.checkpointer.dcp", _wrap_checkpoints)


def _wrap_decoder(module: ModuleType) -> None:
    from olmo_lns.integrations.torchtitan.initializers import wrap_init_states
    from olmo_lns.integrations.torchtitan.model import wrap_init

    wrap("torchtitan.models.common.decoder:Decoder.__init__", wrap_init)
    wrap("torchtitan.models.common.decoder:Decoder.init_states", wrap_init_states)


def _wrap_trainer(module: ModuleType) -> None:
    from olmo_lns.integrations.torchtitan.model import wrap_train

    wrap("torchtitan.trainer:Trainer.train", wrap_train)


def _wrap_checkpoints(module: ModuleType) -> None:
    from olmo_lns.integrations.torchtitan.checkpoint import wrap_load, wrap_save

    wrap("torchtitan.components.checkpointer.dcp:CheckpointManager.dcp_save", wrap_save)
    wrap("torchtitan.components.checkpointer.dcp:CheckpointManager.dcp_load", wrap_load)
