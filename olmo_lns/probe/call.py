"""The call of a block in a model's forward, and how to repeat it.

A :class:`Call` has the arguments that a block received, and records which of them is the stream and how the block
returns the stream. Its method :meth:`Call.replay` runs the block, or a copy of it, on a new stream:

.. code-block:: python

    call = Call((x, mask), {}, place=0)  # the model called block(x, mask), and x is the stream
    call.replay(block, 2.0 * x)  # block(2.0 * x, mask)

All random numbers of a replay come from the seed of the call. Two replays therefore use equal random numbers, and
differ only because their streams differ.
"""

from __future__ import annotations

import copy
import random
import sys
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Callable, Iterable, Iterator, Mapping

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from olmo_lns.response import first_output


class BlockFailed(Exception):
    """The code of the block, or of one of its modules, raised an error while the probe copied or ran it.

    The text of this exception is the class and the text of the block's error, such as ``"RuntimeError: …"``. The block
    may raise an error of any class.
    """


@contextmanager
def code_of_the_block() -> Iterator[None]:
    """Convert the errors of the model's code in this context into a :class:`BlockFailed`.

    :raises BlockFailed: if the code raises an error.
    """
    try:
        yield
    except (NotPreLN, BlockFailed):
        raise
    except Exception as error:
        raise BlockFailed(f"{type(error).__name__}: {error}") from error


class NotPreLN(Exception):
    """The block is not Pre-LN.

    :param reason: why it is not, as the end of a message.
    :param norms_argument_may_help: true if ``apply`` can still succeed if the user passes ``norms=``.
    """

    def __init__(self, reason: str, *, norms_argument_may_help: bool = False) -> None:
        super().__init__(reason)
        self.norms_argument_may_help = norms_argument_may_help


@dataclass(frozen=True)
class Call:
    """The arguments of one call of a block.

    :param args: positional arguments of the call.
    :param kwargs: keyword arguments of the call.
    :param place: position or keyword of the stream among the arguments.
    :param returns_parts: true if the block returns several tensors, such as (hidden, residual). Their sum is the
        stream.
    :param returns_change: true if the block returns only the change, which the model itself adds to the stream.
    :param seed: seed of the random generators during a replay.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    place: int | str
    returns_parts: bool = False
    returns_change: bool = False
    seed: int = 0

    @property
    def stream(self) -> torch.Tensor:
        return self.stream_among(self.args, self.kwargs)

    def stream_among(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
        """Return the stream among the arguments of another call of the same block."""
        stream: torch.Tensor = args[self.place] if isinstance(self.place, int) else kwargs[self.place]
        return stream

    def with_stream(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], x: torch.Tensor
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of another call of the same block with ``x`` in place of its stream."""
        if isinstance(self.place, str):
            return args, {**kwargs, self.place: x}
        return (*args[: self.place], x, *args[self.place + 1 :]), dict(kwargs)

    def replay(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Run ``block`` on the stream ``x`` and otherwise unchanged arguments. Return the stream after the block."""
        args, kwargs = copy.deepcopy((list(self.args), dict(self.kwargs)))
        (args if isinstance(self.place, int) else kwargs)[self.place] = x.clone()  # type: ignore[index]
        with _seeded(x.device, self.seed):
            output = block(*args, **kwargs)
        if (after := stream_of(output)) is None:
            raise NotPreLN(
                f"its output has the type {type(output).__name__}. Expected a tensor or a tuple that starts with one"
            )
        if self.returns_parts:
            parts = [part for part in tree_leaves(output) if torch.is_tensor(part) and part.shape == x.shape]
            return torch.stack(parts).sum(0)
        return x + after if self.returns_change else after

    def tensors(self) -> list[torch.Tensor]:
        """Return all tensors among the arguments, also those in lists, tuples and dicts."""
        return [leaf for leaf in tree_leaves((self.args, dict(self.kwargs))) if torch.is_tensor(leaf)]

    def with_tensor(self, index: int, value: torch.Tensor) -> Call:
        """Return a copy of the call in which ``value`` replaces the tensor ``tensors()[index]``."""
        replaced = self.tensors()[index]
        args, kwargs = tree_map(lambda leaf: value if leaf is replaced else leaf, (self.args, dict(self.kwargs)))
        return replace(self, args=args, kwargs=kwargs)

    def detached(self, dtype: torch.dtype | None) -> Call:
        """Return a copy of the call whose tensors have no gradients, and whose floating tensors have this dtype.

        :param dtype: None keeps the dtypes.
        """
        detached = tree_map(
            lambda leaf: leaf.detach() if torch.is_tensor(leaf) else leaf, (self.args, dict(self.kwargs))
        )
        args, kwargs = detached if dtype is None else converted(detached, dtype)
        return replace(self, args=args, kwargs=kwargs)


def converted(value: Any, dtype: torch.dtype, *, is_kept: Callable[[Any], bool] = lambda value: False) -> Any:
    """Convert an argument of a call, or several, so that all floating tensors have this dtype.

    :param value: a tensor, a list, tuple or dict of tensors, or anything else, which is returned unchanged.
    :param is_kept: true for a list or dict that is not converted, and stays the same object.
    :returns: the converted argument. Lists, tuples and dicts are new ones.
    """

    def convert(leaf: Any) -> Any:
        return leaf.to(dtype) if torch.is_tensor(leaf) and leaf.is_floating_point() else leaf

    return tree_map(convert, value, is_leaf=is_kept)


def stream_of(output: Any) -> torch.Tensor | None:
    """Return the stream in a block's output, or None if the output has none.

    The stream is the output itself, the first element of a tuple or list, or the field ``last_hidden_state``.
    """
    output = getattr(first_output(output), "last_hidden_state", first_output(output))
    return output if torch.is_tensor(output) else None


def seed_generators(device: torch.device, seed: int) -> None:
    """Seed the random generators that a block may use."""
    # torch.manual_seed also prepares a later start of CUDA and stores a stack trace for it at each call. On a CPU
    # that would take half of the probe's time.
    (torch.default_generator if device.type == "cpu" else torch).manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed)


@contextmanager
def _seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Seed the random generators that a block may use. Afterwards, restore the states of Python's and numpy's."""
    numpy, state = sys.modules.get("numpy"), random.getstate()
    numpy_state = None if numpy is None else numpy.random.get_state()
    seed_generators(device, seed)
    try:
        yield
    finally:
        random.setstate(state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)


@contextmanager
def same_randomness(device: torch.device) -> Iterator[None]:
    """Seed all random generators with 0, and restore their states when the context ends.

    Two forwards in two such contexts use equal random numbers.
    """
    with torch.random.fork_rng([device] if device.type == "cuda" else []), _seeded(device, 0):
        yield


@contextmanager
def hooks(handles: Iterable[Any]) -> Iterator[None]:
    """Remove the hooks with these handles when the context ends."""
    registered: list[Any] = []
    try:
        for handle in handles:  # a generator registers them one by one, and may fail
            registered.append(handle)
        yield
    finally:
        for handle in registered:
            handle.remove()
