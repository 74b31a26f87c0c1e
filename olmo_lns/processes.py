"""Helpers for commands that run in several processes.

They open a process group, check the number of processes, and raise an error in all processes if one of
them has a problem.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Callable, Iterator, TypeVar

from olmo_lns.errors import LNSConfigError, LNSError, MeasurementError

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


def one_process(command: str) -> None:
    """Check that a command was started in a single process.

    :param command: name of the command, for the message.
    :raises LNSConfigError: if torchrun has started several processes, which would all do the same work.
    """
    world_size = os.environ.get("WORLD_SIZE", "").strip() or "1"
    if world_size != "1":
        raise LNSConfigError(
            f"WORLD_SIZE is {world_size}, but {command} runs in one process. Start it without torchrun, or unset "
            "WORLD_SIZE."
        )


@contextmanager
def process_group() -> Iterator[torch.device]:
    """Open a process group and yield the device of this process.

    The group has the processes that torchrun has started. Without torchrun it has this process only, and needs neither
    a port nor a network. The device is the CUDA device with the number ``LOCAL_RANK``, or the CPU if there is no CUDA.
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


def is_first_process() -> bool:
    """Return true in the first process of a launch, or if there is only one process."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    return (os.environ.get("RANK", "").strip() or "0") == "0"


def on_first_rank(function: Callable[[], T]) -> T:
    """Call a function in the first process of a launch only, and use its outcome in all processes.

    Every process must call this. Use it to read a file on which all processes have to agree, since a read may fail in
    one process alone.

    :returns: what the function returned. Its type must support pickle.
    :raises Exception: what the function raised. The other processes raise an :class:`LNSError` with the same text, of
        the same class if the function raised an :class:`LNSError`.

    Example: ``config = on_first_rank(lambda: json.loads(path.read_text()))``.
    """
    import torch.distributed as dist

    is_launch = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if not is_launch or dist.get_backend() == "fake":
        return function()
    outcome: list[Any] = [None, None]
    problem: Exception | None = None
    if dist.get_rank() == 0:
        try:
            outcome[0] = function()
        except Exception as error:  # the other processes wait for the broadcast
            problem = error
            outcome[1] = error if isinstance(error, LNSError) else LNSConfigError(f"{type(error).__name__}: {error}")
    dist.broadcast_object_list(outcome, src=0)
    if problem is not None or outcome[1] is not None:
        raise problem or outcome[1]
    result: T = outcome[0]
    return result


@contextmanager
def same_outcome_on_every_rank() -> Iterator[None]:
    """Raise an error in all processes of a launch if the ``with`` block raises in one of them.

    Without this, the other processes would wait forever in their next collective. Every process must run the block. The
    class of the error is kept if it is the same in all processes that failed.
    """
    problem: Exception | None = None
    try:
        yield
    except Exception as error:
        problem = error
    raise_on_every_rank(problem)


def raise_on_every_rank(problem: Exception | str | None) -> None:
    """Raise an error in all processes of a launch if one of them has a problem.

    Without this, the other processes would wait forever in their next collective. Every process must call this
    function.

    :param problem: the error of this process or its message. None or ``""`` means that there is no problem.
    :raises Exception: ``problem`` itself if there is only one process. With several, an error whose message names the
        ranks. Its class is that of the original errors if they agree, or else :class:`MeasurementError`.
    """
    import torch.distributed as dist

    error = MeasurementError(problem) if isinstance(problem, str) and problem else problem or None
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        if isinstance(error, Exception):
            raise error
        return
    known = type(error) if isinstance(error, LNSError) else None
    text = "" if error is None else str(error) if known else f"{type(error).__name__}: {error}"
    problems: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, (known, text))
    ranks: dict[str, list[str]] = {}
    for rank, (_, found) in enumerate(problems):
        if found:
            ranks.setdefault(found, []).append(str(rank))
    if not ranks:
        return
    classes = {found for found, text in problems if text}
    error_class = classes.pop() if len(classes) == 1 else None
    message = "; ".join(f"rank {', '.join(numbers)}: {found}" for found, numbers in ranks.items())
    raise (error_class or MeasurementError)(message) from (error if isinstance(error, Exception) else None)
