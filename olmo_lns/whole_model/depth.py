"""Check that the blocks are the whole depth of a model.

The factor of a block depends on its number in the whole depth, so no block may be missed. If a model has the blocks
``layers`` and runs a further block ``last_layer`` after them, for example, the depth is one more than the length of
``layers``. :mod:`olmo_lns.whole_model.further_blocks` finds the modules that may be further blocks. This module accepts
them only if they belong to another tower, such as the vision tower of a language model.
"""

from __future__ import annotations

from typing import Any, Callable, Mapping, Sequence

import torch
from torch import nn

from olmo_lns import probe
from olmo_lns.errors import LNSConfigError
from olmo_lns.probe.replay import double_and_roll
from olmo_lns.response import first_output, replace_first
from olmo_lns.whole_model.further_blocks import functional_blocks, similar_modules, stream_widths
from olmo_lns.whole_model.names import expression, norms_example
from olmo_lns.whole_model.trace import Trace, replace_stream


def require_whole_depth(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    trace: Trace,
    source: str,
    run: Callable[[], Any],
    lists: Mapping[str, list[nn.Module]],
    *,
    named_by_user: bool,
) -> None:
    """Check that no module outside of the list is a block of the same depth.

    If the user passed the blocks, similar modules may exist, but they must belong to another tower.

    :param source: name of the list of blocks, or ``blocks=`` if the user passed them, for the message.
    :param lists: name of a list in the model -> its elements.
    :param named_by_user: true if the user passed the blocks.
    :raises LNSConfigError: if there are such modules. The message names them.
    """
    widths = stream_widths(blocks, trace)
    outside = similar_modules(model, blocks, trace, widths, run)
    others: set[nn.Module] = set()
    if outside and named_by_user and _is_separate(blocks, list(outside.values()), run):
        others, outside = {part for module in outside.values() for part in module.modules()}, {}
    outside = outside or functional_blocks(model, {*blocks, *others}, trace, widths, run)
    if named_by_user and not outside:
        _refuse_a_stage(model, blocks, trace, run, lists)
    if not outside or (named_by_user and _is_separate(blocks, list(outside.values()), run)):
        return
    raise LNSConfigError(
        f"{type(model).__name__}: found {len(blocks)} blocks in {source} and similar blocks outside of it: "
        f"{', '.join(outside)}. Expected a list of all blocks, because the factor of a block depends on its number in "
        f"the whole depth. Pass all blocks in order, blocks=[…], or all norms: {norms_example(model, trace)}."
    )


def require_no_block_between(
    model: nn.Module, stack: Sequence[nn.Module | None], trace: Trace, run: Callable[[], Any]
) -> None:
    """Check that no other block runs between blocks whose norms the user passed, as in two lists that alternate.

    Modules that run before the first or after the last of these blocks may belong to another tower, so they are
    accepted.

    :param stack: the blocks, None for a block that is not a module. Nothing is checked if one of them is None.
    :raises LNSConfigError: if another block runs between them. The message names it.
    """
    blocks = [block for block in stack if block is not None and trace.calls.get(block) is not None]
    if len(blocks) < max(2, len(stack)):
        return
    order = {module: number for number, module in enumerate(trace.runs)}
    first, last = order[blocks[0]], order[blocks[-1]]
    between = {
        name: module
        for name, module in similar_modules(model, blocks, trace, stream_widths(blocks, trace), run).items()
        if any(first < order[part] < last for part in module.modules() if part in order)
    }
    # A norm on an output that is tapped between two blocks does not change the stream.
    if between and _reaches(list(between.values()), blocks[-1], trace, run):
        raise LNSConfigError(
            f"norms=: {', '.join(between)} runs between the blocks of these norms and looks like a block itself. The "
            "factor of a block depends on its number in the whole depth. Pass the norms of all blocks, in the order in "
            "which they run."
        )


def _refuse_a_stage(
    model: nn.Module, blocks: Sequence[nn.Module], trace: Trace, run: Callable[[], Any], lists: Mapping[str, Any]
) -> None:
    """Refuse blocks that are only one stage of a model, even if its other stages have other widths and classes.

    :raises LNSConfigError: if another list of blocks runs before or after these, and the later of the two depends on
        the earlier one in all positions of its stream.
    """
    parts = {module for block in blocks for module in block.modules()}
    for name, listed in lists.items():
        members = {module for block in listed for module in block.modules()}
        is_other = parts.isdisjoint(members) and not any(parts <= set(module.modules()) for module in listed)
        if not is_other or not trace.is_stack(listed) or not all(map(trace.norm_count, listed)):
            continue
        if _feeds(listed, blocks, trace, run) or _feeds(blocks, listed, trace, run):
            first, second = (
                ("blocks=", name)
                if list(trace.runs).index(blocks[0]) < list(trace.runs).index(listed[0])
                else (name, "blocks=")
            )
            raise LNSConfigError(
                f"{type(model).__name__}: the blocks in {second} read the stream that the blocks in {first} return. "
                "blocks= has only a part of the blocks. Expected all of them, because the factor of a block depends "
                f"on its number in the whole depth. Pass all blocks in order: {_joined(first, second, name)}."
            )


def _reaches(modules: Sequence[nn.Module], block: nn.Module, trace: Trace, run: Callable[[], Any]) -> bool:
    """Return true if the stream before a block depends on the outputs of these modules."""

    def change(module: nn.Module, args: Any, output: Any) -> Any:
        y = first_output(output)
        return replace_first(output, double_and_roll(y)) if torch.is_tensor(y) else output

    parts = [part for module in modules for part in _parts_that_run(module)]
    before, after = _stream_before(block, [part.register_forward_hook(change) for part in parts], trace, run)
    return after is not None and (after.shape != before.shape or not torch.equal(after, before))


def _stream_before(
    block: nn.Module, changes: list[Any], trace: Trace, run: Callable[[], Any]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run the model under hooks that change outputs, and remove the hooks.

    :param changes: the handles of the hooks.
    :returns: the stream before ``block`` in the trace, and in this run. The second is None if the block does not run.
    """
    call = trace.calls[block]
    assert call is not None
    found: list[torch.Tensor] = []

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        found.append(args[call.place] if isinstance(call.place, int) else kwargs[call.place])

    with probe.hooks([*changes, block.register_forward_pre_hook(note, with_kwargs=True)]), torch.no_grad():
        run()
    return call.stream, found[0] if found else None


def _joined(*names: str) -> str:
    """Return ``blocks=[…]`` with the blocks of two lists, for an error message. A list without a name is ``*…``."""
    *order, listed = names
    parts = [f"*{expression('model', name)}" if name == listed else "*…" for name in order]
    return f"blocks=[{', '.join(parts)}]"


def _feeds(first: Sequence[nn.Module], second: Sequence[nn.Module], trace: Trace, run: Callable[[], Any]) -> bool:
    """Return true if the stream before the second blocks depends on the first blocks in each position."""
    if trace.calls[second[0]] is None:
        return False

    def change(module: nn.Module, args: Any, output: Any) -> Any:
        return replace_stream(output, double_and_roll(probe.stream_of(output)))  # type: ignore[arg-type]

    before, after = _stream_before(second[0], [first[-1].register_forward_hook(change)], trace, run)
    if after is None or after.shape != before.shape:
        return False
    return bool((after != before).any(-1).all())


def _is_separate(blocks: Sequence[nn.Module], outside: Sequence[nn.Module], run: Callable[[], Any]) -> bool:
    """Return true if two groups of blocks are two towers.

    Two towers are separate if neither computes the whole stream of the other. The first tower may compute some
    positions of the second tower's stream, as a vision tower computes the positions of an image in a language model. It
    may also compute another argument of the second tower's blocks, as an encoder does for cross-attention.
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
