"""Check and connect the processes of a command that torchrun starts."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Iterator

from olmo_lns.errors import LNSConfigError

if TYPE_CHECKING:
    import torch


def one_process(command: str) -> None:
    """Check that ``command`` runs in one process.

    :raises LNSConfigError: torchrun has started several processes, which would all do the same work.
    """
    world_size = os.environ.get("WORLD_SIZE", "").strip() or "1"
    if world_size != "1":
        raise LNSConfigError(f"{command} runs in one process: found WORLD_SIZE={world_size}; start it without torchrun")


@contextmanager
def process_group() -> Iterator[torch.device]:
    """Open a process group from torchrun's environment, or else of this process only, without a port or network.

    Yields the device of this process: CUDA number ``LOCAL_RANK``, or the CPU if there is no CUDA.
    """
    import torch
    import torch.distributed as dist

    # Functions of this module have the current group as a default argument. If torch._dynamo, OLMo or FSDP imported it
    # later, they would keep the group below alive; its threads can abort the process at exit.
    import torch.distributed.nn

    has_cuda = torch.cuda.is_available()
    if has_cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    backend = "nccl" if has_cuda else "gloo"
    world_size = os.environ.get("WORLD_SIZE", "")
    if world_size and ("RANK" in os.environ or world_size != "1"):  # torch's error names a missing variable
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield torch.device("cuda" if has_cuda else "cpu")
    finally:
        dist.destroy_process_group()
