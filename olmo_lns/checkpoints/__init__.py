"""Checkpoints of each framework as they lie on disk: config, record and weights, one tensor in memory at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from olmo_lns.errors import LNSConfigError, one_line

if TYPE_CHECKING:
    from olmo_lns.checkpoints.distributed import DistributedCheckpoint
    from olmo_lns.record import Record

#: Name of the file that describes a distributed checkpoint, in its folder.
METADATA = ".metadata"


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. :raises LNSConfigError: it cannot be read, or is not an object."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise LNSConfigError(f"{path} cannot be read: {one_line(error)}") from None
    if not isinstance(values, dict):
        raise LNSConfigError(f"{path} holds a {type(values).__name__}: expected a JSON object")
    return values


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def open_distributed(folder: Path) -> DistributedCheckpoint:
    """The distributed checkpoint in ``folder``; its module, with torch's more than a second, is imported only here."""
    from olmo_lns.checkpoints.distributed import DistributedCheckpoint

    return DistributedCheckpoint(folder)


def record_in(folder: Path) -> Record | None:
    """The record of ``folder``, as its framework's integration reads it; None where the folder holds no format
    that is read here.

    :raises CheckpointMismatchError: a record that cannot be read, or is gone although its config names a scheme.
    """
    from olmo_lns.checkpoints.megatron import is_megatron, saved_args
    from olmo_lns.checkpoints.olmo import is_olmo
    from olmo_lns.checkpoints.olmo_core import OLMoCoreCheckpoint, is_olmo_core
    from olmo_lns.integrations.megatron.settings import Settings
    from olmo_lns.record import Record

    if is_olmo(folder):
        from olmo_lns.integrations.olmo.state import saved_record

        return saved_record(folder)
    if is_olmo_core(folder):
        return OLMoCoreCheckpoint.open(folder).record
    if (path := folder / "config.json").is_file():  # a stock model's has no record
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:  # transformers says so when it is loaded
            return None
        record = values.get("lns_record") if isinstance(values, dict) else None
        return None if record is None else Record.from_dict(record, source=f"{path}: lns_record")
    if is_megatron(folder):
        args = saved_args(folder)
        return Settings.of(args).record(args)
    return None
