"""Checkpoints of each framework as they lie on disk: config, record and weights, one tensor in memory at a time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from olmo_lns.checkpoints.distributed import DistributedCheckpoint

#: Name of the file that describes a distributed checkpoint, in its folder.
METADATA = ".metadata"


def open_distributed(folder: Path) -> DistributedCheckpoint:
    """The distributed checkpoint in ``folder``; its module, with torch's more than a second, is imported only here."""
    from olmo_lns.checkpoints.distributed import DistributedCheckpoint

    return DistributedCheckpoint(folder)
