"""The processes of a command: those that torchrun has started, and their process group."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Iterator

from olmo_lns.errors import LNSConfigError

if TYPE_CHECKING:
    import torch


def one_process(what: str) -> None:
    """Check that ``what`` runs alone.

    :raises LNSConfigError: torchrun has started several processes, and each would do the same work.
    """
    if (world := os.environ.get("WORLD_SIZE", "").strip() or "1") != "1":
        raise LNSConfigError(f"{what} runs in one process: found WORLD_SIZE={world}; start it without torchrun")


@contextmanager
def process_group() -> Iterator[torch.device]:
    """A process group from torchrun's environment, or of this process alone, which needs neither port nor network.

    Yields the device of this process: CUDA (number ``LOCAL_RANK``) where there is some, else the CPU. A group that is
    already up is used and left up.
    """
    import torch
    import torch.distributed as dist

    # Its functions keep the group of the moment they are defined as a default argument. Imported later (torch._dynamo,
    # OLMo and FSDP do), they would keep ours, whose threads then live on and can abort the process as it exits.
    import torch.distributed.nn

    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    device = torch.device("cuda" if cuda else "cpu")
    if dist.is_initialized():
        yield device
        return
    backend = "nccl" if cuda else "gloo"
    world = os.environ.get("WORLD_SIZE", "")
    if world and ("RANK" in os.environ or world != "1"):  # torch names the other variable that is missing
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield device
    finally:
        dist.destroy_process_group()
