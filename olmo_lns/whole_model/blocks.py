"""Find the blocks of a model by one forward.

The blocks are the modules of a list through which one stream passes, from the first to the last. Some models have lists
within a list, such as the chunks of DINOv2 or the stages of Swin. Their blocks are joined, and numbered from the first
block of the model to the last. For example, ``stages.0.blocks`` and ``stages.1.blocks`` become one list. The modules
:mod:`olmo_lns.whole_model.stream` and :mod:`olmo_lns.whole_model.depth` then check the list.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any, Callable, Mapping, Sequence

import torch
from torch import nn

from olmo_lns import probe
from olmo_lns.errors import LNSConfigError, LNSError
from olmo_lns.whole_model.depth import require_whole_depth
from olmo_lns.whole_model.names import expression, is_inside, norms_example
from olmo_lns.whole_model.stream import is_same, require_one_stream
from olmo_lns.whole_model.trace import Trace, trace_forward

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(frozen=True)
class Blocks:
    """The blocks of a model.

    :param path: name of the list of blocks, or ``""`` if the user passed the blocks.
    :param blocks: the blocks in the order in which they run.
    :param trace: the forward in which they were found.
    """

    path: str
    blocks: list[nn.Module]
    trace: Trace


def find_blocks(model: nn.Module, run: Callable[[], Any], blocks: Sequence[nn.Module] | None = None) -> Blocks:
    """Find the blocks of ``model``.

    The blocks are the elements of the outermost list whose elements each run once, in order, on one stream.

    :param run: runs one forward of the model.
    :param blocks: the blocks, if the user passed them. The function then only checks these, and searches for no others.
    :raises LNSConfigError: if there is no such list or more than one, if the blocks are only a part of the model's
        depth, or if they run several times.

    Example: ``find_blocks(model, lambda: model(ids)).path`` is ``"model.layers"`` for a Llama of transformers.
    """
    lists = {name: _elements(module) for name, module in model.named_modules() if isinstance(module, _LISTS)}
    lists = {name: listed for name, listed in lists.items() if listed}
    passed = _check_user_blocks(model, blocks, lists) or ()
    trace = trace_forward(model, run, {*itertools.chain(*lists.values()), *passed})
    if blocks is not None:
        listed = list(blocks)
        if not trace.is_stack(listed):
            raise LNSConfigError(
                f"{type(model).__name__}: the modules in blocks= do not run once each, in this order, on one stream. "
                f"Expected the blocks of one depth. Pass the norms themselves: {norms_example(model, trace)}."
            )
        _find_streams(listed, trace)
        require_one_stream(model, listed, trace, "blocks=", run)
        require_whole_depth(model, listed, trace, "blocks=", run, lists, named_by_user=True)
        return Blocks("", listed, trace)
    stacks: dict[str, list[nn.Module]] = {}
    for name, listed in lists.items():
        if not any(is_inside(name, outer) for outer in stacks) and trace.is_stack(listed):
            stacks[name] = listed
    _refuse_repeated(model, lists, stacks, trace)
    with_norms = {name: listed for name, listed in stacks.items() if all(map(trace.norm_count, listed))}
    stacks = with_norms or stacks  # a list of convolutions between the blocks has no norms
    if len(stacks) > 1:
        stacks = _joined_stages(model, stacks, trace) or stacks
    if len(stacks) != 1:
        names = ", ".join(stacks) or "none"
        raise LNSConfigError(
            f"{type(model).__name__}: the list of its blocks was not found. Expected one list of modules that each run "
            f"once, in order, on one stream, and found {names}. "
            + (
                "Pass the blocks of one list, such as blocks=model.layers, or pass its norms"
                if stacks
                else "Pass the norms"
            )
            + f": {norms_example(model, trace)}."
        )
    ((name, listed),) = stacks.items()
    _require_numbers(model, name)
    listed = _blocks_of_chunks(name, listed, lists, trace)
    _find_streams(listed, trace)
    require_one_stream(model, listed, trace, name, run)
    require_whole_depth(model, listed, trace, name, run, lists, named_by_user=False)
    return Blocks(name, listed, trace)


def _find_streams(blocks: Sequence[nn.Module], trace: Trace) -> None:
    """Correct which argument of a block is its stream, by a comparison with what the block before it returned.

    The trace takes the first argument in the shape of the output for the stream. This is wrong in two cases. The block
    may have an earlier argument of the same shape, as in ``block(memory, x)``. Or the block may return only a change
    ``d``, and the model itself computes ``x + d``.
    """
    calls = [trace.calls[block] for block in blocks]
    if len(blocks) < 2 or any(call is None for call in calls):
        return
    whole = [call for call in calls if call is not None]
    pairs = [(trace.outputs[block], call) for block, call in zip(blocks, whole[1:], strict=False)]
    places: list[int | str] = [*range(len(whole[1].args)), *whole[1].kwargs]

    def is_stream(place: int | str) -> bool:
        arguments = [_argument(call, place) for _, call in pairs]
        return all(torch.is_tensor(a) and is_same(y, a) for (y, _), a in zip(pairs, arguments, strict=True))

    place = next((place for place in places if is_stream(place)), None)
    has_place = place is not None and all(_argument(call, place) is not None for call in whole)
    if place is not None and has_place:
        for block, call in zip(blocks, whole, strict=True):
            trace.calls[block] = replace(call, place=place)
    elif all(_is_sum(call.stream, y, following.stream) for call, (y, following) in zip(whole, pairs, strict=False)):
        for block, call in zip(blocks, whole, strict=True):
            trace.calls[block] = replace(call, returns_change=True)


def _argument(call: probe.Call, place: int | str) -> Any:
    if isinstance(place, str):
        return call.kwargs.get(place)
    return call.args[place] if place < len(call.args) else None


def _is_sum(stream: torch.Tensor, output: torch.Tensor, following: torch.Tensor) -> bool:
    alike = stream.shape == output.shape == following.shape
    return alike and torch.allclose((stream + output).double(), following.double(), rtol=1e-4, atol=1e-5)


def _elements(module: nn.Module) -> list[nn.Module]:
    """Return the elements of a list that may be blocks.

    DINOv2 pads its chunks with elements without parameters, so the function leaves these out. A layer without children
    is not a block. If such a layer is in a list, the list has no blocks, unless the list is a Sequential. A Sequential
    may contain a whole model, such as ``Sequential(embedding, block, block, head)``. Its blocks are then the adjacent
    elements of one class, if there is exactly one such group of two or more.
    """
    elements = [child for child in module.children() if next(child.parameters(), None) is not None]
    if all(any(element.children()) for element in elements):
        return elements
    rows = [list(row) for _, row in itertools.groupby(elements, key=type)]
    rows = [row for row in rows if len(row) > 1 and all(any(element.children()) for element in row)]
    return rows[0] if len(rows) == 1 and isinstance(module, nn.Sequential) else []


def _check_user_blocks(model: nn.Module, blocks: Any, lists: Mapping[str, list[nn.Module]]) -> list[nn.Module] | None:
    """Return the blocks that the user passed as a list, or None if there are none.

    :raises LNSConfigError: if they are not modules of the model, or only a part of a list.
    """
    if blocks is None:
        return None
    passed = list(blocks)
    if not passed or not all(isinstance(block, nn.Module) for block in passed):
        raise LNSConfigError(f"blocks={blocks!r}: expected modules, such as blocks=model.layers.")
    if foreign := [type(block).__name__ for block in set(passed) - set(model.modules())]:
        raise LNSConfigError(f"blocks= has a {foreign[0]} that is no part of this {type(model).__name__}.")
    kinds = {type(block) for block in passed}
    for name, listed in lists.items():
        omitted = [block for block in listed if block not in set(passed) and type(block) in kinds]
        if omitted and set(passed).intersection(listed):
            raise LNSConfigError(
                f"blocks= omits {len(omitted)} of the {len(listed)} blocks in {name}. Expected all of them, because "
                "the factor of a block depends on its number in the whole model. Pass the whole list."
            )
    return passed


def _refuse_repeated(
    model: nn.Module, lists: Mapping[str, list[nn.Module]], stacks: Mapping[str, Any], trace: Trace
) -> None:
    """Refuse a list of blocks that ran several times in one forward.

    :raises LNSConfigError: if there is one. The message names it.
    """
    for name, listed in lists.items():
        counts = {trace.runs.get(module, 0) for module in listed}
        is_nested = any(is_inside(name, outer) for outer in stacks)
        has_streams = all(trace.calls.get(module) is not None for module in listed)
        if min(counts) > 1 and has_streams and not is_nested and all(map(trace.norm_count, listed)):
            raise LNSConfigError(
                f"{type(model).__name__}: {name} ran {max(counts)} times in one forward of the example, expected once. "
                "If a block runs several times, its number in the depth is not defined. Pass an example= that runs "
                "each block once, or the blocks of a part that runs once: blocks=model.layers."
            )


def _joined_stages(model: nn.Module, stacks: Mapping[str, list[nn.Module]], trace: Trace) -> dict[str, list[nn.Module]]:
    """Join the lists of blocks of all stages, if each stage is an element of one outer list.

    :returns: name of the outer list -> all blocks, or ``{}`` if the lists are not the stages of one.
    """
    for outer, module in model.named_modules():
        if not isinstance(module, _LISTS):
            continue
        front = f"{outer}." if outer else ""
        owners = [name.removeprefix(front).partition(".") for name in stacks if name.startswith(front)]
        keys = [key for key, _, _ in owners]
        kinds = {type(block) for listed in stacks.values() for block in listed}
        others = [child for key, child in module.named_children() if key not in keys]
        has_more = any(type(inner) in kinds - {nn.Sequential} for other in others for inner in other.modules())
        is_stages = len(owners) == len(stacks) == len(set(keys)) and len({rest for _, _, rest in owners}) == 1
        if is_stages and not has_more:
            first = {module: place for place, module in enumerate(trace.runs)}
            in_order = sorted(stacks.values(), key=lambda listed: first[listed[0]])
            return {outer: list(itertools.chain(*in_order))}
    return {}


def _blocks_of_chunks(
    name: str, listed: list[nn.Module], lists: Mapping[str, list[nn.Module]], trace: Trace
) -> list[nn.Module]:
    """Return the blocks inside of the chunks if the elements of a list are chunks, or else the elements themselves.

    An element is a chunk if all of its norms are in one inner list of modules, and if these modules can be blocks. They
    can be if each has two norms or more, or one norm that both of its branches read.
    """
    inner: dict[nn.Module, list[nn.Module]] = {}
    for element in listed:
        for members in lists.values():
            inside = set(element.modules()) - {element}
            if element in inner or not set(members) <= inside or not trace.is_stack(members):
                continue
            has_all = sum(map(trace.norm_count, members)) == trace.norm_count(element)
            if has_all and (
                all(trace.norm_count(member) >= 2 for member in members) or _is_parallel(members[0], trace)
            ):
                inner[element] = members
    if len(inner) < len(listed):
        return listed
    return list(itertools.chain(*inner.values()))


def _is_parallel(module: nn.Module, trace: Trace) -> bool:
    """Return true for a block whose two branches read the same norm."""
    try:
        return len(probe.pre_ln_sites(module, trace.calls[module]).names) == 1  # type: ignore[arg-type]
    except LNSError:
        return False


def _require_numbers(model: nn.Module, name: str) -> None:
    """Refuse a pipeline stage, whose blocks are numbered from the middle of the model.

    :raises LNSConfigError: if the names of the blocks are numbers, but not 0, 1, 2, … The message gives them.
    """
    keys = [key for key, _ in model.get_submodule(name).named_children()]
    if all(key.isdigit() for key in keys) and [int(key) for key in keys] != list(range(len(keys))):
        raise LNSConfigError(
            f"{type(model).__name__}: {name} has the blocks {', '.join(keys)}. Expected 0 to {len(keys) - 1}, because "
            "the factor of a block depends on its number in the whole model. Apply the scheme before the model is "
            f"split into stages. If these are all blocks, pass blocks={expression('model', name)}."
        )
