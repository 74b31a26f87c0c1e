"""Check that the blocks are the whole depth of a model.

The factor of a block depends on its number in the whole depth, so no block may be missed. Other modules of the model
may be blocks if they have the class of a block, or norms before a branch. A norm is before a branch if its
input also bypasses it, which a forward with gradients shows. A module may also be a block although its norms are
functions. It is then run alone, and the size of what it adds to the stream does not depend on the size of the stream.
"""

from __future__ import annotations

import math
from typing import Any, Callable, Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from olmo_lns import probe
from olmo_lns.errors import LNSConfigError
from olmo_lns.probe.replay import roll_channels
from olmo_lns.response import first_output, replace_first
from olmo_lns.whole_model.names import expression, is_inside, norms_example
from olmo_lns.whole_model.trace import Trace, replace_stream, trace_forward


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

    :raises LNSConfigError: if there are such modules. The message names them.
    """
    widths = _widths(blocks, trace)
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

    What runs before the first or after the last of them may be another tower.

    :param stack: the blocks, None for a block that is not a module. Without modules, nothing is checked.
    :raises LNSConfigError: if there is one. The message names it.
    """
    blocks = [block for block in stack if block is not None and trace.calls.get(block) is not None]
    if len(blocks) < max(2, len(stack)):
        return
    order = {module: number for number, module in enumerate(trace.runs)}
    first, last = order[blocks[0]], order[blocks[-1]]
    between = {
        name: module
        for name, module in similar_modules(model, blocks, trace, _widths(blocks, trace), run).items()
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
        return replace_first(output, roll_channels(y)) if torch.is_tensor(y) else output

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
        return replace_stream(output, roll_channels(probe.stream_of(output)))  # type: ignore[arg-type]

    before, after = _stream_before(second[0], [first[-1].register_forward_hook(change)], trace, run)
    if after is None or after.shape != before.shape:
        return False
    return bool((after != before).any(-1).all())


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


def similar_modules(
    model: nn.Module, blocks: Iterable[nn.Module], trace: Trace, widths: set[int], run: Callable[[], Any]
) -> dict[str, nn.Module]:
    """Return the modules outside of the blocks that ran and may be further blocks or parts of them.

    Three kinds are returned: modules with the class of a block, modules with two or more norms of the blocks' width of
    which one is before a branch, and single norms before a branch.
    """
    blocks = list(blocks)
    kinds, inner = {type(block) for block in blocks}, {module for block in blocks for module in block.modules()}
    alike: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        parts = set(module.modules())
        if module in inner or any(is_inside(name, outer) for outer in alike):
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
    if len(rest) == 1 and not alike and all(map(_runs_after(blocks, trace), rest)):  # of a head
        rest = set()
    return alike | {name: module for name, module in model.named_modules() if module in rest}


def _norms_on_branches(
    model: nn.Module, blocks: Iterable[nn.Module], trace: Trace, widths: set[int], run: Callable[[], Any]
) -> set[nn.Module] | None:
    """Return the norms outside of the blocks that are before a branch, so that their input also bypasses them.

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


def functional_blocks(
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
    calls = trace_forward(model, run, candidates.values()).calls
    found: dict[str, nn.Module] = {}
    branches: dict[str, int] = {}
    for name, module in candidates.items():
        call = calls.get(module)
        inside = any(is_inside(name, outer) for outer in found)
        if call is not None and not inside and (count := _normed_branches(module, call)):
            found[name], branches[name] = module, count
    # One branch after the blocks that mixes no positions belongs to a head.
    is_head = sum(branches.values()) == 1 and all(map(_runs_after(blocks, trace), found.values()))
    return {} if is_head else found


def _normed_branches(module: nn.Module, call: probe.Call) -> int:
    """Return how many branches of a module read its stream through a norm.

    The function looks only at what the module adds to its stream, so it also finds norms that are functions. After a
    norm, this addition does not depend on the size of the stream. A second branch lets it depend on the size a little,
    since that branch also reads the output of the first one. A branch that ends in a norm does not count.

    :returns: 0 without such a branch, 1 for a single branch that does not mix positions, such as that of a head, and 2
        for any other module.
    """
    try:
        with torch.no_grad(), torch.random.fork_rng([call.stream.device] if call.stream.is_cuda else []):
            copied, call = probe.random_copy(module), call.detached(torch.float32)
            generator = torch.Generator().manual_seed(5)
            x, another = torch.randn((2, *call.stream.shape), generator=generator, device="cpu").to(call.stream)

            def added(x: torch.Tensor) -> torch.Tensor:
                return call.replay(copied, x).double() - x.double()

            small, large, other = added(64.0 * x), added(256.0 * x), added(64.0 * another)
            ordinary = added(4.0 * x)  # a function that saturates, such as tanh, is still far from its limit there
            first = x.clone().flatten(0, -2)
            first[0] = another.flatten(0, -2)[0]
            one_row = added(64.0 * first.view(x.shape))
    except Exception:  # the module is not counted if its shapes depend on values or it needs half precision
        return 0
    size, moved = float(small.norm()), float((large - small).norm())
    depends = float((other - small).norm()) > 0.2 * size > 1e-3 * float(x.norm())
    rows = small.norm(dim=-1)
    saturates = float((ordinary - small).norm()) >= 0.2 * size
    if not depends or saturates or moved >= 0.2 * size or float(rows.max()) < (1 + 3e-3) * float(rows.min()):
        return 0
    mixes = float((one_row - small).flatten(0, -2)[1:].norm()) > 1e-3 * size
    return 2 if mixes or moved > 1e-3 * size else 1


def _runs_after(blocks: Iterable[nn.Module], trace: Trace) -> Callable[[nn.Module], bool]:
    """Return a function that tells whether a module runs after all of these blocks."""
    order = {module: number for number, module in enumerate(trace.runs)}
    last = max((order[block] for block in blocks if block in order), default=-1)
    return lambda module: order[module] > last


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
