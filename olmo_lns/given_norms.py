"""Norms that the owner of a model gives, in pairs and in order: check them, and find the blocks that run them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Callable, Sequence

from torch import nn

from olmo_lns import trace
from olmo_lns.errors import LNSConfigError

__all__ = ["GivenNorms", "given_norms"]

_FORM = "norms=[(block.norm1, block.norm2) for block in model.layers]"


@dataclass(frozen=True)
class GivenNorms:
    """Norms by block. :param blocks: the module that runs each pair and takes the stream; None without one."""

    pairs: list[tuple[nn.Module, ...]]
    blocks: list[nn.Module | None]
    trace: trace.Trace


def given_norms(model: nn.Module, norms: Sequence[Any], run: Callable[[], Any]) -> GivenNorms:
    """Check the norms that an owner gives, and run the model once.

    :param norms: for each block, from block 1, the norms in front of attention and feed-forward, or one shared norm.
    :param run: runs one forward of the model.
    :raises LNSConfigError: no modules of this model, a module twice, pairs of unequal length, an order other than the
        order in which they run, or a norm that does not run once.
    """
    pairs = _pairs(norms)
    names = {module: name for name, module in model.named_modules()}
    seen: set[nn.Module] = set()
    for number, pair in enumerate(pairs, start=1):
        for norm in pair:
            if norm not in names:
                raise LNSConfigError(
                    f"norms=: the {type(norm).__name__} of block {number} is no part of this {type(model).__name__}. "
                    "Give the modules of the model that apply() takes."
                )
            if norm in seen:
                raise LNSConfigError(f"norms=: {names[norm]} was given twice, again for block {number}. Give it once.")
            seen.add(norm)
    traced = trace.record(model, run, model.modules())
    counts = {names[norm]: traced.runs.get(norm, 0) for norm in seen}
    if wrong := [f"{name} {count} times" for name, count in counts.items() if count != 1]:
        raise LNSConfigError(
            f"norms=: one forward of the example runs {', '.join(sorted(wrong))}, expected each norm once. Give an "
            "example= that runs every block once, and only norms that the model calls."
        )
    order = [norm for norm in traced.runs if norm in seen]
    given = [norm for pair in pairs for norm in pair]
    if order != given:
        place = next(i for i, (a, b) in enumerate(zip(order, given, strict=True)) if a is not b)
        raise LNSConfigError(
            f"norms=: {names[given[place]]} was given in place {place + 1}, where {names[order[place]]} runs. Give the "
            f"norms in the order in which they run, from block 1: {_FORM}."
        )
    _require_pairs_of_one_module(model, pairs, names, traced)
    _require_no_omission(names, seen, traced)
    return GivenNorms(pairs, [_block_of(model, pair, seen - set(pair), traced, names) for pair in pairs], traced)


def _pairs(norms: Any) -> list[tuple[nn.Module, ...]]:
    try:
        pairs = [(each,) if isinstance(each, nn.Module) else tuple(each) for each in norms]
    except TypeError:
        pairs = []
    if not pairs or not all(isinstance(norm, nn.Module) for pair in pairs for norm in pair):
        raise LNSConfigError(f"norms= was expected to hold pairs of modules, in order from block 1, such as {_FORM}.")
    sizes = {len(pair) for pair in pairs}
    if len(sizes) > 1 or not sizes <= {1, 2}:
        raise LNSConfigError(
            f"norms= holds {' and '.join(map(str, sorted(sizes)))} norms a block. Give two norms for each block, or "
            "one that both of its branches read."
        )
    return pairs


def _require_pairs_of_one_module(
    model: nn.Module, pairs: Sequence[tuple[nn.Module, ...]], names: dict[nn.Module, str], traced: trace.Trace
) -> None:
    """Refuse pairs that cut a block. :raises LNSConfigError: a module that runs parts of two pairs."""
    number_of = {norm: number for number, pair in enumerate(pairs, start=1) for norm in pair}
    for name, module in model.named_modules():
        inside = {norm for norm in module.modules() if norm in number_of}
        numbers = sorted({number_of[norm] for norm in inside})
        whole = {norm for number in numbers for norm in pairs[number - 1]}
        if len(numbers) > 1 and inside != whole and module in traced.runs:
            raise LNSConfigError(
                f"norms=: {name} runs norms of the blocks {', '.join(map(str, numbers))}, and not all of them. Give "
                f"the two norms of one block as a pair: {_FORM}."
            )


def _require_no_omission(names: dict[nn.Module, str], given: set[nn.Module], traced: trace.Trace) -> None:
    """Refuse a part of the depth. :raises LNSConfigError: a norm that ran in the place of a given one, in a sibling."""
    places, widths = {_place(names[norm]) for norm in given}, {traced.shapes.get(norm, (0,))[-1] for norm in given}
    for module in traced.runs:
        omitted = module not in given and module in names and traced.is_norm(module)
        if omitted and _place(names[module]) in places and traced.shapes.get(module, (0,))[-1] in widths:
            raise LNSConfigError(
                f"norms=: {names[module]} runs as well and was not given, although norms in its place were. The factor "
                f"of a block depends on its number in the whole depth. Give the norms of all blocks: {_FORM}."
            )


def _place(name: str) -> str:
    """Return a name with ``*`` for its numbers: ``layers.*.norm*``. A name without numbers is a place by itself."""
    return re.sub(r"\d+", "*", name)


def _block_of(
    model: nn.Module,
    pair: tuple[nn.Module, ...],
    others: set[nn.Module],
    traced: trace.Trace,
    names: dict[nn.Module, str],
) -> nn.Module | None:
    """Return the smallest module that runs the pair, no other given norm, and a stream; None if there is none."""
    parts = names[pair[0]].split(".")[:-1]
    while parts:
        module = model.get_submodule(".".join(parts))
        inside = set(module.modules())
        if inside & others:
            return None
        if inside >= set(pair) and traced.ran_once(module):
            return module
        parts.pop()
    return None
