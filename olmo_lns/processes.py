"""The process group of a command of ours: torchrun's, or of this process alone."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Iterator

if TYPE_CHECKING:
    import torch

__all__ = ["process_group"]


@contextmanager
def process_group() -> Iterator[torch.device]:
    """A process group from torchrun's environment, or of this process alone: no port, no network.

    Yields the device of this process: CUDA (the one of LOCAL_RANK) where there is some, else CPU. A group that is
    already up is used as it is, and left up.
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
    if world and ("RANK" in os.environ or world != "1"):  # torch says which other variable is missing
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield device
    finally:
        dist.destroy_process_group()
