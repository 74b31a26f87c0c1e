"""Multiply weights by a factor and round once; one tensor in memory at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Callable, Iterable, Mapping

import torch

from olmo_lns.errors import LNSConfigError

__all__ = ["DTYPES", "LazyTensor", "Rounding", "block_factors", "cast", "check_shapes", "one_line", "scaled"]

#: Names on the command line -> dtypes that weights may be written in.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

#: Elements handled at once, so that the float64 intermediates stay at 8 MiB each whatever the tensor.
_CHUNK = 1 << 20


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is read when it is needed: its shape and dtype are known, its data is not held.

    :param load: reads the tensor into fresh memory; called once for each time it is written.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    load: Callable[[], torch.Tensor]

    def map(self, function: Callable[[torch.Tensor], torch.Tensor], **changes: object) -> LazyTensor:
        """The tensor ``function(self)``; ``changes`` names its shape or dtype where they differ."""
        return replace(self, load=lambda: function(self.load()), **changes)  # type: ignore[arg-type]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass
class Rounding:
    """Largest relative error that rounding made, over all tensors that were changed.

    Relative to the exact product in float64; elements that are zero are left out.
    """

    worst: float = 0.0
    where: str = ""
    changed: set[str] = field(default_factory=set)

    def note(self, name: str, error: float) -> None:
        self.changed.add(name)
        if error > self.worst:
            self.worst, self.where = error, name

    def scale(
        self, name: str, tensor: torch.Tensor, factor: float, dtype: torch.dtype, shift: float = 0.0
    ) -> torch.Tensor:
        """``(tensor + shift) * factor`` in ``dtype``, computed in float64 and rounded once.

        :param tensor: any shape, any floating dtype.
        :param factor: dimensionless.
        :param shift: 1.0 for a zero-centred gain, whose stored value is the gain minus one.
        :raises LNSConfigError: a finite value overflows ``dtype``.
        """
        result = torch.empty(tensor.shape, dtype=dtype)
        source, target = tensor.reshape(-1), result.view(-1)
        worst = 0.0
        for start in range(0, source.numel(), _CHUNK):
            exact = (source[start : start + _CHUNK].double() + shift) * factor
            rounded = target[start : start + _CHUNK].copy_(exact)
            # In place, because this is most of the work. Zeros, and what is not finite, give nan.
            error = rounded.double().sub_(exact).div_(exact).abs_().nan_to_num_(nan=0.0, posinf=math.inf)
            worst = max(worst, error.max().item())
        if worst == math.inf:
            raise LNSConfigError(f"{name} holds values that overflow {dtype}: choose bf16 or fp32")
        self.note(name, worst)
        return result

    def folded(
        self, name: str, tensor: LazyTensor, factor: float, dtype: torch.dtype, shift: float = 0.0
    ) -> LazyTensor:
        """:meth:`scale`, when the tensor is read."""
        return tensor.map(lambda t: self.scale(name, t, factor, dtype, shift), dtype=dtype)


def cast(name: str, tensor: LazyTensor, dtype: torch.dtype, rounding: Rounding) -> LazyTensor:
    """``tensor`` in ``dtype``: itself when it has that dtype already."""
    return tensor if tensor.dtype == dtype else rounding.folded(name, tensor, 1.0, dtype)


def scaled(
    tensors: Mapping[str, LazyTensor], factors: Mapping[str, float], rounding: Rounding, dtype: torch.dtype | None
) -> dict[str, LazyTensor]:
    """``tensors`` multiplied by ``factors`` where they have one, in ``dtype`` (None: each in its own)."""
    return {
        name: rounding.folded(name, tensor, factors[name], dtype or tensor.dtype)
        if name in factors
        else cast(name, tensor, dtype or tensor.dtype, rounding)
        for name, tensor in tensors.items()
    }


def block_factors(
    names_of_block: Callable[[int], Iterable[str]], layers: int, scale: Callable[[int], float]
) -> dict[str, float]:
    """Parameter name -> factor. ``names_of_block`` gets the 0-based block index, ``scale`` the 1-based number."""
    return {name: scale(index + 1) for index in range(layers) for name in names_of_block(index)}


def check_shapes(found: Mapping[str, LazyTensor], expected: Mapping[str, tuple[int, ...]], source: object) -> None:
    """:raises LNSConfigError: keys are missing or unexpected, or a shape is not what the config says."""
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


def one_line(error: BaseException, limit: int = 200) -> str:
    """First line of an upstream error's text, for a one-line message."""
    text = str(error).strip().splitlines()
    return (text[0] if text else type(error).__name__)[:limit]
