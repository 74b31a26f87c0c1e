"""The mark in a trainer's state: a scheme's checkpoint is not resumed by an OLMo that runs without this package.

Where the plugin is switched off (``OLMO_LNS_DISABLE=1``) nothing of ours compares a checkpoint with the model that
runs, so the checkpoint itself must refuse. OLMo's Trainer unpickles its state (train.pt, train/rank*.pt, rank*.pt)
in every restore; under a scheme that state holds one more member, which only :func:`needs_olmo_lns` can rebuild.
"""

from __future__ import annotations

import sys
from typing import Any, Callable

from olmo_lns import environment
from olmo_lns.errors import CheckpointMismatchError
from olmo_lns.integrations.patching import is_patched

__all__ = ["KEY", "Mark", "allow_in_safe_loading", "needs_olmo_lns", "wrap_trainer_state"]

#: Of the member. No word that another part of the state could share with it in the pickle.
KEY = "trained under a scheme of olmo-lns"


class Mark:
    """:param record: of the model that was saved, in words. :param values: the record; a mark before 0.2 has none."""

    def __init__(self, record: str, values: dict[str, Any] | None = None) -> None:
        self.record, self.values = record, values

    def __reduce__(self) -> tuple[Callable[..., Mark], tuple[str, dict[str, Any] | None]]:
        return needs_olmo_lns, (self.record, self.values)


def needs_olmo_lns(record: str, values: dict[str, Any] | None = None) -> Mark:
    """Rebuild the mark. Its module and name stand in saved checkpoints and are never changed.

    :raises CheckpointMismatchError: OLMo runs in this process, and without the plugin.
    """
    config = sys.modules.get("olmo.config")
    if config is not None and not is_patched(config.BaseConfig.load):
        how = f"unset {environment.DISABLE}" if environment.is_set(environment.DISABLE) else "launch with -m olmo_lns"
        raise CheckpointMismatchError(
            f"this checkpoint was saved with {record}, but OLMo runs here without olmo-lns: its blocks would run "
            f"without the scheme it was trained with. To resume it, {how}; for stock OLMo, fold it: "
            "olmo-lns export CHECKPOINT OUT --format olmo."
        )
    return Mark(record, values)


def wrap_trainer_state(trainer_state_dict: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Wrap ``Trainer.trainer_state_dict``, what every checkpointer of OLMo's saves beside model and optimizer."""

    def wrapped(self: Any) -> dict[str, Any]:
        from olmo_lns.integrations.olmo.model import record_of

        state = trainer_state_dict(self)
        record = record_of(self.model)
        return {**state, KEY: Mark(str(record), record.as_dict())} if record.active else state

    return wrapped


def allow_in_safe_loading() -> None:
    """For an OLMo that loads with torch's ``weights_only=True`` (ai2-olmo 0.6.0 under torch 2.6 and newer)."""
    import torch

    torch.serialization.add_safe_globals([needs_olmo_lns])
