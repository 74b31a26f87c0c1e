"""Any PyTorch model: find its blocks by one forward on an example and their norms by the probe, and scale the norms.

The blocks must be Pre-LN and the norms must be modules.
"""

from __future__ import annotations

import copy
import os
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Callable, Container, Iterator, Mapping, NamedTuple, Sequence

import torch
from torch import nn

from olmo_lns import initialization, probe, record, shadow, sites, start_up
from olmo_lns.errors import LNSConfigError, MeasurementError
from olmo_lns.response import response
from olmo_lns.scaled import Scaled, scale
from olmo_lns.schemes import SUB_LAYERS, Scheme

#: Classes of PyTorch and Megatron that wrap or compile a model.
_WRAPPERS = {
    *("OptimizedModule", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"),
    "TorchFullyShardedDataParallel",
}


@dataclass(frozen=True)
class Stack:
    """The blocks of a model and the norms in front of their branches.

    :param path: path of the list in the model, ``""`` for given blocks. :param width: the hidden size.
    :param names: names of the norms of each block: attention's and feed-forward's, or one that both read.
    :param cancelled: norms whose factor a later norm cancels.
    :param projections: the residual output projections of each block; empty if they were not looked for.
    """

    path: str
    blocks: list[nn.Module]
    names: list[tuple[str, ...]]
    width: int
    cancelled: tuple[str, ...] = ()
    projections: Sequence[Mapping[str, int]] = ()

    @property
    def norms(self) -> dict[str, list[nn.Module]]:
        """Name in the block -> that norm in all blocks."""
        norms: dict[str, list[nn.Module]] = {}
        for block, names in zip(self.blocks, self.names, strict=True):
            for name in names:
                norms.setdefault(name, []).append(block.get_submodule(name))
        return norms


def require_unwrapped(model: nn.Module) -> None:
    """Check that the model can be measured.

    :raises LNSConfigError: it is compiled, or wrapped by DDP or FSDP, or the caller is in inference mode.
    """
    if not isinstance(model, nn.Module):
        raise LNSConfigError(f"apply expects a built model, a torch.nn.Module; found a {type(model).__name__}.")
    refuse_wrappers(model)
    if torch.is_inference_mode_enabled():
        raise LNSConfigError(
            "apply was called inside torch.inference_mode(), in which PyTorch computes no gradients. The norms are "
            "measured with their gradients. Call apply before inference mode begins."
        )


def refuse_wrappers(model: nn.Module) -> None:
    """Refuse a wrapped model. :raises LNSConfigError: a module is compiled, or wrapped by DDP or FSDP."""
    for module in model.modules():
        kinds = {base.__name__ for base in type(module).__mro__}
        if kinds & _WRAPPERS or getattr(module, "_compiled_call_impl", None) is not None:
            raise LNSConfigError(
                f"{type(module).__name__} is compiled, or wrapped by DDP or FSDP: its norms can no longer be measured. "
                "Apply first: build the model, apply the scheme, then compile and wrap."
            )


def forward(model: nn.Module, example: Any = None) -> Callable[[], Any]:
    """Return a function that runs one forward of ``model`` on ``example``."""
    if example is None:
        rows = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
        if not rows:
            raise LNSConfigError(f"{type(model).__name__} has no token embedding: give example=, a forward's input.")
        ids = torch.randint(min(rows), (1, 8), generator=torch.Generator().manual_seed(0), device="cpu")
        example = ids.to(shadow.device_of(model))

    def run() -> Any:
        try:
            if callable(example) and not torch.is_tensor(example):
                return example(model)
            if isinstance(example, dict):
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
    """Run in eval mode without gradients; restore the modes and the random states afterwards."""
    training = {module: module.training for module in model.modules()}
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    model.eval()
    try:
        with torch.random.fork_rng(devices), torch.no_grad():
            yield
    finally:
        for module, mode in training.items():
            module.training = mode


def _call(args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> probe.Call | None:
    """Return the call of a module whose output has the shape of its first floating matrix, the stream; else None."""
    arguments: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    stream = probe.stream_of(output)
    for key, value in arguments:
        is_matrix = torch.is_tensor(value) and value.is_floating_point() and value.dim() >= 2
        if is_matrix and (stream is None or stream.shape == value.shape):
            return probe.Call(tuple(args), dict(kwargs), key)
    return None


class Forward(NamedTuple):
    """One forward of a model.

    :param name: name of the list of blocks, ``""`` for given blocks. :param calls: the call of each block.
    :param runs: module -> the number of its runs.
    """

    name: str
    blocks: list[nn.Module]
    calls: list[probe.Call]
    runs: Mapping[nn.Module, int]


def find_blocks(model: nn.Module, run: Callable[[], Any], blocks: Sequence[nn.Module] | None = None) -> Forward:
    """Find the blocks of ``model``: the outermost list whose elements each run once, in order, on one stream.

    :param run: runs one forward of the model.
    :param blocks: the blocks, if they are known.
    :raises LNSConfigError: no such list, or several.
    """
    kinds = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
    lists = {name: list(module.children()) for name, module in model.named_modules() if isinstance(module, kinds)}
    # A layer without children is not a block: the head of a model may be a Sequential of its norm and a dropout.
    modules = {module for listed in lists.values() for module in listed}
    candidates = {module for module in modules if any(module.children()) and list(module.parameters())}
    lists = {name: listed for name, listed in lists.items() if listed and candidates.issuperset(listed)}
    if blocks is not None:
        if not all(isinstance(block, nn.Module) for block in blocks):
            raise LNSConfigError(f"blocks={blocks!r}: expected modules, such as blocks=model.layers.")
        _require_whole_list(blocks, lists)
        lists = {"": list(blocks)}
    members = {block for listed in lists.values() for block in listed}
    runs: dict[nn.Module, int] = {}
    calls: dict[nn.Module, probe.Call | None] = {}

    def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        runs[module] = runs.get(module, 0) + 1
        if module in members:
            calls[module] = _call(args, kwargs, output)

    watched = members.union(module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule))
    with probe.hooks(module.register_forward_hook(note, with_kwargs=True) for module in watched), torch.no_grad():
        run()
    calls_by_list: dict[str, list[probe.Call]] = {}
    for name, listed in lists.items():
        block_calls = [call for block in listed if runs.get(block) == 1 and (call := calls[block])]
        in_order = [block for block in calls if block in set(listed)] == listed
        inside = any(name.startswith(f"{outer}.") for outer in calls_by_list)
        is_complete, shapes = len(block_calls) == len(listed), {call.stream.shape for call in block_calls}
        if in_order and not inside and is_complete and len(shapes) == 1:
            calls_by_list[name] = block_calls
    if len(calls_by_list) != 1:
        names = ", ".join(calls_by_list) or "none"
        raise LNSConfigError(
            f"{type(model).__name__}: expected one list of modules that each run once, in order, on one stream; found "
            f"{names}. Give the blocks themselves: blocks=model.layers."
        )
    ((name, block_calls),) = calls_by_list.items()
    if blocks is None:
        _require_all(model, name, lists[name], runs)
    return Forward(name, lists[name], block_calls, runs)


def _require_whole_list(blocks: Sequence[nn.Module], lists: Mapping[str, list[nn.Module]]) -> None:
    """Refuse a part of a list of blocks, whose numbers would be wrong. :raises LNSConfigError: the omitted blocks."""
    kinds = {type(block) for block in blocks}
    for name, listed in lists.items():
        omitted = [block for block in listed if block not in set(blocks) and type(block) in kinds]
        if omitted and set(blocks).intersection(listed):
            raise LNSConfigError(
                f"blocks= omits {len(omitted)} of the {len(listed)} blocks in {name}, expected all: the factor of a "
                "block depends on its number in the whole model."
            )


def _require_all(model: nn.Module, name: str, blocks: Sequence[nn.Module], runs: Container[nn.Module]) -> None:
    """Check the list of blocks. :raises LNSConfigError: a part of the list, or similar blocks ran outside of it."""
    keys = [key for key, _ in model.get_submodule(name).named_children()]
    if all(key.isdigit() for key in keys) and [int(key) for key in keys] != list(range(len(keys))):
        raise LNSConfigError(
            f"{type(model).__name__}: found blocks {', '.join(keys)} in {name}, expected 0 to {len(keys) - 1}: the "
            "factor of a block depends on its number in the whole model. Apply before the model is split into stages."
        )
    kinds, inner = {type(block) for block in blocks}, {module for block in blocks for module in block.modules()}
    alike = {at: module for at, module in model.named_modules() if type(module) in kinds - {nn.Sequential}}
    if outside := [at for at, module in alike.items() if module in runs and module not in inner]:
        raise LNSConfigError(
            f"{type(model).__name__}: found {len(blocks)} blocks in {name} and similar blocks outside of it: "
            f"{', '.join(outside)}; expected all in one list. Give all blocks in order: blocks=[…]."
        )


def structure(block: nn.Module) -> Any:
    """Return the module types, parameter shapes and devices of a block, which are equal for blocks built alike."""
    modules = tuple((name, type(module)) for name, module in block.named_modules())
    return modules, tuple((name, tuple(p.shape), p.device) for name, p in block.named_parameters())


def find_sites(model: nn.Module, example: Any = None, blocks: Sequence[nn.Module] | None = None) -> Stack:
    """Find the sites of a model by one forward on ``example``, on a shadow if its weights do not exist yet.

    :param blocks: the blocks, if they are known. :raises LNSConfigError, MeasurementError: as :func:`locate`.
    """
    blocks = list(blocks.values()) if isinstance(blocks, nn.ModuleDict) else blocks
    with shadow.real_default_device(model):
        if not any(map(shadow.is_absent, model.parameters())):
            return locate(model, forward(model, example), blocks)
        weights = shadow.RandomWeights()
        copied, device = shadow.shadow(model, weights), shadow.device_of(model)
        if blocks is not None:
            blocks = shadow.same_modules(blocks, of=model, to=copied)
        stack = locate(copied, forward(copied, shadow.to_device(example, device)), blocks, weights)
        return replace(stack, blocks=shadow.same_modules(stack.blocks, of=copied, to=model))


def locate(
    model: nn.Module,
    run: Callable[[], Any],
    blocks: Sequence[nn.Module] | None = None,
    weights: shadow.RandomWeights | None = None,
) -> Stack:
    """Find the sites of a model: run the model once, then one block of each structure repeatedly.

    :param run: runs one forward. :param weights: memory of random parameters, which the copies of blocks share.
    :raises LNSConfigError: no list of Pre-LN blocks. :raises MeasurementError: a block cannot be run again.
    """
    weights = weights or shadow.RandomWeights()
    with undisturbed(model):
        traced = find_blocks(model, run, blocks)
        sites_by_shape: dict[Any, probe.BlockSites] = {}
        names, problems, projections = [], [], []
        for number, (block, call) in enumerate(zip(traced.blocks, traced.calls, strict=True), start=1):
            shape, where = structure(block), f"block {number}"
            sites_by_shape[shape] = probe.pre_ln_sites(
                block, call, where=where, like=sites_by_shape.get(shape), weights=weights
            )
            names.append(sites_by_shape[shape].names)
            projections.append(sites_by_shape[shape].projections)
            counts = {name: traced.runs.get(block.get_submodule(name), 0) for name in names[-1]}
            problems += [f"{name} of {where} {count} times" for name, count in counts.items() if count != 1]
    if problems:
        raise LNSConfigError(
            f"one forward of the model runs the norms {', '.join(problems)}, expected each once: other code bypasses "
            "them, or another part of the model shares the norm. Use a separate norm in each place."
        )
    cancelled = dict.fromkeys(name for shape in sites_by_shape.values() for name in shape.cancelled)
    width = traced.calls[0].stream.shape[-1]
    return Stack(traced.name, traced.blocks, names, width, tuple(cancelled), projections)


def attach(
    model: nn.Module,
    stack: Stack,
    scheme: Scheme,
    folded: Callable[[nn.Module], type | None] = lambda norm: None,
    *,
    trained: bool | None = None,
) -> list[str]:
    """Scale the found norms, or measure them again if they have the scheme.

    :param folded: norm -> the mixin for its arithmetic, None if that is unknown.
    :param trained: as in :func:`olmo_lns.apply`.
    :returns: the measured parts.
    :raises LNSConfigError: a scheme that does more than multiply norms, or a model with another scheme.
    :raises CheckpointMismatchError: the weights were trained without a factor.
    :raises MeasurementError: a norm does not give its factor times its former output. The model is left unchanged.
    """
    n_layers, current = len(stack.blocks), sites.read_back(model)
    if scheme.is_pre_ln or not scheme.keeps_forward(n_layers):
        raise LNSConfigError(f"scheme {scheme}: expected one that only multiplies norms, such as lns:exponent=0.25.")
    if not current.is_pre_ln and current != scheme:
        raise LNSConfigError(f"{type(model).__name__} has scheme {current} already, not {scheme}: build a new model.")
    is_attached = not current.is_pre_ln
    if not is_attached:
        record.require_fresh(initialization.trained_norm(stack.norms), scheme, source=_source(model), trained=trained)
    if stack.projections:
        initialization.mark(stack.blocks, stack.projections, stack.norms)
    with shadow.real_default_device(model), sites.stock_on_failure(model):
        for number, (block, names) in enumerate(zip(stack.blocks, stack.names, strict=True), start=1):
            for name in names:
                read_by = SUB_LAYERS if len(names) == 1 else (SUB_LAYERS[names.index(name)],)
                norm_sites = [sites.Site(scheme, number, n_layers, sub_layer) for sub_layer in read_by]
                norm, where = block.get_submodule(name), f"block {number}, {name}"
                if is_attached:
                    if not isinstance(norm, Scaled):
                        raise MeasurementError(
                            f"{where}: found a norm without its factor: it replaced a scaled norm. "
                            "Build a new model and apply the scheme after norms are replaced."
                        )
                    _measure(norm, stack.width, where)
                    continue
                if len(factors := {site.plan.norm_scale for site in norm_sites}) > 1:
                    raise LNSConfigError(f"{where}: {scheme} has two factors for the norm that both branches read.")
                sites.attach(norm, *norm_sites)
                scale(norm, factors.pop(), where=where, width=stack.width, folded=folded(norm))
        sites.check(model, scheme, n_layers)
    return ["sites", "output", "gradient"]


def _source(model: nn.Module) -> str:
    return str(getattr(model, "name_or_path", "") or type(model).__name__)


def describe_initialization(model: nn.Module, stack: Stack) -> str:
    """Return the text of the start-up line on the initialization; ``""`` for trained weights."""
    if stack.projections and any(map(shadow.is_absent, model.parameters())):
        return "scaled initialization: call olmo_lns.plain_initialization(model) once the weights are drawn"
    return "" if initialization.trained_norm(stack.norms) else str(initialization.measure(model))


def _measure(norm: Any, width: int, where: str) -> None:
    """Measure a scaled norm. :raises MeasurementError: not its factor times the output of the stock norm."""
    stock = copy.deepcopy(norm)
    sites.restore(stock)
    if problem := response(norm, width).problem(response(stock, width), getattr(norm, "lns_scale", 1.0)):
        raise MeasurementError(f"{where}: measured {problem}. Apply the scheme after norms are replaced.")


def report(model: nn.Module, stack: Stack, measured: Sequence[str], initialization: str = "") -> None:
    """Write the start-up line in the first process. :param initialization: its part on the initialization."""
    if os.environ.get("RANK", "0") != "0":
        return
    kinds = dict.fromkeys(type(module).__name__.removeprefix("LNS") for _, module, _ in sites.sites(model))
    if initialization and not any(map(shadow.is_absent, model.parameters())):
        measured = [*measured, "initialization"]
    line = start_up.start_up_line(
        model, len(stack.blocks), measured=measured, norm=", ".join(kinds), initialization=initialization
    )
    if stack.cancelled:
        line += f"; a later norm cancels the factor of {', '.join(stack.cancelled)}"
    start_up.write_line(line)
