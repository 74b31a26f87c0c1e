"""Connect, lock and check the processes of a command, and raise one process's problem in all of them."""

from __future__ import annotations

import fcntl
import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Iterator

from olmo_lns.errors import LNSConfigError, LNSError, MeasurementError

if TYPE_CHECKING:
    import torch


def one_process(command: str) -> None:
    """Check that a command was started in one process.

    :param command: name of the command, for the message.
    :raises LNSConfigError: torchrun has started several processes, which would all do the same work.
    """
    world_size = os.environ.get("WORLD_SIZE", "").strip() or "1"
    if world_size != "1":
        raise LNSConfigError(
            f"WORLD_SIZE is {world_size}, but {command} runs in one process. Start it without torchrun, or unset "
            "WORLD_SIZE."
        )


@contextmanager
def exclusive_lock(lock: Path, problem: str) -> Iterator[int]:
    """Lock a file until the ``with`` block and all processes that inherited its descriptor have ended.

    :returns: file descriptor of the lock, for child processes.
    :raises LNSError: another process has locked the file. The message is ``problem`` with the path of the file.
    """
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LNSError(f"{problem} (The lock file is {lock}.)") from None
        yield file.fileno()


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


def raise_on_every_rank(problem: str, *, original: Exception | None = None) -> None:
    """Raise on every process of a launch if one of them has a problem, before the next collective runs.

    :param problem: this process's problem, or ``""``. Every process of the launch must call this function.
    :param original: the error of this process, which is raised itself where there is one process.
    :raises MeasurementError: the problems with their ranks.
    """
    import torch.distributed as dist

    problems: list[Any] = [problem]
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        problems = [None] * dist.get_world_size()
        dist.all_gather_object(problems, problem)
    elif original is not None:
        raise original
    if ranks := {text: rank for rank, text in enumerate(problems) if text}:
        raise MeasurementError(
            "; ".join(f"rank {rank}: {text}" for text, rank in sorted(ranks.items(), key=lambda p: p[1]))
        )
