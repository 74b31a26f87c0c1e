"""Check the norms that a user passes with ``norms=``, and find the blocks that run them.

The user passes one pair of norms for each block, in the order of the blocks, as in
``norms=[(block.norm1, block.norm2) for block in model.layers]``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Callable, Sequence

from torch import nn

from olmo_lns.errors import LNSConfigError
from olmo_lns.whole_model.trace import Trace, trace_forward

__all__ = ["UserNorms", "check_user_norms"]

_FORM = "norms=[(block.norm1, block.norm2) for block in model.layers]"


@dataclass(frozen=True)
class UserNorms:
    """The norms that the user passed.

    :param pairs: the norms of each block, from block 1. A pair of one norm is read by both branches.
    :param blocks: for each pair, the module that runs both norms and takes the stream, or None if there is none.
    :param trace: the forward in which the norms were checked.
    """

    pairs: list[tuple[nn.Module, ...]]
    blocks: list[nn.Module | None]
    trace: Trace


def check_user_norms(model: nn.Module, norms: Sequence[Any], run: Callable[[], Any]) -> UserNorms:
    """Run the model once, and check the norms that the user passed against this forward.

    :param norms: for each block, from block 1, the norms before attention and feed-forward, or the one norm that
        both read.
    :param run: runs one forward of the model.
    :raises LNSConfigError: if a norm is not a module of this model, was passed twice, or does not run exactly once; if
        the pairs have different lengths or are not in the order in which they run; or if the norms of some blocks are
        missing. The message names the norm.
    """
    pairs = _pairs(norms)
    name_of = {module: name for name, module in model.named_modules()}
    seen: set[nn.Module] = set()
    for number, pair in enumerate(pairs, start=1):
        for norm in pair:
            if norm not in name_of:
                raise LNSConfigError(
                    f"norms=: the {type(norm).__name__} of block {number} is no part of this {type(model).__name__}. "
                    "Pass the modules of the model that apply() takes."
                )
            if norm in seen:
                raise LNSConfigError(
                    f"norms=: {name_of[norm]} was passed twice, again for block {number}. Pass it once."
                )
            seen.add(norm)
    traced = trace_forward(model, run, model.modules())
    counts = {name_of[norm]: traced.runs.get(norm, 0) for norm in seen}
    if wrong := [f"{name} {count} times" for name, count in counts.items() if count != 1]:
        raise LNSConfigError(
            f"norms=: one forward of the example runs {', '.join(sorted(wrong))}. Expected each norm to run once. Pass "
            "only norms that the model calls, and an example= that runs every block once."
        )
    order = [norm for norm in traced.runs if norm in seen]
    passed = [norm for pair in pairs for norm in pair]
    if order != passed:
        place = next(i for i, (a, b) in enumerate(zip(order, passed, strict=True)) if a is not b)
        raise LNSConfigError(
            f"norms=: {name_of[passed[place]]} was passed in place {place + 1}, where {name_of[order[place]]} runs. "
            f"Pass the norms in the order in which they run, from block 1: {_FORM}."
        )
    _require_pairs_of_one_module(model, pairs, name_of, traced)
    _require_no_omission(name_of, seen, traced)
    return UserNorms(pairs, [_block_of(model, pair, seen - set(pair), traced, name_of) for pair in pairs], traced)


def _pairs(norms: Any) -> list[tuple[nn.Module, ...]]:
    try:
        pairs = [(each,) if isinstance(each, nn.Module) else tuple(each) for each in norms]
    except TypeError:
        pairs = []
    if not pairs or not all(isinstance(norm, nn.Module) for pair in pairs for norm in pair):
        raise LNSConfigError(
            "norms= does not have pairs of modules. Expected a pair for each block, in order from block 1. Pass them "
            f"in this form: {_FORM}."
        )
    sizes = {len(pair) for pair in pairs}
    if len(sizes) > 1 or not sizes <= {1, 2}:
        raise LNSConfigError(
            f"norms= has {' and '.join(map(str, sorted(sizes)))} norms for a block. Expected the same number for all "
            f"blocks: two norms, or one that both branches read. Pass them in this form: {_FORM}."
        )
    return pairs


def _require_pairs_of_one_module(
    model: nn.Module, pairs: Sequence[tuple[nn.Module, ...]], name_of: dict[nn.Module, str], traced: Trace
) -> None:
    """Check that the two norms of each pair are in one block.

    :raises LNSConfigError: if a module runs norms of several pairs, but not all norms of these pairs.
    """
    number_of = {norm: number for number, pair in enumerate(pairs, start=1) for norm in pair}
    for name, module in model.named_modules():
        inside = {norm for norm in module.modules() if norm in number_of}
        numbers = sorted({number_of[norm] for norm in inside})
        whole = {norm for number in numbers for norm in pairs[number - 1]}
        if len(numbers) > 1 and inside != whole and module in traced.runs:
            raise LNSConfigError(
                f"norms=: {name} runs norms of the blocks {', '.join(map(str, numbers))}, but not all norms of these "
                f"blocks. Expected each block's two norms as a pair. Pass them in this form: {_FORM}."
            )


def _require_no_omission(name_of: dict[nn.Module, str], passed: set[nn.Module], traced: Trace) -> None:
    """Check that the user passed the norms of all blocks.

    :raises LNSConfigError: if another norm ran whose name differs only in its numbers from that of a passed norm.
    """
    places, widths = {_place(name_of[norm]) for norm in passed}, {traced.shapes.get(norm, (0,))[-1] for norm in passed}
    for module in traced.runs:
        omitted = module not in passed and module in name_of and traced.is_norm(module)
        if omitted and _place(name_of[module]) in places and traced.shapes.get(module, (0,))[-1] in widths:
            raise LNSConfigError(
                f"norms=: {name_of[module]} runs as well and was not passed, although the norms of similar modules "
                "were. The factor of a block depends on its number in the whole depth. Pass the norms of all blocks: "
                f"{_FORM}."
            )


def _place(name: str) -> str:
    """Replace the numbers in a name by ``*``, as in ``layers.*.norm*``."""
    return re.sub(r"\d+", "*", name)


def _block_of(
    model: nn.Module,
    pair: tuple[nn.Module, ...],
    others: set[nn.Module],
    traced: Trace,
    name_of: dict[nn.Module, str],
) -> nn.Module | None:
    """Return the block of a pair: the largest module that contains both norms, takes the stream and ran once.

    If a wrapper around a block adds something to its output, the largest module is the wrapper, so the probe examines
    this addition as well.

    :param others: the norms of all other pairs. A module that contains one of them is no single block. The result is
        None if there is no other module.
    """
    block = None
    parts = name_of[pair[0]].split(".")[:-1]
    while parts:
        module = model.get_submodule(".".join(parts))
        inside = set(module.modules())
        if inside & others:
            break
        if inside >= set(pair) and traced.ran_once(module):
            block = module
            if not others:  # each module around the only block would do
                break
        parts.pop()
    return block
