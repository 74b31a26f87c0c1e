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
    rest = moved() if rest is None else rest
    width = rest.shape[-1]
    # A router may select only some experts. The others have no effect, and are judged by those that it selects.
    groups: dict[Any, list[tuple[str, nn.Parameter]]] = defaultdict(list)
    for name, parameter in block.named_parameters():
        # A smaller parameter may hold scales of a branch, and is no projection.
        if parameter.dim() > 1 and parameter.numel() >= 8 * width and width in parameter.shape:
            groups[_place(name), parameter.shape].append((name, parameter))

    def projects(parameter: nn.Parameter, axis: int) -> bool | None:
        """Return true if this dimension of the parameter counts channels of the stream; None if nothing reads it."""
        ends = sorted({0, width - 1})

        def effect(*factors: float) -> torch.Tensor:
            with ExitStack() as stack:
                for channel, factor in zip(ends, factors, strict=False):
                    stack.enter_context(_multiplied(parameter, axis, channel, factor))
                return moved() - rest

        once = effect(2.0, 3.0)  # which adds the slice of one channel once, and that of the other twice
        if float(once.norm()) <= same:
            return None
        others = once.clone()
        others[..., ends] = 0.0
        sizes = [float(once[..., channel].norm()) for channel in ends]
        if float(others.norm()) > 10 * same * max(sizes):
            return False
        if min(sizes) <= same:
            return None
        # Now twice, and once. A gate is not linear, and channels in another order are exchanged.
        expected = once[..., ends] * once.new_tensor([2.0, 0.5][: len(ends)])
        return float((effect(3.0, 2.0)[..., ends] - expected).norm()) <= 10 * same * min(sizes)

    def axis(parameter: nn.Parameter) -> int | None:
        """Return the dimension of the channels, -1 if the parameter is no projection, or None if nothing reads it."""
        is_read = False
        with _of_its_own(parameter):
            for axis in [axis for axis, size in enumerate(parameter.shape) if size == width]:
                if result := projects(parameter, axis):
                    return axis
                is_read = is_read or result is not None
        return -1 if is_read else None

    projections = {}
    for group in groups.values():
        axis_of: dict[str, int] = {}
        for ordered in (group, group[::-1]):  # perhaps only the last one ends the branch
            count = 0
            for name, parameter in ordered:
                if name not in axis_of and (result := axis(parameter)) is not None:
                    axis_of[name] = result
                count += name in axis_of
                if count == _EXAMINED_PER_END:
                    break
        found = set(axis_of.values())
        for name, _ in group:
            result = axis_of.get(name, next(iter(found)) if len(found) == 1 else -1)
            if result >= 0:
                projections[name] = result
    return projections


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
