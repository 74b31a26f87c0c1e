"""What each of two gloo ranks does when the guard of checkpoints reads a record."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist
from olmo_core.distributed.checkpoint import load_model_and_optim_state, save_model_and_optim_state

from olmo_lns.errors import CheckpointMismatchError
from olmo_lns.integrations.olmo_core.record import record_of
from olmo_lns.olmo_core import apply
from support import olmo_core_models as small


def unreadable() -> None:
    """Only the first rank looks; both stop, with its words."""
    with pytest.raises(
        CheckpointMismatchError, match="nowhere://here: lns.json and .*NotImplementedError: file_exists"
    ):
        load_model_and_optim_state("nowhere://here", apply(small.config()).build())


def groups_of_their_own(folder: Path) -> None:
    """Each rank alone is a group, and loads another model from another checkpoint."""
    rank = dist.get_rank()
    group = [dist.new_group([0]), dist.new_group([1])][rank]
    made = (small.config(), apply(small.config()))[rank]
    built, path = made.build(), folder / f"of rank {rank}"
    save_model_and_optim_state(path, built, process_group=group)
    record_of(built).write(path)
    load_model_and_optim_state(path, made.build(), process_group=group)
