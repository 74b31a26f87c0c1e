"""Weights of a checkpoint: read one at a time, and compared with what its config implies."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Callable, Mapping, Sequence

import torch

from olmo_lns.errors import LNSConfigError
from olmo_lns.norm.dtypes import DTYPES

__all__ = ["ChunkFunction", "LazyTensor", "check_depth", "check_dtype", "check_shapes", "join_rows", "split_rows"]

#: (name, offsets of the chunk in the whole tensor, chunk) -> new chunk of the same shape.
ChunkFunction = Callable[[str, tuple[int, ...], torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class LazyTensor:
    """A tensor whose shape and dtype are known, and whose data is read when it is needed.

    :param load: reads the tensor.
    :param memory: bytes of memory of its own that ``load`` takes; 0 where the result lies in a mapped file, and then
        nobody changes it in place.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    load: Callable[[], torch.Tensor]
    memory: int = 0

    def map(self, function: Callable[[torch.Tensor], torch.Tensor], **changes: Any) -> LazyTensor:
        """The tensor ``function(self)``, in new memory; ``changes`` names its shape or dtype where they differ."""
        made = replace(self, load=lambda: function(self.load()), **changes)
        return replace(made, memory=changes.get("memory", self.memory + made.nbytes))

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def split_rows(tensor: LazyTensor, counts: Sequence[int]) -> list[LazyTensor]:
    """``tensor`` cut along its first axis, ``counts`` rows each; every part is a copy, so that none keeps the whole."""

    def part(end: int, count: int) -> LazyTensor:
        return tensor.map(lambda whole: whole[end - count : end].clone(), shape=(count, *tensor.shape[1:]))

    return [part(end, count) for end, count in zip(accumulate(counts), counts, strict=True)]


def join_rows(*parts: LazyTensor) -> LazyTensor:
    """One tensor of the rows of ``parts``, of one dtype, one after another."""
    shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
    memory = sum(part.memory + part.nbytes for part in parts)
    return LazyTensor(shape, parts[0].dtype, lambda: torch.cat([part.load() for part in parts]), memory)


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
