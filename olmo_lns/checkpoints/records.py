"""What a folder says about the model in it, whatever kind of checkpoint or model folder it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from olmo_lns.checkpoints.megatron import is_megatron, saved_args
from olmo_lns.checkpoints.olmo import is_olmo
from olmo_lns.checkpoints.olmo_core import OLMoCoreCheckpoint, is_olmo_core
from olmo_lns.integrations.megatron.settings import Settings
from olmo_lns.record import Record

__all__ = ["record_in"]


def record_in(folder: Path) -> Record | None:
    """The record of ``folder``, as its framework's integration reads it; None where no format of ours is in it.

    :raises CheckpointMismatchError: a record that cannot be read, or is gone although its config names a scheme.
    """
    if is_olmo(folder):
        from olmo_lns.integrations.olmo.checkpoint import saved_record

        return saved_record(folder)
    if is_olmo_core(folder):
        return OLMoCoreCheckpoint.open(folder).record
    if (folder / "config.json").is_file():
        return _of_transformers(folder / "config.json")
    if is_megatron(folder):
        args = saved_args(folder)
        return Settings.of(args).record(args)
    return None


def _of_transformers(path: Path) -> Record | None:
    """``lns_record`` of a ``config.json``; a stock model's has none."""
    try:
        values: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:  # transformers says so when it is loaded
        return None
    record = values.get("lns_record") if isinstance(values, dict) else None
    return None if record is None else Record.from_dict(record, source=f"{path}: lns_record")
