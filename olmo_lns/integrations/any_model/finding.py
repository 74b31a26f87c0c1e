"""Find the norms of a model: its blocks by one forward, and the norms of each block by the probe."""

from __future__ import annotations

import logging
from typing import Any, Callable, Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from olmo_lns import probe, shadow
from olmo_lns.errors import LNSConfigError
from olmo_lns.folding import check_finite
from olmo_lns.integrations.any_model.example import forward, undisturbed
from olmo_lns.integrations.any_model.fused_kernels import ArithmeticOf, norms_to_hook
from olmo_lns.integrations.any_model.located import Located
from olmo_lns.integrations.any_model.norm_check import check_norms
from olmo_lns.integrations.any_model.probing import BlockProbes
from olmo_lns.integrations.any_model.refusals import refuse_adapted
from olmo_lns.integrations.any_model.state import restored
from olmo_lns.processes import on_first_rank
from olmo_lns.whole_model.blocks import Blocks, find_blocks
from olmo_lns.whole_model.confirmation import Confirmation, can_confirm, confirming
from olmo_lns.whole_model.depth import require_no_block_between
from olmo_lns.whole_model.names import norms_example
from olmo_lns.whole_model.stream import require_residual_stream
from olmo_lns.whole_model.trace import Trace
from olmo_lns.whole_model.training import require_same_in_training, require_stream_in_training, trace_in_training
from olmo_lns.whole_model.user_norms import check_user_norms

log = logging.getLogger("olmo_lns")

#: What a model raises if it cannot run with the weights of the probe. Its blocks are then examined one by one.
_REFUSALS = (LNSConfigError, RuntimeError, TypeError, ValueError, KeyError, AttributeError)


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
    :param arithmetic_of: as in :func:`scale_norms`.
    :raises LNSConfigError: if no list of Pre-LN blocks is found, or if a weight is not finite.
    :raises MeasurementError: if a block cannot be run again.
    """
    blocks, norms = _as_list(blocks), _as_list(norms)
    norms = [_as_list(each) for each in norms] if isinstance(norms, list) else norms
    if blocks is not None and norms is not None:
        raise LNSConfigError("blocks= and norms= were both passed. Pass one of them.")
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


def _is_finite(stream: torch.Tensor) -> bool:
    """Return true if a stream holds neither NaN nor infinite values.

    :raises LNSConfigError: if it cannot be read, because it belongs to a transformation of ``torch.func``.
    """
    try:
        return bool(torch.isfinite(stream.sum()))
    except RuntimeError as error:
        raise LNSConfigError(
            "The example runs the blocks inside of a transformation of torch.func, such as vmap, so their streams "
            "cannot be read after the forward. Expected a forward without it. Pass an example= that runs the blocks "
            f"directly. ({error})"
        ) from error


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
            streams = (found.trace.outputs[block] for block in found.blocks if block in found.trace.outputs)
            if not all(map(_is_finite, streams)):
                check_finite(model.named_parameters())  # the probe has weights of its own, which do not show it
            pairs: list[tuple[nn.Module, ...] | None] = [None] * len(found.blocks)
            stack: list[nn.Module | None] = [*found.blocks]
        else:
            by_user = check_user_norms(model, norms, run)
            require_no_block_between(model, by_user.blocks, by_user.trace, run)
            found, pairs, stack = Blocks("", [], by_user.trace), [*by_user.pairs], by_user.blocks
        advice = "" if norms else f"Or pass its norms: {norms_example(model, found.trace)}."
        probes = BlockProbes(stack, pairs, found.trace, advice, weights)
        probes.probe_structures()
        # The attributes that the model sets on its blocks in its forward stay until all blocks have been copied.
        confirmed, in_training, traced = _confirm(model, found, probes, run)
        probes.probe_others(confirmed.blocks, in_training.order if in_training is not None else ())
        to_check = [*probes.separately, *probes.equal_only_with_hooks]
        hooked = [name for block, each in to_check for name in norms_to_hook(block, each, arithmetic_of)]
        block_norms, projections = probes.norms, probes.projections
        names = {module: name for name, module in model.named_modules()}  # a first forward may add modules
        check_norms(names, block_norms, found.trace.shapes, shadow.device_of(model), probes.probed)
    members = [norm for each in block_norms for norm in each]
    _require_one_run(names, block_norms, found.trace)
    if found.blocks and not confirmed.is_residual_stream:
        with undisturbed(model):
            require_residual_stream(model, found.blocks, members, found.trace, run)
    if norms is None:
        with undisturbed(model):
            probe.set_training(model, True)
            require_same_in_training(
                model, found.blocks, members, found.trace, run, traced, in_training, named_by_user=blocks is not None
            )
    if found.blocks and (in_training is None or not in_training.blocks.issuperset(found.blocks)):
        with undisturbed(model):
            probe.set_training(model, True)
            require_stream_in_training(model, found.blocks, members, found.trace, _restoring(model, run))
    everything = [names[norm] for each in block_norms for norm in each]
    refuse_adapted(model, everything)
    separately = probes.separately
    ends = {end: [name for name in everything if name.endswith(end)] for _, each in separately for end in each.names}
    return Located(
        path=found.path,
        blocks=tuple("" if block is None else names[block] for block in stack),
        norms=tuple(tuple(names[norm] for norm in each) for each in block_norms),
        shapes=tuple(found.trace.shapes.get(each[0], ()) for each in block_norms),
        width=found.trace.shapes.get(block_norms[0][0], (0,))[-1],
        cancelled=tuple(dict.fromkeys(name for _, each in separately for name in each.cancelled)),
        partly_cancelled=tuple(dict.fromkeys(name for _, each in separately for name in each.partly_cancelled)),
        hooked=tuple(dict.fromkeys(name for end in hooked for name in ends[end])),
        not_run=_parts_not_run(model, stack, found.trace),
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


def _confirm(
    model: nn.Module, found: Blocks, probes: BlockProbes, run: Callable[[], Any]
) -> tuple[Confirmation, Confirmation | None, Trace | None]:
    """Run the model once in eval mode and once in training mode, and confirm what the probed blocks show.

    :returns: the blocks that were confirmed in both modes; the result of training mode, which is None if the forward
        failed; and what was observed in training mode, which is also None if a block did something else in it.
    """
    replays = probes.replays
    if not can_confirm(found.blocks, replays, found.trace):
        return Confirmation(), None, None
    try:
        eval_mode = confirming(found.blocks, replays, found.trace, trains=False, in_dtype_of_model=True)
        with undisturbed(model), eval_mode as in_eval:
            run()
    except _REFUSALS as error:  # the model refuses such weights, or a replaced forward
        log.debug("the blocks are examined one by one, since the model does not run with other weights: %s", error)
        return Confirmation(), None, None
    try:
        with undisturbed(model):
            probe.set_training(model, True)
            training_mode = confirming(found.blocks, replays, found.trace, trains=True, in_dtype_of_model=False)
            with training_mode as in_training:
                # A hook on a part of a block would switch off a fused kernel, which this forward could notice.
                parts = {part for block in found.blocks for part in block.modules()} - set(found.blocks)
                trace = trace_in_training(model, run, apart_from=parts)
    except _REFUSALS as error:  # it needs labels, or writes to its weights
        log.debug("the blocks are examined one by one, since the model does not run in training mode: %s", error)
        return Confirmation(is_residual_stream=in_eval.is_residual_stream), None, None
    confirmed = Confirmation(in_eval.blocks & in_training.blocks, in_eval.is_residual_stream)
    return confirmed, in_training, trace if in_training.is_residual_stream else None


def _restoring(model: nn.Module, run: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function that runs one forward and restores what the forward changed in the model."""

    def run_restored() -> None:
        with restored(model):
            run()

    return run_restored


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


def _parts_not_run(model: nn.Module, stack: Sequence[nn.Module | None], traced: Trace) -> tuple[str, ...]:
    """Return the names of what the example did not run.

    These are parts of the model with two norms or more, and single norms in the blocks.
    """
    not_run: list[str] = []
    for name, module in model.named_modules():
        parts = list(module.modules())
        ran = any(part in traced.runs for part in parts)
        if not ran and traced.norm_count(module) > 1 and not any(name.startswith(f"{outer}.") for outer in not_run):
            not_run.append(name)
        elif not list(module.children()) and module not in traced.runs and probe.looks_like_norm(module):
            place = ".".join("*" if part.isdigit() else part for part in name.split("."))
            inside = any(block is not None and module in set(block.modules()) for block in stack)
            if inside and place not in not_run:
                not_run.append(place)
    return tuple(not_run)
