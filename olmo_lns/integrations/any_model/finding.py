"""Find the norms of a model: its blocks by one forward, and the norms of each block by the probe."""

from __future__ import annotations

import math
from typing import Any, Callable, Iterable, Mapping, Sequence

from torch import nn
from torch.utils._pytree import tree_map_only

from olmo_lns import probe, shadow
from olmo_lns.errors import LNSConfigError
from olmo_lns.folding import check_finite
from olmo_lns.integrations.any_model.example import forward, undisturbed
from olmo_lns.integrations.any_model.fused_kernels import ArithmeticOf, norms_to_hook
from olmo_lns.integrations.any_model.located import Located
from olmo_lns.integrations.any_model.refusals import refuse_adapted
from olmo_lns.processes import on_first_rank
from olmo_lns.whole_model.blocks import Blocks, find_blocks
from olmo_lns.whole_model.depth import require_no_block_between
from olmo_lns.whole_model.names import norms_example
from olmo_lns.whole_model.stream import require_residual_stream
from olmo_lns.whole_model.trace import Trace
from olmo_lns.whole_model.training import require_same_in_training
from olmo_lns.whole_model.user_norms import check_user_norms


def locate(
    model: nn.Module,
    example: Any = None,
    blocks: Sequence[nn.Module] | None = None,
    norms: Sequence[Any] | None = None,
    *,
    arithmetic_of: ArithmeticOf = lambda norm: None,
) -> Located:
    """Find the norms before the branches of a model.

    The model is run once, and then one block of each structure is run repeatedly. If the weights of the model do not
    exist yet, a shadow of it is run instead (:mod:`olmo_lns.shadow`).

    :param example: as for :func:`olmo_lns.apply`.
    :param blocks: the blocks, if the user passed them.
    :param norms: the norms of each block from block 1, as pairs or as one norm that both branches read, if the user
        passed them.
    :param arithmetic_of: as in :func:`attach`.
    :raises LNSConfigError: if no list of Pre-LN blocks is found, or if a weight is not finite.
    :raises MeasurementError: if a block cannot be run again.
    """
    blocks, norms = _as_list(blocks), _as_list(norms)
    norms = [_as_list(each) for each in norms] if isinstance(norms, list) else norms
    if blocks is not None and norms is not None:
        raise LNSConfigError("blocks= and norms= were both given. Give one of them.")
    weights = shadow.RandomWeights()
    with shadow.real_default_device(model):
        if any(map(shadow.has_no_values, model.parameters())):
            copied, device = shadow.runnable_copy(model, weights), shadow.device_of(model)
            names = {module: name for name, module in model.named_modules()}

            def same(module: Any) -> Any:
                return copied.get_submodule(names[module]) if module in names else module

            blocks, norms = tree_map_only(nn.Module, same, (blocks, norms), is_leaf=_is_module)
            model, example = copied, shadow.to_device(example, device)
        try:
            return _locate(model, forward(model, example), blocks, norms, weights, arithmetic_of)
        except LNSConfigError:
            check_finite(model.named_parameters())  # NaN in the stream looks like a stream that bypasses the norms
            raise


def _as_list(value: Any) -> Any:
    """Convert a ModuleList, another container of modules or an iterator to a list. Return other values unchanged."""
    if isinstance(value, nn.ModuleDict):
        return list(value.values())
    is_module = isinstance(value, nn.Module) and not isinstance(value, (nn.ModuleList, nn.Sequential))
    return value if is_module or not isinstance(value, Iterable) else list(value)


def _is_module(value: Any) -> bool:
    return isinstance(value, nn.Module)


def _locate(
    model: nn.Module,
    run: Callable[[], Any],
    blocks: Sequence[nn.Module] | None,
    norms: Sequence[Any] | None,
    weights: shadow.RandomWeights,
    arithmetic_of: ArithmeticOf,
) -> Located:
    with undisturbed(model):
        if norms is None:
            found = find_blocks(model, run, blocks)
            pairs: list[tuple[nn.Module, ...] | None] = [None] * len(found.blocks)
            stack: list[nn.Module | None] = [*found.blocks]
        else:
            by_user = check_user_norms(model, norms, run)
            require_no_block_between(model, by_user.blocks, by_user.trace, run)
            found, pairs, stack = Blocks("", [], by_user.trace), [*by_user.pairs], by_user.blocks
        advice = "" if norms else f"Or give its norms: {norms_example(model, found.trace)}."
        block_norms, probes, projections = _probe_blocks(stack, pairs, found.trace, weights, advice)
        hooked = [name for block, each in probes for name in norms_to_hook(block, each, arithmetic_of)]
    names = {module: name for name, module in model.named_modules()}  # a first forward may add modules
    _require_one_run(names, block_norms, found.trace)
    if found.blocks:
        with undisturbed(model):
            members = [norm for each in block_norms for norm in each]
            require_residual_stream(model, found.blocks, members, found.trace, run)
    if norms is None and blocks is None:
        with undisturbed(model):
            probe.set_training(model, True)
            members = [norm for each in block_norms for norm in each]
            require_same_in_training(model, found.blocks, members, found.trace, run)
    everything = [names[norm] for each in block_norms for norm in each]
    refuse_adapted(model, everything)
    ends = {end: [name for name in everything if name.endswith(end)] for _, each in probes for end in each.names}
    return Located(
        path=found.path,
        blocks=tuple("" if block is None else names[block] for block in stack),
        norms=tuple(tuple(names[norm] for norm in each) for each in block_norms),
        shapes=tuple(found.trace.shapes.get(each[0], ()) for each in block_norms),
        width=found.trace.shapes.get(block_norms[0][0], (0,))[-1],
        cancelled=tuple(dict.fromkeys(name for _, each in probes for name in each.cancelled)),
        partly_cancelled=tuple(dict.fromkeys(name for _, each in probes for name in each.partly_cancelled)),
        hooked=tuple(dict.fromkeys(name for end in hooked for name in ends[end])),
        left=_left(model, stack, found.trace),
        sites_from="probe" if projections else "norms=",
        projections=projections,
    )


def locate_on_first_rank(model: nn.Module, *args: Any, **options: Any) -> Located:
    """Find the norms in the first process of a launch, and use its result in all processes.

    Every process must call this function.

    :param args: positional arguments of :func:`locate`.
    :param options: keyword arguments of :func:`locate`.
    :raises LNSError: if :func:`locate` raises in the first process, or the model of this process is different.
    """
    modules = [(name, type(module).__qualname__) for name, module in model.named_modules()]
    first_modules, located = on_first_rank(lambda: (modules, locate(model, *args, **options)))
    if modules != first_modules:
        raise LNSConfigError(
            f"This process has a {type(model).__name__} of {len(modules)} modules, but the first process has one of "
            f"{len(first_modules)}. Expected the same whole model in every process. Apply the scheme before the model "
            "is split into stages."
        )
    return located


def _probe_blocks(
    stack: Sequence[nn.Module | None],
    pairs: Sequence[tuple[nn.Module, ...] | None],
    traced: Trace,
    weights: shadow.RandomWeights,
    advice: str,
) -> tuple[list[tuple[nn.Module, ...]], list[tuple[nn.Module, probe.BlockSites]], tuple[Mapping[str, int], ...]]:
    """Probe the blocks, each structure only once.

    :param stack: the blocks, None for a block that is not a module.
    :param pairs: the norms that the user passed for each block, or None.
    :returns: the norms of each block, the blocks that were probed separately with their results, and the residual
        output projections of each block.
    """
    by_structure: dict[Any, probe.BlockSites] = {}
    probes: list[tuple[nn.Module, probe.BlockSites]] = []
    numbers: dict[Any, int] = {}
    norms: list[tuple[nn.Module, ...]] = []
    projections: list[Mapping[str, int]] = []
    for number, (block, pair) in enumerate(zip(stack, pairs, strict=True), start=1):
        call = None if block is None else traced.calls.get(block)
        if block is None or call is None:
            norms.append(pair or ())
            continue
        inner = {module: name for name, module in block.named_modules()}
        names = None if pair is None else tuple(inner[norm] for norm in pair)
        key = (structure(block), names, tuple(tensor.shape for tensor in call.tensors()))
        earlier = by_structure.get(key)
        found = probe.pre_ln_sites(
            block,
            call,
            where=f"block {number}",
            names_by_user=names,
            earlier=earlier,
            advice=advice,
            weights=weights,
        )
        by_structure.setdefault(key, found)
        if found is not earlier:
            probes.append((block, found))
        first = numbers.setdefault(key, number)
        if earlier is not None and found is not earlier and found.names == earlier.names:
            _require_no_factor(found, earlier, number, first)
        norms.append(tuple(block.get_submodule(name) for name in found.names))
        projections.append(found.projections)
    return norms, probes, tuple(projections if len(projections) == len(norms) else ())


def _require_no_factor(found: probe.BlockSites, earlier: probe.BlockSites, number: int, first: int) -> None:
    """Refuse a model whose blocks multiply the outputs of their norms by 1/sqrt(l) themselves.

    The model of the paper's repository does this.

    :param found: the result for this block.
    :param earlier: the result for an earlier block with the same structure.
    :param number: number of this block.
    :param first: number of the earlier block.
    :raises LNSConfigError: if this block is the earlier one with the factor of its own number.
    """
    if found.replay.matches_scaled(earlier.replay, math.sqrt(first / number)):
        raise LNSConfigError(
            f"Block {number} ({type(found.replay.block).__name__}) computes what block {first} computes if the outputs "
            f"of its norms are multiplied by sqrt({first}/{number}). This model therefore has LayerNorm Scaling in its "
            "own code, and apply() would multiply twice. Remove the model's own factor, or do not call apply()."
        )


def _require_one_run(names: Mapping[nn.Module, str], norms: Sequence[tuple[nn.Module, ...]], traced: Trace) -> None:
    """Check that each norm ran exactly once.

    :raises LNSConfigError: if a norm did not, because other code bypasses it or another part of the model shares it.
    """
    counts = {names[norm]: traced.runs.get(norm, 0) for each in norms for norm in each}
    if problems := [f"{name} {count} times" for name, count in counts.items() if count != 1]:
        raise LNSConfigError(
            f"One forward of the model runs the norms {', '.join(problems)}. Expected each norm to run once. Either "
            "other code bypasses a norm, or two parts of the model share it. Use a separate norm in each place."
        )


def structure(block: nn.Module) -> Any:
    """Return the classes of a block's modules and the shapes and devices of its parameters.

    Two blocks have the same structure if these are equal.
    """
    modules = tuple((name, type(module)) for name, module in block.named_modules())
    return modules, tuple((name, tuple(p.shape), p.device) for name, p in block.named_parameters())


def _left(model: nn.Module, stack: Sequence[nn.Module | None], traced: Trace) -> tuple[str, ...]:
    """Return the names of what the example did not run.

    These are parts of the model with two norms or more, and single norms in the blocks.
    """
    left: list[str] = []
    for name, module in model.named_modules():
        parts = list(module.modules())
        ran = any(part in traced.runs for part in parts)
        if not ran and traced.norm_count(module) > 1 and not any(name.startswith(f"{outer}.") for outer in left):
            left.append(name)
        elif not list(module.children()) and module not in traced.runs and probe.looks_like_norm(module):
            place = ".".join("*" if part.isdigit() else part for part in name.split("."))
            inside = any(block is not None and module in set(block.modules()) for block in stack)
            if inside and place not in left:
                left.append(place)
    return tuple(left)
