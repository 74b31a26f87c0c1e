"""Weights of a checkpoint: read one at a time, and compared with what its config implies."""

from __future__ import annotations

import weakref
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from threading import Lock
from typing import Any, Callable, Mapping, Protocol, Sequence, TypeVar

import torch

from olmo_lns.errors import LNSConfigError
from olmo_lns.norm.dtypes import DTYPES

__all__ = [
    "ChunkFunction",
    "LazyTensor",
    "check_depth",
    "check_dtype",
    "check_shapes",
    "for_each",
    "join_rows",
    "split_rows",
]

#: (name, offsets of the chunk in the whole tensor, chunk) -> new chunk of the same shape.
ChunkFunction = Callable[[str, tuple[int, ...], torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is read when it is needed: its shape and dtype are known, its data is not held.

    :param load: reads the tensor, whose data is the caller's own, or maps it from its file so that no change to it
        reaches the file; called once for each time it is written.
    :param raw: where there is one, reads the same bytes in row-major order as 1-D ``uint8``, at any address: for who
        only copies them.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    load: Callable[[], torch.Tensor]
    raw: Callable[[], torch.Tensor] | None = None
    #: What :func:`join_rows` put together.
    parts: tuple[LazyTensor, ...] = ()

    def map(self, function: Callable[[torch.Tensor], torch.Tensor], **changes: object) -> LazyTensor:
        """The tensor ``function(self)``; ``changes`` names its shape or dtype where they differ."""
        return replace(self, load=lambda: function(self.load()), raw=None, parts=(), **changes)  # type: ignore[arg-type]

    def with_rows(self, function: Callable[[torch.Tensor], torch.Tensor]) -> LazyTensor:
        """The tensor with its rows in the order that ``function`` gives them: (rows, ...) to the same shape.

        What moves whole rows moves their bytes as well, as (rows, bytes of a row).
        """
        raw = self.raw
        moved = None if raw is None else lambda: function(raw().view(self.shape[0], -1)).reshape(-1)
        return replace(self, load=lambda: function(self.load()), raw=moved, parts=())

    @property
    def read(self) -> Callable[[], torch.Tensor]:
        """For who writes it: ``raw`` or ``load``."""
        return self.raw or self.load

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Lazy(Protocol):
    """What :func:`for_each` needs of a :class:`LazyTensor`, or of something else that is read when its turn comes."""

    @property
    def nbytes(self) -> int: ...
    @property
    def read(self) -> Callable[[], Any]: ...


Item = TypeVar("Item", bound=Lazy)
#: Tensors that are read at once, while the one before them is used.
_AHEAD = 2


def split_rows(tensor: LazyTensor, counts: Sequence[int]) -> list[LazyTensor]:
    """``tensor`` cut along its first axis, ``counts`` rows each: views, so its memory is that of the whole.

    While one of them is in use the whole is not read again for the next. What was joined of such parts is not read as a
    whole: they are given back.
    """
    if [part.shape[0] for part in tensor.parts] == [*counts]:
        return [*tensor.parts]
    spans = [(end - count, count) for end, count in zip(accumulate(counts), counts, strict=True)]
    row = torch.Size(tensor.shape[1:]).numel() * tensor.dtype.itemsize
    loads = _cut(tensor.load, spans)
    raws = (
        _cut(tensor.raw, [(start * row, count * row) for start, count in spans]) if tensor.raw else [None] * len(spans)
    )
    return [
        replace(tensor, shape=(count, *tensor.shape[1:]), load=load, raw=raw)
        for count, load, raw in zip(counts, loads, raws, strict=True)
    ]


def join_rows(*parts: LazyTensor) -> LazyTensor:
    """One tensor of the rows of ``parts``, of one dtype, one after another."""
    shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
    raw = (lambda: torch.cat([part.read() for part in parts])) if all(part.raw for part in parts) else None
    return LazyTensor(shape, parts[0].dtype, lambda: torch.cat([part.load() for part in parts]), raw, parts)


def _cut(read: Callable[[], torch.Tensor], spans: Sequence[tuple[int, int]]) -> list[Callable[[], torch.Tensor]]:
    """What reads ``read()[start : start + count]``, for each of ``spans``."""
    held: list[weakref.ref[torch.Tensor]] = []
    lock = Lock()  # who reads the next part meanwhile waits for the whole

    def cut(start: int, count: int) -> torch.Tensor:
        with lock:
            whole = held[0]() if held else None
            if whole is None:
                whole = read()
                held[:] = [weakref.ref(whole)]
        part = whole[start : start + count]
        part.whole = whole  # type: ignore[attr-defined]  # a view keeps the memory of the whole, not its object
        return part

    return [partial(cut, *span) for span in spans]


def for_each(tensors: Sequence[Item], use: Callable[[Item, Any], object]) -> None:
    """``use(tensor, its data)`` for each in turn; those that follow are read meanwhile, two at once.

    Unless all of these together are larger than the largest: reading ahead takes no more memory than that one does.
    """
    largest = max((tensor.nbytes for tensor in tensors), default=0)
    reading: deque[Future[Any]] = deque()
    with ThreadPoolExecutor(_AHEAD, "read-ahead") as pool:
        for number, tensor in enumerate(tensors):
            for following in tensors[number + len(reading) : number + _AHEAD + 1]:
                held = tensors[number : number + len(reading) + 1]
                if reading and sum(each.nbytes for each in held) > largest:
                    break
                reading.append(pool.submit(following.read))
            data = reading.popleft().result()
            use(tensor, data)
            del data  # before the next one is read


def check_depth(layers: int, found: Mapping[str, LazyTensor], source: object) -> None:
    """Before a name is made for every weight of ``layers`` layers.

    :raises LNSConfigError: there are not even as many weights as layers.
    """
    if layers > len(found):
        raise LNSConfigError(f"{source}: its config says {layers} layers, but it holds only {len(found)} weights")


def check_dtype(name: str, dtype: torch.dtype, source: object) -> None:
    """:raises LNSConfigError: not a plain floating dtype."""
    if dtype not in (*DTYPES.values(), torch.float64):
        raise LNSConfigError(
            f"{source}: {name} is {str(dtype).removeprefix('torch.')}: expected fp32, bf16, fp16 or fp64; quantized "
            "weights cannot be multiplied exactly"
        )


def check_shapes(found: Mapping[str, LazyTensor], expected: Mapping[str, tuple[int, ...]], source: object) -> None:
    """:raises LNSConfigError: keys are missing or unexpected, or a shape or dtype is not what it should be."""
    for name, tensor in found.items():
        check_dtype(name, tensor.dtype, source)
    missing, extra = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    for problem, names in (("lacks", missing), ("holds unexpected", extra)):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise LNSConfigError(
                f"{source} {problem} the weight {names[0]}{more}: it is damaged, or not the model of its config"
            )
    for name, shape in expected.items():
        if tuple(found[name].shape) != tuple(shape):
            raise LNSConfigError(
                f"{source}: {name} has shape {tuple(found[name].shape)}, but its config implies {tuple(shape)}"
            )
