"""Run a model once and find its blocks.

The blocks are the modules of a list through which one stream passes, from the first to the last. Some models have lists
within a list, such as the chunks of DINOv2 or the stages of Swin. Their blocks are joined, and numbered from the first
block of the model to the last.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from dataclasses import dataclass, field, replace
from typing import Any, Callable, Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from olmo_lns import probe, shadow
from olmo_lns.errors import LNSConfigError, LNSError
from olmo_lns.response import first_output, replace_first

__all__ = ["Blocks", "Trace", "call_of", "find_blocks", "norms_example", "record", "require_same_in_training"]

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass
class Trace:
    """The observations of one forward of a model.

    :param runs: module -> how often it ran, in the order in which the modules finished their first run.
    :param calls: module -> its last call, or None if it did not return a stream.
    :param outputs: module with a call -> the stream that it returned.
    :param shapes: module without children that have weights -> the shape of its input.
    :param norm_calls: module that may be a norm -> the arguments of its first call. Its input is replaced by a tensor
        of the same shape that takes no memory.
    :param widths: module whose output has the shape of its input -> the last dimension of this shape in its last call.
    """

    runs: dict[nn.Module, int] = field(default_factory=dict)
    calls: dict[nn.Module, probe.Call | None] = field(default_factory=dict)
    outputs: dict[nn.Module, torch.Tensor] = field(default_factory=dict)
    shapes: dict[nn.Module, tuple[int, ...]] = field(default_factory=dict)
    widths: dict[nn.Module, int] = field(default_factory=dict)

    norm_calls: dict[nn.Module, tuple[Any, Any]] = field(default_factory=dict)
    _is_norm: dict[nn.Module, bool] = field(default_factory=dict)

    def is_norm(self, module: nn.Module) -> bool:
        """Return true if a module is a norm, judged by the name of its class, or else by what it computed."""
        if module not in self._is_norm:
            found = probe.looks_like_norm(module)
            if not found and module in self.norm_calls:
                with contextlib.suppress(Exception):
                    found = probe.is_norm(module, *self.norm_calls[module])
            self._is_norm[module] = found
        return self._is_norm[module]

    def norm_count(self, module: nn.Module) -> int:
        """Return the number of norms in a module. A norm inside of another norm is not counted."""
        norms = [part for part in module.modules() if self.is_norm(part)]
        return len(norms) - sum(inner in norms for norm in norms for inner in norm.modules() if inner is not norm)

    def ran_once(self, module: nn.Module) -> bool:
        """Return true for a module that ran exactly once, and returned a stream in the shape of its input."""
        return self.runs.get(module) == 1 and self.calls.get(module) is not None


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


def record(
    model: nn.Module, run: Callable[[], Any], members: Iterable[nn.Module], *, is_repeated: bool = False
) -> Trace:
    """Run the model once and observe its modules.

    :param run: runs one forward of the model.
    :param members: the modules whose calls are kept.
    :param is_repeated: true for a second run, after the first one has built further modules.
    """
    trace, members = Trace(), set(members)

    def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        trace.runs[module] = trace.runs.get(module, 0) + 1
        call, stream = call_of(args, kwargs, output), probe.stream_of(output)
        if call is not None and stream is not None:
            trace.widths[module] = call.stream.shape[-1]
        if module in members:
            trace.calls[module] = call
            if call is not None and stream is not None:
                trace.outputs[module] = stream
        value = next(iter((*args, *kwargs.values())), None)
        if torch.is_tensor(value) and (probe.is_leaf(module) or module._parameters):
            trace.shapes[module] = tuple(value.shape)
            may_be = value.is_floating_point() and value.dim() > 1 and probe.has_vectors_only(module)
            if may_be and module not in trace.norm_calls and (call is not None or torch.is_tensor(stream)):
                trace.norm_calls[module] = tree_map(
                    lambda leaf: leaf if leaf is not value else _empty(leaf), (args, dict(kwargs))
                )

    watched = [
        module
        for module in dict.fromkeys([*model.modules(), *members])
        if not isinstance(module, torch.jit.ScriptModule)
    ]
    with probe.hooks(module.register_forward_hook(note, with_kwargs=True) for module in watched), torch.no_grad():
        run()
    if set(model.modules()) - set(watched) - _scripted(model) and not is_repeated:  # the forward built modules
        return record(model, run, members, is_repeated=True)
    return trace


def _scripted(model: nn.Module) -> set[nn.Module]:
    return {module for module in model.modules() if isinstance(module, torch.jit.ScriptModule)}


def _empty(like: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the same shape, dtype and device whose elements share one memory cell."""
    return like.new_zeros(1).expand(like.shape)


def call_of(args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> probe.Call | None:
    """Return the call of a module, or None if the module did not return a stream.

    The stream is the first floating argument that has two dimensions or more and the shape of the output.
    """
    arguments: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    stream = probe.stream_of(output)
    for key, value in arguments:
        is_matrix = torch.is_tensor(value) and value.is_floating_point() and value.dim() >= 2
        if is_matrix and stream is not None and stream.shape == value.shape:
            return probe.Call(tuple(args), dict(kwargs), key)
    return None


def find_blocks(model: nn.Module, run: Callable[[], Any], blocks: Sequence[nn.Module] | None = None) -> Blocks:
    """Find the blocks of ``model``.

    They are the elements of the outermost list whose elements each run once, in order, on one stream.

    :param run: runs one forward of the model.
    :param blocks: the blocks, if the user passed them. They are only checked then.
    :raises LNSConfigError: if there is no such list or more than one, if the blocks are only a part of the model's
        depth, or if they run several times.

    Example: ``find_blocks(model, lambda: model(ids)).path`` is ``"model.layers"`` for a Llama of transformers.
    """
    lists = {name: _elements(module) for name, module in model.named_modules() if isinstance(module, _LISTS)}
    lists = {name: listed for name, listed in lists.items() if listed}
    trace = record(model, run, {*itertools.chain(*lists.values()), *(_given(model, blocks, lists) or ())})
    if blocks is not None:
        listed = list(blocks)
        if not _is_stack(listed, trace):
            raise LNSConfigError(
                f"{type(model).__name__}: the modules in blocks= were expected to run once each, in this order, on one "
                f"stream; they did not. Give the norms themselves: {norms_example(model, trace)}."
            )
        _find_streams(listed, trace)
        _require_one_stream(model, listed, trace, "blocks=", run)
        _require_whole_depth(model, listed, trace, "blocks=", run, lists, is_given=True)
        return Blocks("", listed, trace)
    stacks: dict[str, list[nn.Module]] = {}
    for name, listed in lists.items():
        if not any(_is_inside(name, outer) for outer in stacks) and _is_stack(listed, trace):
            stacks[name] = listed
    _refuse_repeated(model, lists, stacks, trace)
    with_norms = {name: listed for name, listed in stacks.items() if all(map(trace.norm_count, listed))}
    stacks = with_norms or stacks  # a list of convolutions between the blocks has no norms
    if len(stacks) > 1:
        stacks = _joined_stages(model, stacks, trace) or stacks
    if len(stacks) != 1:
        names = ", ".join(stacks) or "none"
        raise LNSConfigError(
            f"{type(model).__name__}: expected one list of modules that each run once, in order, on one stream; found "
            f"{names}. "
            + ("Give the blocks of one: blocks=model.layers; or its norms" if stacks else "Give the norms")
            + f": {norms_example(model, trace)}."
        )
    ((name, listed),) = stacks.items()
    _require_numbers(model, name)
    listed = _blocks_of_chunks(name, listed, lists, trace)
    _find_streams(listed, trace)
    _require_one_stream(model, listed, trace, name, run)
    _require_whole_depth(model, listed, trace, name, run, lists, is_given=False)
    return Blocks(name, listed, trace)


def _find_streams(blocks: Sequence[nn.Module], trace: Trace) -> None:
    """Correct which argument of a block is its stream, by a comparison with what the block before it returned.

    The first guess is wrong in two cases. Another argument of the same shape may come before the stream. Or the blocks
    return only a change, which the model itself adds to the stream.
    """
    calls = [trace.calls[block] for block in blocks]
    if len(blocks) < 2 or any(call is None for call in calls):
        return
    whole = [call for call in calls if call is not None]
    pairs = [(trace.outputs[block], call) for block, call in zip(blocks, whole[1:], strict=False)]
    places: list[int | str] = [*range(len(whole[1].args)), *whole[1].kwargs]

    def is_stream(place: int | str) -> bool:
        arguments = [_argument(call, place) for _, call in pairs]
        return all(torch.is_tensor(a) and _is_same(y, a) for (y, _), a in zip(pairs, arguments, strict=True))

    place = next((place for place in places if is_stream(place)), None)
    has_place = place is not None and all(_argument(call, place) is not None for call in whole)
    if place is not None and has_place:
        for block, call in zip(blocks, whole, strict=True):
            trace.calls[block] = replace(call, place=place)
    elif all(_is_sum(call.stream, y, following.stream) for call, (y, following) in zip(whole, pairs, strict=False)):
        for block, call in zip(blocks, whole, strict=True):
            trace.calls[block] = replace(call, is_change=True)


def _argument(call: probe.Call, place: int | str) -> Any:
    if isinstance(place, str):
        return call.kwargs.get(place)
    return call.args[place] if place < len(call.args) else None


def _is_sum(stream: torch.Tensor, output: torch.Tensor, following: torch.Tensor) -> bool:
    alike = stream.shape == output.shape == following.shape
    return alike and torch.allclose(stream + output, following, rtol=1e-4, atol=1e-5)


def _is_inside(name: str, outer: str) -> bool:
    """Return true if the module ``name`` is inside of the module ``outer``. The model itself has the name ``""``."""
    return name != outer and (not outer or name.startswith(f"{outer}."))


def _elements(module: nn.Module) -> list[nn.Module]:
    """Return the elements of a list that may be blocks.

    Elements without parameters, with which DINOv2 pads its chunks, are left out. A layer without children is not a
    block. A Sequential may contain a whole model. Its blocks are then the adjacent elements of one class, if there is
    exactly one such group of two or more.
    """
    elements = [child for child in module.children() if next(child.parameters(), None) is not None]
    if all(any(element.children()) for element in elements):
        return elements
    rows = [list(row) for _, row in itertools.groupby(elements, key=type)]
    rows = [row for row in rows if len(row) > 1 and all(any(element.children()) for element in row)]
    return rows[0] if len(rows) == 1 and isinstance(module, nn.Sequential) else []


def _given(model: nn.Module, blocks: Any, lists: Mapping[str, list[nn.Module]]) -> list[nn.Module] | None:
    """Return the blocks that the user passed as a list, or None if there are none.

    :raises LNSConfigError: if they are not modules of the model, or only a part of a list.
    """
    if blocks is None:
        return None
    given = list(blocks)
    if not given or not all(isinstance(block, nn.Module) for block in given):
        raise LNSConfigError(f"blocks={blocks!r}: expected modules, such as blocks=model.layers.")
    if foreign := [type(block).__name__ for block in set(given) - set(model.modules())]:
        raise LNSConfigError(f"blocks= holds a {foreign[0]} that is no part of this {type(model).__name__}.")
    kinds = {type(block) for block in given}
    for name, listed in lists.items():
        omitted = [block for block in listed if block not in set(given) and type(block) in kinds]
        if omitted and set(given).intersection(listed):
            raise LNSConfigError(
                f"blocks= omits {len(omitted)} of the {len(listed)} blocks in {name}, expected all: the factor of a "
                "block depends on its number in the whole model."
            )
    return given


def _is_stack(listed: Sequence[nn.Module], trace: Trace) -> bool:
    """Return true if each module ran once, in this order, and returned a stream in the shape of its input."""
    members = set(listed)
    in_order = [module for module in trace.runs if module in members] == list(listed)
    return in_order and len(members) == len(listed) and all(map(trace.ran_once, listed))


def _refuse_repeated(
    model: nn.Module, lists: Mapping[str, list[nn.Module]], stacks: Mapping[str, Any], trace: Trace
) -> None:
    """Refuse a list of blocks that ran several times in one forward.

    :raises LNSConfigError: if there is one. The message names it.
    """
    for name, listed in lists.items():
        counts = {trace.runs.get(module, 0) for module in listed}
        is_inside = any(_is_inside(name, outer) for outer in stacks)
        has_streams = all(trace.calls.get(module) is not None for module in listed)
        if min(counts) > 1 and has_streams and not is_inside and all(map(trace.norm_count, listed)):
            raise LNSConfigError(
                f"{type(model).__name__}: {name} ran {max(counts)} times in one forward of the example, expected once. "
                "LayerNorm Scaling needs a block's number in a depth that runs once. Give an example= that runs each "
                "block once, or the blocks of the part that does: blocks=model.layers."
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

    A chunk is a module whose norms are all in one inner list of blocks. Each of these blocks has two norms or more, or
    one that both of its branches read.
    """
    inner: dict[nn.Module, list[nn.Module]] = {}
    for element in listed:
        for members in lists.values():
            inside = set(element.modules()) - {element}
            if element in inner or not set(members) <= inside or not _is_stack(members, trace):
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
            f"{type(model).__name__}: found blocks {', '.join(keys)} in {name}, expected 0 to {len(keys) - 1}: the "
            "factor of a block depends on its number in the whole model. Apply before the model is split into stages. "
            f"If these are all blocks, give them: blocks={_expression('model', name)}."
        )


def _require_whole_depth(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    trace: Trace,
    source: str,
    run: Callable[[], Any],
    lists: Mapping[str, list[nn.Module]],
    *,
    is_given: bool,
) -> None:
    """Check that no module outside of the list is a block of the same depth.

    If the user passed the blocks, similar modules may exist, but they must belong to another tower.

    :raises LNSConfigError: if there are such modules. The message names them.
    """
    widths = _widths(blocks, trace)
    outside = _similar_modules(model, blocks, trace, widths, run)
    others: set[nn.Module] = set()
    if outside and is_given and _is_separate(blocks, list(outside.values()), run):
        others, outside = {part for module in outside.values() for part in module.modules()}, {}
    outside = outside or _functional_blocks(model, {*blocks, *others}, trace, widths, run)
    if is_given and not outside:
        _refuse_a_stage(model, blocks, trace, run, lists)
    if not outside or (is_given and _is_separate(blocks, list(outside.values()), run)):
        return
    raise LNSConfigError(
        f"{type(model).__name__}: found {len(blocks)} blocks in {source} and similar blocks outside of it: "
        f"{', '.join(outside)}; expected all of them, since the factor of a block depends on its number in the whole "
        f"depth. Give all blocks in order, blocks=[…], or all norms: {norms_example(model, trace)}."
    )


def _refuse_a_stage(
    model: nn.Module, blocks: Sequence[nn.Module], trace: Trace, run: Callable[[], Any], lists: Mapping[str, Any]
) -> None:
    """Refuse blocks that are only one stage of a model, even if its other stages have other widths and classes.

    :raises LNSConfigError: if another list of blocks runs before or after these, and the later of the two depends on
        the earlier one in all positions of its stream.
    """
    given = {module for block in blocks for module in block.modules()}
    for name, listed in lists.items():
        members = {module for block in listed for module in block.modules()}
        is_other = given.isdisjoint(members) and not any(given <= set(module.modules()) for module in listed)
        if not is_other or not _is_stack(listed, trace) or not all(map(trace.norm_count, listed)):
            continue
        if _feeds(listed, blocks, trace, run) or _feeds(blocks, listed, trace, run):
            first, second = (
                ("blocks=", name)
                if list(trace.runs).index(blocks[0]) < list(trace.runs).index(listed[0])
                else (name, "blocks=")
            )
            raise LNSConfigError(
                f"{type(model).__name__}: the blocks in {second} read the stream that the blocks in {first} give, so "
                "that blocks= is a part of the depth, expected all of it: the factor of a block depends on its number "
                f"in the whole depth. Give all blocks in order: {_joined(first, second, name)}."
            )


def _joined(*names: str) -> str:
    """Return ``blocks=[…]`` with the blocks of two lists, for an error message. A list without a name is ``*…``."""
    *order, listed = names
    parts = [f"*{_expression('model', name)}" if name == listed else "*…" for name in order]
    return f"blocks=[{', '.join(parts)}]"


def _feeds(first: Sequence[nn.Module], second: Sequence[nn.Module], trace: Trace, run: Callable[[], Any]) -> bool:
    """Return true if the stream in front of the second blocks depends on the first blocks in each position."""
    call = trace.calls[second[0]]
    found: list[torch.Tensor] = []

    def change(module: nn.Module, args: Any, output: Any) -> Any:
        return replace_stream(output, 2.0 * probe.stream_of(output).roll(1, -1))  # type: ignore[union-attr]

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        found.append(args[call.place] if isinstance(call.place, int) else kwargs[call.place])  # type: ignore[union-attr]

    hooks = [first[-1].register_forward_hook(change), second[0].register_forward_pre_hook(note, with_kwargs=True)]
    with probe.hooks(hooks), torch.no_grad():
        run()
    if call is None or not found or found[0].shape != call.stream.shape:
        return False
    return bool((found[0] != call.stream).any(-1).all())


def _widths(blocks: Sequence[nn.Module], trace: Trace) -> set[int]:
    """Return the widths of the blocks' streams.

    They include the last dimension of the inputs of norms that read the stream in another order of its dimensions.
    """
    widths: set[int] = set()
    for block in blocks:
        if (call := trace.calls[block]) is not None:
            shapes = [trace.shapes[part] for part in block.modules() if part in trace.norm_calls]
            sizes = [shape[-1] for shape in shapes if math.prod(shape) == call.stream.numel()]
            widths |= {call.stream.shape[-1], *(size for size in sizes if size in call.stream.shape)}
    return widths


def _similar_modules(
    model: nn.Module, blocks: Iterable[nn.Module], trace: Trace, widths: set[int], run: Callable[[], Any]
) -> dict[str, nn.Module]:
    """Return the modules outside of the blocks that ran and may be further blocks or parts of them.

    Three kinds are returned: modules with the class of a block, modules with two or more norms of the blocks' width of
    which one is in front of a branch, and single norms in front of a branch.
    """
    blocks = list(blocks)
    kinds, inner = {type(block) for block in blocks}, {module for block in blocks for module in block.modules()}
    alike: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        parts = set(module.modules())
        if module in inner or any(_is_inside(name, outer) for outer in alike):
            continue
        if type(module) in kinds - {nn.Sequential} and module in trace.runs:
            alike[name] = module
            continue
        if parts & inner:  # a module around the blocks
            continue
        norms = [part for part in parts if part in trace.runs and trace.is_norm(part)]
        if sum(trace.shapes.get(norm, (0,))[-1] in widths for norm in norms) > 1:
            alike[name] = module
    around = _norms_on_branches(model, blocks, trace, widths, run)
    if around is None:
        return alike
    kinds = kinds - {nn.Sequential}
    alike = {
        name: module
        for name, module in alike.items()
        if around.intersection(module.modules()) or any(type(part) in kinds for part in module.modules())
    }
    named = {part for module in alike.values() for part in module.modules()}
    rest = around - named
    if len(rest) == 1 and not alike and all(map(_runs_behind(blocks, trace), rest)):  # of a head
        rest = set()
    return alike | {name: module for name, module in model.named_modules() if module in rest}


def _norms_on_branches(
    model: nn.Module, blocks: Iterable[nn.Module], trace: Trace, widths: set[int], run: Callable[[], Any]
) -> set[nn.Module] | None:
    """Return the norms outside of the blocks that are in front of a branch, so that their input also bypasses them.

    A forward with gradients shows this. The output of the norm is detached. If the next block or the output of the
    model still depends on the input of the norm, this input has bypassed the norm.

    :returns: the norms, or None if the model has no gradients.
    """
    blocks = [block for block in blocks if trace.runs.get(block) == 1]
    inner = {module for block in blocks for module in block.modules()}
    dims = {call.stream.dim() for block in blocks if (call := trace.calls.get(block)) is not None}
    norms = {
        module
        for module in trace.runs
        if module not in inner
        and trace.is_norm(module)
        and (trace.shapes.get(module, (0,))[-1] in widths or len(trace.shapes.get(module, ())) in dims & {3})
    }
    order = list(trace.runs)
    last = max((order.index(block) for block in blocks), default=-1)
    if len(norms) < 2 and not any(order.index(norm) < last for norm in norms):  # only the final norm
        return set()
    found: set[nn.Module] = set()
    pending: list[tuple[nn.Module, torch.Tensor]] = []
    weights = torch.Generator().manual_seed(8)

    def settle(values: Any) -> None:
        targets = [leaf for leaf in tree_leaves(values) if torch.is_tensor(leaf) and leaf.requires_grad]
        for norm, value in pending if targets else []:
            directions = [torch.randn(t.shape, generator=weights, device="cpu").to(t) for t in targets]
            (gradient,) = torch.autograd.grad(targets, value, directions, retain_graph=True, allow_unused=True)
            if gradient is not None and float(gradient.abs().max()) > 0:
                found.add(norm)
        pending.clear()

    def enter(block: nn.Module, args: Any, kwargs: Any) -> None:
        settle((args, dict(kwargs)))
        torch.set_grad_enabled(False)

    def leave(block: nn.Module, args: Any, output: Any) -> Any:
        torch.set_grad_enabled(True)
        stream = probe.stream_of(output)
        return output if stream is None else replace_stream(output, stream.detach().requires_grad_())

    def start(module: nn.Module, args: Any, output: Any) -> Any:
        """Require gradients for an output that has none, since its module has no trainable weights."""
        y = first_output(output)
        is_start = torch.is_tensor(y) and y.is_floating_point() and torch.is_grad_enabled() and not y.requires_grad
        return replace_first(output, y.detach().requires_grad_()) if is_start else output

    def detach(norm: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        value = next(iter((*args, *kwargs.values())), None)
        if torch.is_tensor(value) and value.requires_grad:
            pending.append((norm, value))
        return tree_map(lambda leaf: leaf.detach() if torch.is_tensor(leaf) else leaf, output)

    leaves = [m for m in trace.runs if m not in inner and m not in norms and not list(m.children())]
    handles = [block.register_forward_pre_hook(enter, with_kwargs=True) for block in blocks]
    handles += [block.register_forward_hook(leave) for block in blocks]
    handles += [norm.register_forward_hook(detach, with_kwargs=True) for norm in norms]
    handles += [leaf.register_forward_hook(start) for leaf in leaves if not isinstance(leaf, torch.jit.ScriptModule)]
    with probe.hooks(handles), torch.enable_grad():
        try:
            output = run()
            settle(dict(output) if isinstance(output, Mapping) else output)
        except (RuntimeError, LNSConfigError):  # a function without gradients
            return None
    return found


def _functional_blocks(
    model: nn.Module, blocks: Iterable[nn.Module], trace: Trace, widths: set[int], run: Callable[[], Any]
) -> dict[str, nn.Module]:
    """Return the modules outside of the blocks that may be blocks although they have no norms as modules.

    Such a module reads a stream of the blocks' width through a norm that is a function or the module itself, and adds
    the result to the stream. One more forward records its call, and a copy of it is then tested.
    """
    inner = {module for block in blocks for module in block.modules()}
    candidates = {
        name: module
        for name, module in model.named_modules()
        if trace.runs.get(module) == 1
        and trace.widths.get(module) in widths
        and not inner.intersection(module.modules())
        and not (trace.is_norm(module) or type(module).__module__.startswith("torch.nn."))
        and any(parameter.dim() > 1 for parameter in module.parameters())
    }
    if not candidates:
        return {}
    calls = record(model, run, candidates.values()).calls
    found: dict[str, nn.Module] = {}
    branches: dict[str, int] = {}
    for name, module in candidates.items():
        call = calls.get(module)
        inside = any(_is_inside(name, outer) for outer in found)
        if call is not None and not inside and (count := probe.normed_branches(module, call)):
            found[name], branches[name] = module, count
    # One branch behind the blocks that mixes no positions belongs to a head.
    is_head = sum(branches.values()) == 1 and all(map(_runs_behind(blocks, trace), found.values()))
    return {} if is_head else found


def _runs_behind(blocks: Iterable[nn.Module], trace: Trace) -> Callable[[nn.Module], bool]:
    """Return a function that tells whether a module runs after all of these blocks."""
    order = {module: number for number, module in enumerate(trace.runs)}
    last = max((order[block] for block in blocks if block in order), default=-1)
    return lambda module: order[module] > last


def require_same_in_training(
    model: nn.Module, blocks: Sequence[nn.Module], norms: Iterable[nn.Module], trace: Trace, run: Callable[[], Any]
) -> None:
    """Run a model in training mode, and check that it runs the same blocks and norms as in eval mode.

    A model that cannot run in training mode on the example, for instance because it needs labels, is not checked.

    :param blocks: the blocks, or the norms that the user passed if no module runs a block.
    :param norms: all norms that will be scaled.
    :param trace: the forward in eval mode.
    :param run: runs one forward of the model.
    :raises LNSConfigError: if further blocks run in training mode, or a norm runs several times. The message names
        them.
    """
    names, norms = {module: name for name, module in model.named_modules()}, list(norms)
    widths = {trace.shapes[norm][-1] for norm in norms if norm in trace.shapes}
    try:
        with shadow.read_only(model):
            in_training = record(model, run, ())
        similar = _similar_modules(model, blocks, in_training, widths, run)
        similar |= _functional_blocks(model, blocks, in_training, widths, run)
    except LNSConfigError:  # it needs labels, or writes to its weights
        return
    again = [names[norm] for norm in norms if in_training.runs.get(norm, 0) > 1]
    added = [name for name, module in similar.items() if not any(part in trace.runs for part in module.modules())]
    if again or added:
        raise LNSConfigError(
            f"{type(model).__name__}: in training mode its forward runs {', '.join(again or added)} "
            f"{'several times' if again else 'as well, which look like blocks and do not run in eval mode'}. Expected "
            "the same blocks, once each, in both modes. If their numbers are right, give the blocks, "
            "blocks=model.layers, or an example= that runs them once: example=lambda model: model.encoder(ids)."
        )


def _require_one_stream(
    model: nn.Module, blocks: Sequence[nn.Module], trace: Trace, source: str, run: Callable[[], Any]
) -> None:
    """Check that each block gets its stream from the block before it.

    If the model changes the stream between two blocks, the model is run again with changed outputs of the blocks.

    :raises LNSConfigError: if the input of a block does not depend on the first block, as in a model with two streams,
        or does not depend on the size of the previous block's output, as behind a norm.
    """
    calls = [trace.calls[block] for block in blocks]
    pairs = zip(blocks, calls[1:], strict=False)
    if all(call is not None and _is_same(trace.outputs[block], call.stream) for block, call in pairs):
        return

    def inputs(changed: Sequence[nn.Module], change: Callable[[torch.Tensor], torch.Tensor]) -> dict[Any, torch.Tensor]:
        """Return the stream in front of each block while the outputs of the blocks in ``changed`` are changed."""
        streams: dict[Any, torch.Tensor] = {}

        def replace(module: nn.Module, args: Any, output: Any) -> Any:
            return replace_stream(output, change(probe.stream_of(output)))  # type: ignore[arg-type]

        def note(module: nn.Module, args: Any, kwargs: Any) -> None:
            place = trace.calls[module].place  # type: ignore[union-attr]
            streams[module] = args[place] if isinstance(place, int) else kwargs[place]

        hooks = [block.register_forward_hook(replace) for block in changed]
        hooks += [block.register_forward_pre_hook(note, with_kwargs=True) for block in blocks[1:]]
        with probe.hooks(hooks), torch.no_grad():
            run()
        return streams

    streams = inputs(blocks[:1], lambda y: 2.0 * y.roll(1, -1))
    for number, (block, call) in enumerate(zip(blocks[1:], calls[1:], strict=True), start=2):
        if call is None or block not in streams or streams[block].shape != call.stream.shape:
            continue
        # What joins the stream between given blocks, as text behind images, comes from another one.
        joined = source == "blocks=" and trace.outputs[blocks[number - 2]].shape != call.stream.shape
        depends = streams[block] != call.stream
        if not bool(depends.any()) or (joined and not bool(depends.any(-1).all())):
            raise LNSConfigError(
                f"{type(model).__name__}: the blocks in {source} have two streams: the input of block {number}, or a "
                "part of it, does not depend on block 1. LayerNorm Scaling needs one stream through all blocks. Give "
                f"the blocks or the norms of one stream: {norms_example(model, trace)}."
            )
    # Between stages of other widths, as in Swin, the stream may be normalised.
    between = [
        number
        for number, (before, block, call) in enumerate(zip(blocks, blocks[1:], calls[1:], strict=False), start=1)
        if call is not None
        and trace.outputs[before].shape == call.stream.shape
        and not _is_same(trace.outputs[before], call.stream)
    ]
    if not between:
        return

    def fixed(size: float, seed: int) -> Callable[[torch.Tensor], torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return lambda y: size * torch.randn(y.shape, generator=generator, device="cpu").to(y)

    try:
        small, large, other = (inputs(blocks, fixed(*each)) for each in ((64.0, 6), (256.0, 6), (64.0, 7)))
    except LNSConfigError:  # the model does not run on other values
        return
    for number in between:
        block = blocks[number]
        if block in small and block in large and block in other:
            size = float(small[block].norm())
            differences = [float((each[block] - small[block]).norm()) for each in (large, other)]
            if differences[0] < 0.05 * size < differences[1]:
                raise LNSConfigError(
                    f"{type(model).__name__}: the stream is normalised between the blocks {number} and {number + 1} in "
                    f"{source}. LayerNorm Scaling expects a residual stream that grows through all blocks. If you want "
                    f"its factors here, give the norms: {norms_example(model, trace)}."
                )


def require_residual_stream(
    model: nn.Module, blocks: Sequence[nn.Module], norms: Iterable[nn.Module], trace: Trace, run: Callable[[], Any]
) -> None:
    """Check that the whole model reads its stream through these norms only.

    The model is run twice while the outputs of the norms are held. The second run adds random numbers to the input of
    the first block and to the output of each block. These numbers must pass unchanged through all later blocks. Between
    two blocks, the model may apply a linear function to them or begin another stage.

    :raises LNSConfigError: if the numbers are changed. The message names the block, or the two blocks between which
        the model reads its stream without a norm.
    """
    held: dict[nn.Module, torch.Tensor] = {}
    added: dict[Any, torch.Tensor] = {}
    generator = torch.Generator().manual_seed(9)
    numbers = {block: number for number, block in enumerate(blocks)}
    # Where the model adds what a block returns, only outputs are changed.
    is_change = all((call := trace.calls[block]) is not None and call.is_change for block in blocks)

    def drawn(table: dict[Any, torch.Tensor], key: Any, like: torch.Tensor) -> torch.Tensor:
        if key not in table:
            table[key] = torch.randn(like.shape, generator=generator, device="cpu").to(like)
        return table[key]

    def hold(norm: nn.Module, args: Any, output: Any) -> Any:
        return replace_first(output, drawn(held, norm, first_output(output)).clone())

    def forward(size: float, only: int | None = None) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
        """Return the streams in front of the blocks and the streams after them.

        :param only: the number of the one block whose output is changed.
        """
        before: dict[int, torch.Tensor] = {}
        after: dict[int, torch.Tensor] = {}

        def enter(block: nn.Module, args: Any, kwargs: Any) -> Any:
            number, call = numbers[block], trace.calls[block]
            place = call.place  # type: ignore[union-attr]
            stream = kwargs[place] if isinstance(place, str) else args[place]
            before[number] = stream.detach()
            if number > 0 or is_change or only is not None:
                return None
            changed = stream + size * drawn(added, "input", stream)
            if isinstance(place, str):
                return args, {**kwargs, place: changed}
            return (*args[:place], changed, *args[place + 1 :]), kwargs

        def leave(block: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            stream, number = probe.stream_of(output), numbers[block]
            if stream is None:
                return output
            after[number] = stream.detach()
            change = drawn(added, number, stream)
            return replace_stream(output, stream + size * change) if only in (None, number) else output

        handles = [block.register_forward_pre_hook(enter, with_kwargs=True) for block in blocks]
        handles += [block.register_forward_hook(leave, with_kwargs=True) for block in blocks]
        handles += [norm.register_forward_hook(hold) for norm in norms]
        with probe.hooks(handles), torch.no_grad():
            run()
        return before, after

    norms = list(norms)
    (before, after), (moved_before, moved_after) = forward(0.0), forward(1.0)
    difference = [moved_before[number].double() - before[number].double() for number in range(len(blocks))]
    expected = difference[0] if is_change else added["input"].double()
    places = []
    for number in range(len(blocks)):
        if number > 0:
            if not _is_moved_by(expected, before[number], moved_before[number]):
                places.append(number)
            expected = difference[number]
        if not is_change and not _is_moved_by(expected, after[number], moved_after[number]):
            raise LNSConfigError(
                f"{type(model).__name__}: block {number + 1} reads the model's stream elsewhere than through its "
                "norms, for example by an argument that the model computes from the stream. LayerNorm Scaling "
                "expects branches that read the stream through the norms only."
            )
        expected = expected + added[number].double()
    for place in places:
        if before[place].shape != after[place - 1].shape:  # another stage
            continue
        # The output of the block in front alone: it has to move this block, and in proportion.
        once, twice = (forward(size, place - 1)[0][place].double() - before[place].double() for size in (1.0, 2.0))
        tolerance = 0.02 if before[place].dtype in (torch.float32, torch.float64) else 0.1
        if float((twice - 2 * once).norm()) < tolerance * float(twice.norm()):
            continue
        raise LNSConfigError(
            f"{type(model).__name__}: between the blocks {place} and {place + 1} the model changes its stream, and "
            "not by adding to it. LayerNorm Scaling expects a residual stream that goes through all blocks, one after "
            f"the other. If you want its factors here, give the norms: {norms_example(model, trace)}."
        )


def _is_moved_by(expected: torch.Tensor, stream: torch.Tensor, moved: torch.Tensor) -> bool:
    """Return true if a stream changed by the expected amount, up to the rounding of its dtype."""
    if expected.shape != stream.shape:
        return False
    rounding = 1e-5 if stream.dtype in (torch.float32, torch.float64) else 0.03
    difference = float((moved.double() - stream.double() - expected).norm())
    return difference < 0.01 * float(expected.norm()) + rounding * float(stream.double().norm())


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a is b or (a.shape == b.shape and torch.equal(a, b))


def replace_stream(output: Any, value: torch.Tensor) -> Any:
    """Return a block's output with ``value`` as its stream.

    The stream is the output itself, the first element of a tuple or list, or the field ``last_hidden_state``.
    """
    if hasattr(output, "last_hidden_state"):
        return type(output)(**{**dict(output), "last_hidden_state": value})
    return replace_first(output, value)


def _is_separate(blocks: Sequence[nn.Module], outside: Sequence[nn.Module], run: Callable[[], Any]) -> bool:
    """Return true if two groups of blocks are two towers, so that neither gets its whole stream from the other.

    One tower may compute a part of the positions of the other's stream, as images in a language model, or another
    argument of its blocks.
    """

    def inputs(group: Sequence[nn.Module], changed: Sequence[nn.Module]) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []

        def note(module: nn.Module, args: Any, kwargs: Any) -> None:
            tensors = [t for t in (*args, *kwargs.values()) if torch.is_tensor(t) and t.is_floating_point()]
            if not found:  # the first of the group
                found.extend(t.detach().clone() for t in tensors[:1])

        def change(module: nn.Module, args: Any, output: Any) -> Any:
            stream = probe.stream_of(output)
            return output if stream is None else replace_stream(output, 2.0 * stream.roll(1, -1))

        hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in group]
        with probe.hooks([*hooks, *(module.register_forward_hook(change) for module in changed)]), torch.no_grad():
            run()
        return found

    outside = [part for module in outside for part in _parts_that_run(module)]
    for group, others in ((blocks, outside), (outside, blocks)):
        pairs = zip(inputs(group, []), inputs(group, others), strict=True)
        if any(a.shape != b.shape or bool((a != b).any(-1).all()) for a, b in pairs):
            return False
    return True


def _parts_that_run(module: nn.Module) -> list[nn.Module]:
    """Return the module itself, or the elements if it is a list, since a list is never called."""
    lists = (nn.ModuleList, nn.ModuleDict)
    return (
        [part for child in module.children() for part in _parts_that_run(child)]
        if isinstance(module, lists)
        else [module]
    )


def norms_example(model: nn.Module, trace: Trace) -> str:
    """Return the call of ``apply`` with ``norms=``, written out with this model's names where they have a pattern."""
    names = {module: name for name, module in model.named_modules()}
    places: dict[str, dict[str, list[str]]] = {}  # list -> path in the element -> keys of the elements
    for module in trace.runs:
        if not trace.is_norm(module) or trace.runs[module] != 1 or module not in names:
            continue
        parts = names[module].split(".")
        for i in (i for i, part in enumerate(parts) if part.isdigit()):
            in_element = places.setdefault(".".join(parts[:i]), {})
            in_element.setdefault(".".join(parts[i + 1 :]), []).append(parts[i])
            break
    pairs = {at: rest for at, rest in places.items() if len(rest) == 2 and len({len(k) for k in rest.values()}) == 1}
    if len(pairs) == 1:
        ((at, paths),) = pairs.items()
        pair = ", ".join(_expression("block", path) for path in paths)
        return f"olmo_lns.apply(model, norms=[({pair}) for block in {_expression('model', at)}])"
    return "olmo_lns.apply(model, norms=[(block.norm1, block.norm2) for block in model.layers])"


def _expression(variable: str, path: str) -> str:
    """Return the Python expression of a path: ``block[1].net[0]`` for ``1.net.0``."""
    return variable + "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in path.split(".") if part)
