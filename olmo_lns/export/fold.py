"""Multiply weights by a factor and round once, each when its turn to be written comes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from threading import Lock
from typing import Callable, Iterable, Mapping

import torch

from olmo_lns.checkpoints.tensors import LazyTensor, check_dtype
from olmo_lns.errors import LNSConfigError
from olmo_lns.export.memory import Memory
from olmo_lns.schemes import SUB_LAYERS, Scheme

__all__ = [
    "Factor",
    "Rounding",
    "block_factors",
    "cast",
    "norm_factor",
    "scaled",
]

#: What a tensor is multiplied by: a number, or one for each of its rows.
Factor = float | torch.Tensor
#: Elements handled at once: their float64 intermediates stay in the cache, which halves the time, and torch takes one
#: thread for so few (several would wait for one another longer than they work where the machine is busy).
_CHUNK = 1 << 15


def norm_factor(scheme: Scheme, n_layers: int) -> Callable[[int], float]:
    """1-based layer number -> what both block norms are multiplied by under ``scheme``.

    :raises LNSConfigError: a scheme that does more than multiply them; so does the function where they differ.
    """
    if not scheme.keeps_forward(n_layers):
        raise LNSConfigError(
            f"scheme {scheme} ({scheme.definition.title}) cannot be folded into a stock Pre-LN model: it does more "
            "than multiply the norms in front of the sub-layers"
        )

    def of_both(number: int) -> float:
        scales = {scheme.plan(number, n_layers, sub_layer).norm_scale for sub_layer in SUB_LAYERS}
        if len(scales) > 1:
            raise LNSConfigError(f"scheme {scheme} multiplies the two norms of block {number} differently: {scales}")
        return scales.pop()

    return of_both


@dataclass
class Rounding:
    """Largest relative error that rounding made, over all tensors that were changed.

    Relative to the exact product in float64; elements that are zero are left out. Of the tensors in
    ``cast`` only the dtype is another.
    """

    worst: float = 0.0
    where: str = ""
    multiplied: set[str] = field(default_factory=set)
    cast: set[str] = field(default_factory=set)
    _memory: Memory = field(default_factory=Memory, repr=False)
    _lock: Lock = field(default_factory=Lock, repr=False)  # several tensors are read at once

    def note(self, name: str, error: float, *, multiplied: bool) -> None:
        with self._lock:
            (self.multiplied if multiplied else self.cast).add(name)
            if error > self.worst:
                self.worst, self.where = error, name

    def scale(
        self, name: str, tensor: torch.Tensor, factor: Factor, dtype: torch.dtype, shift: float = 0.0
    ) -> torch.Tensor:
        """``(tensor + shift) * factor`` in ``dtype``, computed in float64 and rounded once.

        Where only the dtype changes, float32 shows what rounding did as well, in a third of the time.

        :param tensor: any shape, any floating dtype.
        :param factor: dimensionless; a number, or fp64 (rows,), one for each row.
        :param shift: 1.0 for a zero-centred gain, whose stored value is the gain minus one.
        :raises LNSConfigError: a finite value overflows ``dtype``, or the tensor is not of a plain floating dtype.
        """
        check_dtype(name, tensor.dtype, "cannot scale")
        same = isinstance(factor, float) and factor == 1.0 and shift == 0.0
        if same and tensor.dtype == dtype:
            return tensor
        result = self._memory.empty(tensor.shape, dtype)
        source, target = tensor.reshape(-1), result.view(-1)
        wide = torch.float32 if same and tensor.dtype != torch.float64 else torch.float64
        products, errors = (torch.empty(min(_CHUNK, source.numel()), dtype=wide) for _ in range(2))
        worst = 0.0
        for start in range(0, source.numel(), _CHUNK):
            part = source[start : start + _CHUNK]
            product, error = products[: len(part)], errors[: len(part)]
            exact = part if part.dtype == wide else product.copy_(part)
            if shift:
                exact = exact + shift
            if not same:
                exact = torch.mul(exact, _of_elements(factor, tensor, start), out=product)
            rounded = target[start : start + _CHUNK].copy_(exact)
            worst = max(worst, _largest(error.copy_(rounded).sub_(exact).div_(exact)))
        if worst == math.inf:
            raise LNSConfigError(f"{name} holds values that overflow {dtype}: choose bf16 or fp32")
        self.note(name, worst, multiplied=not same)
        return result

    def folded(
        self, name: str, tensor: LazyTensor, factor: Factor, dtype: torch.dtype, shift: float = 0.0
    ) -> LazyTensor:
        """:meth:`scale`, when the tensor is read."""
        return tensor.map(lambda t: self.scale(name, t, factor, dtype, shift), dtype=dtype)


def _largest(error: torch.Tensor) -> float:
    """Of the magnitudes; nan, which zeros and what is not finite give, counts as 0. Changes ``error``."""
    low, high = torch.aminmax(error)
    if math.isnan(largest := max(-low.item(), high.item())):
        largest = error.abs_().nan_to_num_(nan=0.0, posinf=math.inf).max().item()
    return largest


def _of_elements(factor: Factor, tensor: torch.Tensor, start: int) -> Factor:
    """``factor`` for the elements of a chunk that begins at ``start``."""
    if isinstance(factor, float):
        return factor
    width = max(1, tensor.numel() // max(1, len(factor)))
    return factor[torch.arange(start, min(start + _CHUNK, tensor.numel())) // width]


def cast(name: str, tensor: LazyTensor, dtype: torch.dtype, rounding: Rounding) -> LazyTensor:
    """``tensor`` in ``dtype``: itself when it has that dtype already."""
    return tensor if tensor.dtype == dtype else rounding.folded(name, tensor, 1.0, dtype)


def scaled(
    tensors: Mapping[str, LazyTensor], factors: Mapping[str, Factor], rounding: Rounding, dtype: torch.dtype | None
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
