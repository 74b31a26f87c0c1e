"""Apply a scheme to any PyTorch model.

One forward on an example shows which modules are the blocks. The probe (:mod:`olmo_lns.probe`) then finds the norms of
each block, and these norms are scaled. The blocks must be Pre-LN, and the norms must be modules.
"""

from __future__ import annotations

import copy
import itertools
import math
import re
import sys
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Callable, Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from olmo_lns import initialization, probe, records, shadow, sites, start_up
from olmo_lns.errors import LNSConfigError, LNSError, MeasurementError
from olmo_lns.norm import NormArithmetic
from olmo_lns.processes import is_first_process
from olmo_lns.response import first_output, measure_response, replace_first
from olmo_lns.scaled import Scaled, forbid_fused_kernels, scale
from olmo_lns.schemes import SUB_LAYERS, Scheme
from olmo_lns.whole_model.blocks import Blocks, find_blocks
from olmo_lns.whole_model.given_norms import check_given_norms
from olmo_lns.whole_model.names import norms_example
from olmo_lns.whole_model.stream import require_residual_stream
from olmo_lns.whole_model.trace import Trace
from olmo_lns.whole_model.training import require_same_in_training

#: A function that returns the arithmetic of a norm, or None if it is unknown.
ArithmeticOf = Callable[[nn.Module], NormArithmetic | None]

#: Classes of PyTorch and Megatron that wrap or compile a model.
_WRAPPERS = {
    *("OptimizedModule", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"),
    "TorchFullyShardedDataParallel",
}


@dataclass(frozen=True)
class Located:
    """The norms in front of the branches of a model.

    They are described by their names, so that the description is valid for another process and for a copy of the model.

    :param path: name of the list of blocks, or ``""`` if the user passed the blocks or the norms.
    :param blocks: name of each block, or ``""`` for a block that is not a module.
    :param norms: names of the norms of each block: those of attention and feed-forward, or the one that both read.
    :param shapes: shape of the input of each block's norms.
    :param width: the hidden size of block 1.
    :param cancelled: names of the norms whose factor is cancelled completely by a later norm.
    :param partly_cancelled: names of the norms whose factor is cancelled by a later norm in a part of the branch.
    :param hooked: names of the norms that need a hook. Without it, PyTorch runs a fused kernel on their weights.
    :param left: names of the parts of the model that the example did not run.
    :param sites_from: ``probe`` if every block was run and reads its stream through these norms only, or else where
        the norms are from: ``norms=`` or ``the config``.
    :param projections: the residual output projections of each block. It is empty if they were not determined.
    """

    path: str
    blocks: tuple[str, ...]
    norms: tuple[tuple[str, ...], ...]
    shapes: tuple[tuple[int, ...], ...] = ()
    width: int = 0
    cancelled: tuple[str, ...] = ()
    partly_cancelled: tuple[str, ...] = ()
    hooked: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    sites_from: str = "probe"
    projections: tuple[Mapping[str, int], ...] = ()

    def blocks_of(self, model: nn.Module) -> list[nn.Module]:
        """Return the blocks of a model. For a block that is not a module, return the parent of its first norm."""
        names = zip(self.blocks, self.norms, strict=True)
        return [model.get_submodule(block or norms[0].rpartition(".")[0]) for block, norms in names]

    def norms_of(self, model: nn.Module) -> dict[str, list[nn.Module]]:
        """Return the norms of a model: name of a norm with ``*`` for the block's number -> this norm in all blocks."""
        norms: dict[str, list[nn.Module]] = {}
        for names in zip(*self.norms, strict=True) if len({*map(len, self.norms)}) == 1 else self.norms:
            by_place: dict[str, list[str]] = {}
            for name in names:
                by_place.setdefault(re.sub(r"\d+", "*", name), []).append(name)
            for alike in by_place.values():
                numbers = zip(*(re.findall(r"\d+", name) for name in alike), strict=True)
                differing = iter(["*" if len({*each}) > 1 else each[0] for each in numbers])
                place = re.sub(r"\d+", lambda match, differing=differing: next(differing), alike[0])  # type: ignore[misc]
                norms.setdefault(place, []).extend(map(model.get_submodule, alike))
        return norms


def require_unwrapped(model: nn.Module) -> None:
    """Check that the model can be measured.

    :raises LNSConfigError: if it is not a module, is compiled or wrapped by DDP or FSDP, has offloaded or lazy weights,
        or if the caller is in inference mode.
    """
    if not isinstance(model, nn.Module):
        raise LNSConfigError(f"apply found a {type(model).__name__}. It expects a built model, a torch.nn.Module.")
    refuse_wrappers(model)
    refuse_offloaded(model)
    if any(map(torch.nn.parameter.is_lazy, model.parameters())):
        raise LNSConfigError(
            f"{type(model).__name__} has lazy modules, whose weights have no shape yet. apply expects a built model. "
            "Run the model once on an example first."
        )
    if torch.is_inference_mode_enabled():
        raise LNSConfigError(
            "apply was called inside torch.inference_mode(), in which PyTorch computes no gradients. The norms are "
            "measured with their gradients. Call apply before inference mode begins."
        )


def require_weights(model: nn.Module) -> None:
    """Check that this process has all weights of the model.

    :raises LNSConfigError: if weights are on the meta device, partitioned, or offloaded by accelerate.
    """
    refuse_offloaded(model)
    if any(map(shadow.has_no_values, model.parameters())):
        raise LNSConfigError(
            f"The weights of {type(model).__name__} are on the meta device or partitioned. Expected a model with all "
            "of its weights. Load or gather them first."
        )


def refuse_wrappers(model: nn.Module) -> None:
    """Refuse a wrapped model.

    :raises LNSConfigError: if a module is compiled, or wrapped by DDP or FSDP.
    """
    for module in model.modules():
        kinds = {base.__name__ for base in type(module).__mro__}
        if kinds & _WRAPPERS or getattr(module, "_compiled_call_impl", None) is not None:
            raise LNSConfigError(
                f"{type(module).__name__} is compiled, or wrapped by DDP or FSDP: its norms can no longer be measured. "
                "Apply first: build the model, apply the scheme, then compile and wrap."
            )


def refuse_offloaded(model: nn.Module) -> None:
    """Refuse a model whose weights accelerate keeps on the CPU or the disk and loads for each forward.

    :raises LNSConfigError: if a module has such weights. The message names it.
    """
    for name, module in model.named_modules():
        hook = getattr(module, "_hf_hook", None)
        if any(getattr(each, "offload", False) for each in getattr(hook, "hooks", (hook,))):
            raise LNSConfigError(
                f"accelerate has offloaded the weights of {name or type(model).__name__} to the CPU or the disk, and "
                "loads them for each forward. Expected the weights in the model itself. Load the model without "
                "device_map= and offloading, or call accelerate.hooks.remove_hook_from_submodules(model) first."
            )


def refuse_adapted(model: nn.Module, norms: Iterable[str]) -> None:
    """Refuse norms that PEFT has wrapped, as LNTuning and ``modules_to_save`` do.

    Such a norm exists twice, once in the adapter and once in the base model.

    :param norms: names of norms in ``model``.
    :raises LNSConfigError: if a norm is wrapped. The message names it.
    """
    modules = dict(model.named_modules())
    for norm in norms:
        parts = norm.split(".")
        for module in (modules[".".join(parts[:end])] for end in range(1, len(parts))):
            has_base = hasattr(module, "base_layer") or hasattr(module, "original_module")
            if has_base and type(module).__module__.startswith("peft."):
                raise LNSConfigError(
                    f"PEFT has wrapped the norm {norm}: the adapter and the base model have a norm each. Expected one "
                    "norm in each place. Apply a scheme before get_peft_model, and fold or save the model after "
                    "merge_and_unload()."
                )


def forward(model: nn.Module, example: Any = None) -> Callable[[], Any]:
    """Return a function that runs one forward of ``model`` on ``example``.

    :param example: as for :func:`olmo_lns.apply`. By default it is eight random token ids.
    :raises LNSConfigError: if there is no example and the model has no token embedding. The returned function raises it
        if the model does not accept the example.
    """
    if example is None:
        rows = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
        if not rows:
            raise LNSConfigError(
                f"{type(model).__name__} has no token embedding. Pass the input of a forward as example=."
            )
        ids = torch.randint(min(rows), (1, 8), generator=torch.Generator().manual_seed(0), device="cpu")
        example = ids.to(shadow.device_of(model))

    def run() -> Any:
        with probe.same_randomness(shadow.device_of(model)):
            return once()

    def once() -> Any:
        try:
            if callable(example) and not torch.is_tensor(example):
                return example(model)
            if isinstance(example, Mapping):
                return model(**example)
            return model(*example) if isinstance(example, (tuple, list)) else model(example)
        except Exception as error:
            raise LNSConfigError(
                f"{type(model).__name__} does not take the example ({type(error).__name__}: {error}). Give example= a "
                "tensor, a tuple of arguments, a dict of keywords, or a function of the model that runs its forward."
            ) from error

    return run


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Put the model into eval mode without gradients and compilers, and restore its state afterwards.

    The modes, buffers and attributes of all modules and the states of the random generators are restored. The mode of
    each module is set directly, since its method ``train`` may do more, such as merging adapters.
    """
    training = {module: module.training for module in model.modules()}
    plain = [module for module in training if not isinstance(module, torch.jit.ScriptModule)]
    attributes = {module: (_members(module), _attributes(module)) for module in plain}
    buffers = [(module, dict(module._buffers)) for module in training]
    values = {
        buffer: buffer.detach().clone()
        for _, owned in buffers
        for buffer in owned.values()
        if buffer is not None and not buffer.is_meta and buffer.layout == torch.strided
    }
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    for module in training:
        module.training = False
    try:
        with torch.random.fork_rng(devices), torch.no_grad(), _without_compilers():
            yield
    finally:
        for module, mode in training.items():
            module.training = mode
        for module, (members, saved) in attributes.items():
            if members == _members(module):  # otherwise the forward has built parts of the module
                _restore_attributes(module, saved)
        for module, owned in buffers:
            for name in module._buffers.keys() - owned.keys():
                del module._buffers[name]
            module._buffers.update(owned)
        with torch.no_grad():
            for buffer, value in values.items():
                if buffer.shape == value.shape and not torch.equal(buffer, value):
                    buffer.copy_(value)


def _without_compilers() -> Any:
    """Run compiled functions without their compiled code.

    Dynamo does not check whether hooks were added, so it would run code that it compiled without them.
    """
    compiler = getattr(torch, "compiler", None)
    is_used = "torch._dynamo" in sys.modules and hasattr(compiler, "set_stance")
    return compiler.set_stance("force_eager") if is_used else nullcontext()  # type: ignore[union-attr]


def _members(module: nn.Module) -> tuple[set[str], set[str]]:
    return set(module._modules), set(module._parameters)


#: Attributes of a module that a forward does not use as state, or that are restored in another way. ``_old_forward`` is
#: the forward behind accelerate's hooks.
_KEPT = ("_parameters", "_modules", "_buffers", "training", "forward", "_old_forward")


def _attributes(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Return the attributes in which a forward may keep state: name -> the value, and a copy of it if a container."""
    found = {name: value for name, value in vars(module).items() if name not in _KEPT and not name.startswith("lns_")}
    containers = (list, dict, set)
    return {
        name: (value, copy.copy(value) if type(value) in containers else None)
        for name, value in found.items()
        if "hook" not in name
    }


def _contents(container: Any) -> list[Any]:
    return [*container, *(container.values() if isinstance(container, dict) else ())]


def _restore_attributes(module: nn.Module, saved: Mapping[str, tuple[Any, Any]]) -> None:
    """Restore the attributes that a module had before a forward."""
    for name in _attributes(module).keys() - saved.keys():
        del vars(module)[name]
    for name, (value, content) in saved.items():
        if vars(module).get(name) is not value:
            vars(module)[name] = value
        if content is not None and [*map(id, _contents(value))] != [*map(id, _contents(content))]:
            value.clear()
            value.extend(content) if isinstance(value, list) else value.update(content)


def locate(
    model: nn.Module,
    example: Any = None,
    blocks: Sequence[nn.Module] | None = None,
    norms: Sequence[Any] | None = None,
    *,
    arithmetic_of: ArithmeticOf = lambda norm: None,
) -> Located:
    """Find the norms in front of the branches of a model.

    The model is run once, and then one block of each structure is run repeatedly. If the weights of the model do not
    exist yet, a shadow of it is run instead (:mod:`olmo_lns.shadow`).

    :param example: as for :func:`olmo_lns.apply`.
    :param blocks: the blocks, if the user passed them.
    :param norms: the norms of each block from block 1, as pairs or as one norm that both branches read, if the user
        passed them.
    :param arithmetic_of: as in :func:`attach`.
    :raises LNSConfigError: if no list of Pre-LN blocks is found.
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
        return _locate(model, forward(model, example), blocks, norms, weights, arithmetic_of)


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
            given = check_given_norms(model, norms, run)
            found, pairs, stack = Blocks("", [], given.trace), [*given.pairs], given.blocks
        advice = "" if norms else f"Or give its norms: {norms_example(model, found.trace)}."
        block_norms, probes, projections = _probe_blocks(stack, pairs, found.trace, weights, advice)
        hooked = [name for block, each in probes for name in _norms_to_hook(block, each, arithmetic_of)]
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
        found.path,
        tuple("" if block is None else names[block] for block in stack),
        tuple(tuple(names[norm] for norm in each) for each in block_norms),
        tuple(found.trace.shapes.get(each[0], ()) for each in block_norms),
        found.trace.shapes.get(block_norms[0][0], (0,))[-1],
        tuple(dict.fromkeys(name for _, each in probes for name in each.cancelled)),
        tuple(dict.fromkeys(name for _, each in probes for name in each.partly_cancelled)),
        tuple(dict.fromkeys(name for end in hooked for name in ends[end])),
        _left(model, stack, found.trace),
        "probe" if projections else "norms=",
        projections,
    )


def locate_on_first_rank(model: nn.Module, *args: Any, **options: Any) -> Located:
    """Find the norms in the first process of a launch, and use its result in all processes.

    Every process must call this function.

    :param args: positional arguments of :func:`locate`.
    :param options: keyword arguments of :func:`locate`.
    :raises LNSError: if :func:`locate` raises in the first process, or the model of this process is different.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return locate(model, *args, **options)
    result: list[Any] = [None]
    modules = [(name, type(module).__qualname__) for name, module in model.named_modules()]
    if dist.get_rank() == 0:
        try:
            result = [(modules, locate(model, *args, **options))]
        except Exception as error:  # the other processes wait for a broadcast
            problem = error if isinstance(error, LNSError) else LNSConfigError(f"{type(error).__name__}: {error}")
            result = [problem]
            dist.broadcast_object_list(result, src=0)
            raise
    dist.broadcast_object_list(result, src=0)
    if isinstance(result[0], LNSError):
        raise result[0]
    first_modules, located = result[0]
    if modules != first_modules:
        raise LNSConfigError(
            f"this process has a {type(model).__name__} of {len(modules)} modules, the first process one of "
            f"{len(first_modules)}. Apply to the same whole model in every process, before it is split into stages."
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
        known = by_structure.get(key)
        found = probe.pre_ln_sites(
            block,
            call,
            where=f"block {number}",
            names=names,
            known_result=known,
            given=pair is not None,
            advice=advice,
            weights=weights,
        )
        by_structure.setdefault(key, found)
        if found is not known:
            probes.append((block, found))
        first = numbers.setdefault(key, number)
        if known is not None and found is not known and found.names == known.names:
            _require_no_factor(found, known, number, first)
        norms.append(tuple(block.get_submodule(name) for name in found.names))
        projections.append(found.projections)
    return norms, probes, tuple(projections if len(projections) == len(norms) else ())


def _require_no_factor(found: probe.BlockSites, known: probe.BlockSites, number: int, first: int) -> None:
    """Refuse a model whose blocks multiply the outputs of their norms by 1/sqrt(l) themselves.

    The model of the paper's repository does this.

    :param found: the result for this block.
    :param known: the result for an earlier block with the same structure.
    :param number: number of this block.
    :param first: number of the earlier block.
    :raises LNSConfigError: if this block is the earlier one with the factor of its own number.
    """
    if found.replay.matches_scaled(known.replay, math.sqrt(first / number)):
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


# --- fused kernels that read the weights of a norm and do not call it -----------------------------------------------


def _norms_to_hook(block: nn.Module, found: probe.BlockSites, arithmetic_of: ArithmeticOf) -> tuple[str, ...]:
    """Return the names of the norms that need a hook, so that PyTorch does not replace them by a fused kernel.

    They need one if a copy of the block with scaled norms computes something else than a copy whose norms are
    multiplied by hooks.

    :raises MeasurementError: if the copy with scaled norms still differs when it has such a hook.
    """
    if not _differences(block, found, arithmetic_of, hooked=False):
        return ()
    if modes := _differences(block, found, arithmetic_of, hooked=True):
        raise MeasurementError(
            f"{type(block).__name__} does not compute what its norms {' and '.join(found.names)} give {modes[0]} if no "
            "hook is registered on them. A fused kernel in it reads the weights of the norms and does not call the "
            "norms, so a factor would be lost. Switch that kernel off."
        )
    return found.names


def _differences(block: nn.Module, found: probe.BlockSites, arithmetic_of: ArithmeticOf, *, hooked: bool) -> list[str]:
    """Return the modes in which a copy of the block with scaled norms differs from a copy with multiplying hooks.

    :param hooked: register a hook that changes nothing on each scaled norm.
    """
    replay, factor, differing = found.replay, 0.5, []
    reference, scaled_copy = (probe.random_copy(block, replay.block, dtype=replay.dtype) for _ in range(2))
    for each in (reference, scaled_copy):
        sites.restore(each)
    for name in found.names:
        reference.get_submodule(name).register_forward_hook(
            lambda module, args, output: replace_first(output, factor * first_output(output))
        )
        norm = scaled_copy.get_submodule(name)
        shape = replay.shapes[name]
        scale(norm, factor, where=name, width=shape[-1], shape=shape, arithmetic=arithmetic_of(norm))
        if hooked:
            forbid_fused_kernels(norm)
    for trains, grad in itertools.product((False, True), (False, True)):
        outputs = []
        for each in (reference, scaled_copy):
            each.train(trains)
            with torch.set_grad_enabled(grad):
                outputs.append(replay.call.replay(each, replay.x).detach().double())
        if not float((outputs[0] - outputs[1]).norm()) < replay.tolerance * float(outputs[0].norm()):
            differing.append(f"in {'training' if trains else 'eval'} mode {'with' if grad else 'without'} gradients")
    return differing


# --- scale the norms ------------------------------------------------------------------------------------------------


def attach(
    model: nn.Module,
    located: Located,
    scheme: Scheme,
    arithmetic_of: ArithmeticOf = lambda norm: None,
    *,
    trained: bool | None = None,
) -> list[str]:
    """Scale the norms of a model. If they have the scheme already, measure them again.

    :param located: the norms, from :func:`locate`.
    :param arithmetic_of: a function that returns the arithmetic of a norm, or None if it is unknown.
    :param trained: as in :func:`olmo_lns.apply`.
    :returns: what was measured, for the start-up line.
    :raises CheckpointMismatchError: if the weights were trained without a factor.
    :raises LNSConfigError: if the scheme does more than multiply norms, or the norms have another scheme.
    :raises MeasurementError: if the output of a norm is not its factor times the output before. The model is left
        unchanged.
    """
    refuse_foreign_attributes(model, located)
    n_layers, current = len(located.norms), sites.read_back(model)
    if scheme.is_pre_ln or not scheme.only_scales_norms(n_layers):
        raise LNSConfigError(
            f"The scheme is {scheme}. Expected one that only multiplies norms, such as lns:exponent=0.25."
        )
    if not current.is_pre_ln and current != scheme:
        raise LNSConfigError(
            f"{type(model).__name__} has the scheme {current} already, not {scheme}. Build a new model."
        )
    scaled_norms = {norm for _, norm, _ in sites.in_model(model)}
    norms = {name: model.get_submodule(name) for names in located.norms for name in names}
    is_attached = not scaled_norms.isdisjoint(norms.values())  # another tower may have the scheme already
    if not is_attached:
        matrices = initialization.matrices_of(located.blocks_of(model))
        part = initialization.trained_part(located.norms_of(model), matrices)
        source = getattr(model, "name_or_path", "") or type(model).__name__
        records.require_fresh(part, scheme, source=source, trained=trained)
    measured: list[tuple[str, ...]] = [("sites",)] if located.sites_from == "probe" else []
    with shadow.real_default_device(model), sites.stock_on_failure(model):
        if located.projections:
            initialization.mark(located.blocks_of(model), located.projections, located.norms_of(model))
        for number, (names, shape) in enumerate(zip(located.norms, located.shapes, strict=True), start=1):
            for name in names:
                read_by = SUB_LAYERS if len(names) == 1 else (SUB_LAYERS[names.index(name)],)
                norm_sites = [sites.Site(scheme, number, n_layers, sub_layer) for sub_layer in read_by]
                norm, where, width = norms[name], f"block {number}, {name}", (shape or (located.width,))[-1]
                if is_attached:
                    if not isinstance(norm, Scaled):
                        raise MeasurementError(
                            f"{where}: found a norm without its factor: it replaced a scaled norm. "
                            "Build a new model and apply the scheme after norms are replaced."
                        )
                    if (found := vars(norm).get("lns_sites")) != tuple(norm_sites):
                        raise MeasurementError(
                            f"{where}: found the factor of {found[0] if found else 'no block'}. Its block was moved "
                            "after the scheme was applied. Build a new model and apply the scheme to its final order."
                        )
                    measured.append(_measure(norm, width, shape, where))
                    continue
                if len(factors := {site.plan.norm_scale for site in norm_sites}) > 1:
                    raise LNSConfigError(f"{where}: {scheme} has two factors for the norm that both branches read.")
                sites.mark(norm, *norm_sites)
                factor, arithmetic = factors.pop(), arithmetic_of(norm)
                measured.append(scale(norm, factor, where=where, width=width, shape=shape, arithmetic=arithmetic))
                if name in located.hooked:
                    forbid_fused_kernels(norm)
        sites.require_complete(nn.ModuleList(norms.values()), scheme, n_layers)
    return list(dict.fromkeys(itertools.chain(*measured)))


def refuse_foreign_attributes(model: nn.Module, located: Located) -> None:
    """Refuse norms that have an attribute with a name that this package uses.

    :raises LNSConfigError: if there is one. The message names the norm and the attribute.
    """
    for names in located.norms:
        for name in names:
            norm = model.get_submodule(name)
            own = [key for key in vars(norm) if key in Scaled.__annotations__]
            if own and not isinstance(norm, Scaled):
                raise LNSConfigError(
                    f"{name} has an attribute {own[0]} of its own, a name that olmo_lns uses for its factor. Rename "
                    "it, or remove a scaling of your own before you apply one."
                )


def describe_initialization(model: nn.Module, located: Located) -> str:
    """Return what the start-up line says about the initialization, or ``""`` for trained weights."""
    if located.projections and any(map(shadow.has_no_values, model.parameters())):
        return "scaled initialization: call olmo_lns.plain_initialization(model) once the weights are drawn"
    matrices = initialization.matrices_of(located.blocks_of(model))
    trained = initialization.trained_part(located.norms_of(model), matrices)
    return "" if trained else str(initialization.measure(nn.ModuleList(located.blocks_of(model))))


def _measure(norm: Any, width: int, shape: tuple[int, ...], where: str) -> tuple[str, ...]:
    """Measure a norm that was scaled before.

    :returns: what was measured.
    :raises MeasurementError: if its output is not its factor times the output of the stock norm.
    """
    stock = copy.deepcopy(norm)
    sites.restore(stock)
    found, expected = (measure_response(each, width, shape) for each in (norm, stock))
    if problem := found.problem(expected, getattr(norm, "lns_scale", 1.0)):
        raise MeasurementError(f"{where}: measured {problem}. Apply the scheme after norms are replaced.")
    return found.measured


def check_without_hooks(model: nn.Module, located: Located, example: Any = None) -> None:
    """Check that the whole model calls its scaled norms, and does not replace them by a fused kernel.

    Such a kernel is not used for a norm with a hook. The output of the model without hooks is therefore compared with
    its output with hooks that change nothing. A model without weights cannot be run and is not checked.

    :raises MeasurementError: if the two outputs differ.
    """
    if not is_first_process() or any(map(shadow.has_no_values, model.parameters())):
        return
    run = forward(model, example)
    norms = [model.get_submodule(name) for names in located.norms for name in names]
    is_single = all(parameter.dtype in (torch.float32, torch.float64) for parameter in model.parameters())
    tolerance = probe.SAME if is_single else probe.SAME_HALF

    def output(*, hooked: bool) -> list[torch.Tensor]:
        handles = [norm.register_forward_hook(_change_nothing) for norm in norms if hooked]
        with probe.hooks(handles), undisturbed(model):
            torch.manual_seed(0)
            leaves = tree_leaves(_plain(run()))
        return [leaf.detach().double() for leaf in leaves if torch.is_tensor(leaf) and leaf.is_floating_point()]

    def same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
        pairs = zip(some, others, strict=False)
        return all(a.shape == b.shape and float((a - b).norm()) <= tolerance * float(b.norm()) for a, b in pairs)

    without, hooked = output(hooked=False), output(hooked=True)
    # If two forwards with hooks differ as well, the model has a state that each forward changes. It is not compared.
    if not same(without, hooked) and same(hooked, output(hooked=True)):
        raise MeasurementError(
            f"{type(model).__name__} computes something else if hooks are registered on its norms. Expected the same "
            "result. A fused kernel outside of its blocks reads the weights of the norms and does not call the norms. "
            "Switch that kernel off."
        )


def _change_nothing(module: nn.Module, args: Any, output: Any) -> None:
    """Do nothing, as a forward hook."""


def _plain(output: Any) -> Any:
    """Convert an output class of transformers, which is a mapping, to a dict, which PyTorch can traverse."""
    return dict(output) if isinstance(output, Mapping) else output


def report(model: nn.Module, located: Located, measured: Sequence[str], initialization: str = "") -> None:
    """Write the start-up line in the first process.

    :param measured: what was measured, from :func:`attach`.
    :param initialization: what the line says about the initialization.
    """
    if not is_first_process():
        return
    norms = nn.ModuleList(model.get_submodule(name) for names in located.norms for name in names)
    if initialization and not any(map(shadow.has_no_values, model.parameters())):
        measured = [*measured, "initialization"]
    kinds = dict.fromkeys(type(module).__name__.removeprefix("LNS") for module in norms)
    line = start_up.start_up_line(
        norms, len(located.norms), measured=measured, norm=", ".join(kinds), initialization=initialization
    )
    if located.sites_from != "probe":
        line += f"; sites from {located.sites_from}, not measured"
    if located.cancelled:
        line += f"; a later norm cancels the factor of {', '.join(located.cancelled)}"
    if located.partly_cancelled:
        line += f"; a later norm cancels the factor of {', '.join(located.partly_cancelled)} in a part of its branch"
    for name, module in model.named_modules():
        is_inner = name and "transformers.modeling_utils" in [base.__module__ for base in type(module).__mro__]
        if is_inner and all(norm.startswith(f"{name}.") for names in located.norms for norm in names):
            line += f"; the config of {name} does not record it: apply to {name} itself if it is saved by itself"
            break
    if located.left:
        line += f"; left as it is, since the example does not run it: {', '.join(located.left)}"
    start_up.write_line(line)
