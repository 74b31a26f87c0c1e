"""Types of command-line arguments, checked before anything is loaded, and the process group of a command."""

from __future__ import annotations

import argparse
import math
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Callable, Iterator

if TYPE_CHECKING:
    import torch

#: dtype on the command line -> torch's name; :data:`olmo_lns.norm.dtypes.DTYPES` has the dtypes themselves.
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def at_least(smallest: int, below: float = math.inf) -> Callable[[str], int]:
    """A whole number that is no smaller, and smaller than ``below``.

    The function that is returned raises ``argparse.ArgumentTypeError``.

    Example: ``parser.add_argument("--steps", type=at_least(1))``.
    """
    expected = f"a whole number >= {smallest}" + ("" if below == math.inf else f" and < {below}")

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = smallest - 1
        if not smallest <= value < below:
            raise argparse.ArgumentTypeError(f"expected {expected}, found {text!r}")
        return value

    return number


#: A whole number that torch's generators take.
seed = at_least(0, below=1 << 63)


def above_zero(text: str) -> float:
    """A finite number above 0, such as ``1e-3``.

    :raises argparse.ArgumentTypeError: anything else.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, found {text!r}")
    return value


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
