"""Find the residual output projections of a block by what they do.

A residual output projection is the last matrix of a branch, whose output is added to the stream. The names of modules
and the order of a matrix's dimensions do not matter.
"""

from __future__ import annotations

import re
from collections import defaultdict
from contextlib import ExitStack, contextmanager
from typing import Any, Callable, Iterator

import torch
from torch import nn

#: Among parameters whose names differ only in a number, such as those of experts, this many are examined at the
#: beginning of the row and as many at its end. Parameters without an effect are not counted.
_EXAMINED_PER_END = 2
#: A matrix with fewer elements for each channel may hold scales of a branch, and is no projection.
_FEWEST_INPUTS = 8
#: The compared results are differences of two runs, and sums of several channels, so their rounding adds up.
_SEVERAL_ROUNDINGS = 10
#: In place of a dimension: the parameter is no projection.
_NO_AXIS = -1


def residual_projections(
    block: nn.Module, moved: Callable[[], torch.Tensor], same: float, rest: torch.Tensor | None = None
) -> dict[str, int]:
    """Find the residual output projections of a block, parameter by parameter.

    One slice of a projection belongs to each channel of the stream. If this slice is multiplied, ``block(x) - x``
    changes in that channel only, and in proportion. The function looks for parameters with this property, so the names
    of modules and the order of a matrix's dimensions do not matter.

    :param block: a block with random parameters. Each of them is changed and restored.
    :param moved: runs the block on a fixed x with its sites frozen, and returns block(x) - x, shape (…, channels).
    :param same: two results count as equal if their relative difference is below this value.
    :param rest: what ``moved`` returns while no parameter is changed, if it is known.
    :returns: name of each projection -> the dimension of the parameter that counts the channels of the stream.

    Example: for GPT-2 ``{"attn.c_proj.weight": 1, "mlp.c_proj.weight": 1}``.
    """
    search = _Search(moved, same, moved() if rest is None else rest)
    # A router may select only some experts. The others have no effect, and are judged by those that it selects.
    groups: dict[Any, list[tuple[str, nn.Parameter]]] = defaultdict(list)
    for name, parameter in block.named_parameters():
        is_matrix = parameter.dim() > 1 and parameter.numel() >= _FEWEST_INPUTS * search.width
        if is_matrix and search.width in parameter.shape:
            groups[_place(name), parameter.shape].append((name, parameter))
    projections = {}
    for group in groups.values():
        axis_of: dict[str, int] = {}
        for ordered in (group, group[::-1]):  # perhaps only the last one ends the branch
            count = 0
            for name, parameter in ordered:
                if name not in axis_of and (result := search.axis_of(parameter)) is not None:
                    axis_of[name] = result
                count += name in axis_of
                if count == _EXAMINED_PER_END:
                    break
        found = set(axis_of.values())
        for name, _ in group:
            result = axis_of.get(name, next(iter(found)) if len(found) == 1 else _NO_AXIS)
            if result != _NO_AXIS:
                projections[name] = result
    return projections


class _Search:
    """Tests of single parameters. The arguments are those of :func:`residual_projections`."""

    def __init__(self, moved: Callable[[], torch.Tensor], same: float, rest: torch.Tensor) -> None:
        self.moved, self.same, self.rest, self.width = moved, same, rest, rest.shape[-1]

    def axis_of(self, parameter: nn.Parameter) -> int | None:
        """Return the dimension of the channels, :data:`_NO_AXIS` for no projection, or None if nothing reads it."""
        is_read = False
        with _of_its_own(parameter):
            for axis in [axis for axis, size in enumerate(parameter.shape) if size == self.width]:
                if result := self._counts_channels(parameter, axis):
                    return axis
                is_read = is_read or result is not None
        return _NO_AXIS if is_read else None

    def _counts_channels(self, parameter: nn.Parameter, axis: int) -> bool | None:
        """Return true if a dimension of a parameter counts channels of the stream, or None if nothing reads it.

        The slices of the first and the last channel are multiplied, each by another factor.
        """
        ends = sorted({0, self.width - 1})

        def effect(*factors: float) -> torch.Tensor:
            with ExitStack() as stack:
                for channel, factor in zip(ends, factors, strict=False):
                    stack.enter_context(_multiplied(parameter, axis, channel, factor))
                return self.moved() - self.rest

        once = effect(2.0, 3.0)  # which adds the slice of one channel once, and that of the other twice
        if float(once.norm()) <= self.same:
            return None
        others = once.clone()
        others[..., ends] = 0.0
        sizes = [float(once[..., channel].norm()) for channel in ends]
        if float(others.norm()) > _SEVERAL_ROUNDINGS * self.same * max(sizes):
            return False
        if min(sizes) <= self.same:
            return None
        # Now twice, and once. A gate is not linear, and channels in another order are exchanged.
        expected = once[..., ends] * once.new_tensor([2.0, 0.5][: len(ends)])
        error = float((effect(3.0, 2.0)[..., ends] - expected).norm())
        return error <= _SEVERAL_ROUNDINGS * self.same * min(sizes)


def _place(name: str) -> str:
    """Replace the numbers of modules in a parameter's name: ``experts.#.w2`` for ``experts.3.w2.weight``.

    A number in the last part of a name is kept, since it distinguishes different matrices of one module.
    """
    *outer, last = name.removesuffix(".weight").split(".")
    is_number = last.isdigit() and not any(part.isdigit() for part in outer)
    return ".".join([*(re.sub(r"\d+", "#", part) for part in outer), "#" if is_number else last])


@contextmanager
def _of_its_own(parameter: nn.Parameter) -> Iterator[None]:
    """Move a parameter to separate memory while the context runs, since it may share its memory with others."""
    value = parameter.data
    parameter.data = value.clone()
    try:
        yield
    finally:
        parameter.data = value


@contextmanager
def _multiplied(parameter: nn.Parameter, axis: int, channel: int, factor: float) -> Iterator[None]:
    """Multiply a channel's slice of a parameter while the context runs."""
    part = parameter.data.select(axis, channel)
    value = part.clone()
    part.mul_(factor)
    try:
        yield
    finally:
        part.copy_(value)
