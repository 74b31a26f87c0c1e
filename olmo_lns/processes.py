"""The processes of a command, as torchrun starts them, and their process group."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Iterator

from olmo_lns.errors import LNSConfigError

if TYPE_CHECKING:
    import torch


def one_process(what: str) -> None:
    """Check that the command ``what`` runs in one process.

    :raises LNSConfigError: torchrun has started several processes, which would all do the same work.
    """
    if (world := os.environ.get("WORLD_SIZE", "").strip() or "1") != "1":
        raise LNSConfigError(f"{what} runs in one process: found WORLD_SIZE={world}; start it without torchrun")


@contextmanager
def process_group() -> Iterator[torch.device]:
    """Open a process group from torchrun's environment, or of this process alone, without port or network.

    Yields the device of this process: CUDA number ``LOCAL_RANK``, or the CPU if there is no CUDA.
    """
    import torch
    import torch.distributed as dist

    # The functions of this module keep the current group as a default argument. Imported later (by torch._dynamo, OLMo
    # or FSDP), they would keep the group below; its threads would then survive and can abort the process at exit.
    import torch.distributed.nn

    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    backend = "nccl" if cuda else "gloo"
    world = os.environ.get("WORLD_SIZE", "")
    if world and ("RANK" in os.environ or world != "1"):  # torch's error names the missing variable
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield torch.device("cuda" if cuda else "cpu")
    finally:
        dist.destroy_process_group()
