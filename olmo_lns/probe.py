"""Measure a built model: a block's Pre-LN sites, a scaled norm against the norm before, the draw of a projection.

A block is Pre-LN in the norms S if, with the outputs of S held fixed, block(x) - x is the same for every x, and the
input of each norm of S minus x is so too: the branches read the stream through S and nothing else. S is made minimal,
so that norms of queries, keys or latents fall out. Nothing is known of a model's family.

Blocks are measured on a copy in fp32 and eval mode whose parameters are drawn at random: a gate or an output
projection that starts at zero hides what it will let through later.
"""

from __future__ import annotations

import copy
import itertools
import math
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn

from olmo_lns.errors import LNSConfigError, MeasurementError

__all__ = ["Call", "Found", "Response", "agree", "check_drawn", "find_blocks", "pre_ln_sites", "response", "structure"]

#: Relative difference below which two fp32 results are the same.
SAME = 1e-4


@dataclass(frozen=True)
class Call:
    """The arguments of one call of a block. :param place: of the stream in them: a position, or a keyword."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    place: int | str

    @property
    def stream(self) -> torch.Tensor:
        found: torch.Tensor = self.args[self.place] if isinstance(self.place, int) else self.kwargs[self.place]
        return found

    def on(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Run ``block`` on the stream ``x``, every other argument as it was; return the stream after it."""
        args, kwargs = copy.deepcopy((list(self.args), dict(self.kwargs)))
        (args if isinstance(self.place, int) else kwargs)[self.place] = x.clone()  # type: ignore[index]
        torch.manual_seed(0)
        return stream_of(block(*args, **kwargs))


@dataclass(frozen=True)
class Found:
    """The Pre-LN sites of a block. :param names: of the norms, in the order in which they run: two, or one that both
    branches of a parallel block read. :param cancelled: those whose factor a norm behind them takes off again.
    """

    names: tuple[str, ...]
    cancelled: tuple[str, ...] = ()


class _NotPreLN(Exception):
    """The reason why a block is not Pre-LN."""


def stream_of(output: Any) -> torch.Tensor:
    """The first tensor of a block's output: itself, the first of a tuple, or ``last_hidden_state``."""
    if isinstance(output, (tuple, list)) and output:
        output = output[0]
    output = getattr(output, "last_hidden_state", output)
    if not torch.is_tensor(output):
        raise _NotPreLN(f"the block gives a {type(output).__name__}, expected a tensor or a tuple that begins with one")
    return output


def _call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call | None:
    places: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for place, value in places:
        if torch.is_tensor(value) and value.is_floating_point() and value.dim() >= 2:
            return Call(tuple(args), dict(kwargs), place)
    return None


@contextmanager
def _hooks(handles: Iterable[Any]) -> Iterator[None]:
    handles = list(handles)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def record_calls(modules: Sequence[nn.Module], run: Callable[[], Any]) -> list[list[tuple[Any, dict[str, Any]]]]:
    """The arguments of every call of each of ``modules`` while ``run()`` runs a forward of the model."""
    calls: list[list[tuple[Any, dict[str, Any]]]] = [[] for _ in modules]

    def note(found: list[Any]) -> Callable[..., None]:
        return lambda module, args, kwargs: found.append((args, dict(kwargs)))

    pairs = zip(modules, calls, strict=True)
    with _hooks(m.register_forward_pre_hook(note(found), with_kwargs=True) for m, found in pairs), torch.no_grad():
        run()
    return calls


def find_blocks(model: nn.Module, run: Callable[[], Any]) -> tuple[str, list[nn.Module], list[Call]]:
    """Find the blocks of ``model``: the outermost list whose elements each run once, in order, on one stream.

    :param run: runs one forward of the model.
    :returns: the list's name, the blocks, and the call of each.
    :raises LNSConfigError: there is no such list, or there are several.
    """
    lists = {
        name: list(module.children())
        for name, module in model.named_modules()
        if isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)) and len(list(module.children()))
    }
    order: list[nn.Module] = []
    modules = list(dict.fromkeys(block for blocks in lists.values() for block in blocks))
    handles = [m.register_forward_pre_hook(lambda module, args: order.append(module)) for m in modules]
    with _hooks(handles):
        calls = dict(zip(modules, record_calls(modules, run), strict=True))
    found: dict[str, list[Call]] = {}
    for name, blocks in lists.items():
        own = [_call(*calls[block][0]) if len(calls[block]) == 1 else None for block in blocks]
        members, inside = set(blocks), any(name.startswith(f"{outer}.") for outer in found)
        in_order = [module for module in order if module in members] == blocks
        whole = [call for call in own if call is not None]
        if in_order and not inside and len(whole) == len(blocks) and len({c.stream.shape for c in whole}) == 1:
            found[name] = whole
    if len(found) != 1:
        names = ", ".join(found) or "none"
        raise LNSConfigError(
            f"{type(model).__name__}: expected one list of modules that each run once, in order, on one stream; found "
            f"{names}. Give the blocks themselves: blocks=model.layers."
        )
    ((name, whole),) = found.items()
    return name, lists[name], whole


def structure(block: nn.Module) -> Any:
    """Equal for blocks that are built alike: the types of their modules and the shapes of their parameters."""
    modules = tuple((name, type(module)) for name, module in block.named_modules())
    return modules, tuple((name, tuple(p.shape)) for name, p in block.named_parameters())


def pre_ln_sites(block: nn.Module, call: Call, *, where: str = "block 1") -> Found:
    """Find the norms that ``block`` reads its stream through, by running a copy of it.

    :param block: called as block(x, …); its weights may be of any floating dtype, not on the meta device.
    :param call: its arguments in a real forward.
    :raises LNSConfigError: it is not Pre-LN; the message names the block and the reason.
    :raises MeasurementError: the copy cannot be run again.

    Example: ``pre_ln_sites(model.model.layers[0], call).names`` is ``("input_layernorm", "post_attention_layernorm")``
    for a Llama.
    """
    try:
        twin, call = _twin(block), _as_fp32(call)
        with torch.no_grad():
            return _Replay(twin, call).sites()
    except _NotPreLN as reason:
        raise LNSConfigError(
            f"{where} ({type(block).__name__}) is not Pre-LN: {reason}. A scheme needs a block whose two branches read "
            "the stream through a norm that is a module; docs/without-a-plugin.md scales other models."
        ) from None
    except Exception as error:
        raise MeasurementError(
            f"{where} ({type(block).__name__}) could not be run a second time ({type(error).__name__}: {error}). "
            "Expected a forward without caches that other calls share; give an example= that uses none."
        ) from error


def _twin(block: nn.Module) -> nn.Module:
    if any(parameter.is_meta for parameter in block.parameters()):
        raise _NotPreLN("its weights are on the meta device; build or load them first")
    if any(not parameter.is_floating_point() for parameter in block.parameters()):
        raise _NotPreLN("its weights are quantized; apply the scheme before quantization")
    twin = copy.deepcopy(block).float().eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in twin.parameters():
        drawn = torch.randn(parameter.shape, generator=generator) if parameter.dim() else torch.tensor(1.3)
        wide = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 1.0
        parameter.data = (drawn * wide if parameter.dim() > 1 else 1 + 0.2 * drawn).to(parameter.device)
    return twin


def _as_fp32(call: Call) -> Call:
    def cast(value: Any) -> Any:
        if torch.is_tensor(value):
            return value.detach().float() if value.is_floating_point() else value.detach()
        if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
            return type(value)(map(cast, value))
        return value

    return Call(tuple(map(cast, call.args)), {key: cast(value) for key, value in call.kwargs.items()}, call.place)


class _Replay:
    """A block that is run again and again with the outputs of some of its norms held fixed."""

    def __init__(self, block: nn.Module, call: Call) -> None:
        self.block, self.call = block, call
        generator = torch.Generator().manual_seed(2)
        shape, device = call.stream.shape, call.stream.device

        def draw() -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(device)

        self.x, self.other, self.held = draw(), 3.0 * draw(), {}
        self.norms = self._norms()
        for name in self.norms:
            self.held[name] = draw()
        self.step = draw()

    def _norms(self) -> dict[str, nn.Module]:
        """The norms of the stream's shape that ran once, by what they do: the size of their input does not matter."""
        ran: dict[str, list[tuple[Any, Any]]] = {}
        leaves = {name: module for name, module in self.block.named_modules() if name and not any(module.children())}

        def note(name: str) -> Callable[..., None]:
            return lambda module, args, output: ran.setdefault(name, []).append((args, output))

        with _hooks(module.register_forward_hook(note(name)) for name, module in leaves.items()):
            self.call.on(self.block, self.x)
        found = {}
        for name, calls in ran.items():
            args, output = calls[0]
            if torch.is_tensor(_first(output)) and args and torch.is_tensor(args[0]) and _first(output).dim():
                same = _first(output).shape[-1] == self.x.shape[-1] and _first(output).numel() == self.x.numel()
                if same and _is_norm(leaves[name], args):
                    if len(calls) > 1:
                        raise _NotPreLN(f"its norm {name} ran {len(calls)} times in one forward, expected once")
                    found[name] = leaves[name]
        return found

    def delta(self, x: torch.Tensor, held: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """``block(x) - x`` with the outputs of the norms in ``held`` replaced, and the input of each minus x."""
        inputs: dict[str, torch.Tensor] = {}

        def hold(name: str) -> Callable[..., Any]:
            def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
                inputs[name] = (args[0].reshape(x.shape) - x).double()
                value = held[name].reshape(_first(output).shape)
                return (value, *output[1:]) if isinstance(output, tuple) else value

            return hook

        with _hooks(self.norms[name].register_forward_hook(hold(name)) for name in held):
            return self.call.on(self.block, x).double() - x.double(), inputs

    def constant(self, names: Sequence[str]) -> bool:
        """Whether, with these norms held, neither block(x) - x nor the input of a norm minus x depends on x."""
        held = {name: self.held[name] for name in names}
        (one, inputs), (two, others) = self.delta(self.x, held), self.delta(self.other, held)
        scale = self.other.double().norm()
        pairs = [(one, two), *((inputs[name], others[name]) for name in names)]
        return all(float((a - b).norm()) < SAME * float(a.norm() + b.norm() + scale) for a, b in pairs)

    def sites(self) -> Found:
        if not self.norms:
            raise _NotPreLN("none of its modules is a norm of the stream; norms that are functions cannot be scaled")
        sets = (names for count in (1, 2, 3) for names in itertools.combinations(self.norms, count))
        names = next(filter(self.constant, sets), None)  # the smallest: norms of queries and keys are not in it
        if names is None:
            raise _NotPreLN(
                f"held fixed, its norms {', '.join(self.norms)} do not separate its branches from the stream"
            )
        self._check(names)
        return Found(names, tuple(name for name in names if self._is_cancelled(name, names)))

    def _check(self, names: tuple[str, ...]) -> None:
        base = {name: self.held[name] for name in names}
        before, _ = self.delta(self.x, base)
        for name in names:
            after, _ = self.delta(self.x, {**base, name: base[name] + self.step})
            if float((after - before).norm()) < SAME * float(before.norm()):
                raise _NotPreLN(f"nothing reads its norm {name}")
        for name in self.norms.keys() - set(names):
            if self._is_on_branch(name, base):
                raise _NotPreLN(f"its norm {name} sits on a branch, besides {' and '.join(names)} (Sandwich-LN)")
        if len(names) > 2:
            raise _NotPreLN(f"{len(names)} norms read the stream ({', '.join(names)}), expected two")
        if len(names) == 1 and self._readers(names[0]) < 2:
            raise _NotPreLN(f"it has one branch, behind {names[0]}; expected attention and feed-forward")

    def _is_on_branch(self, name: str, base: Mapping[str, torch.Tensor]) -> bool:
        """Whether the norm's output is added to the stream channel by channel: one channel of it moves one channel."""
        step = torch.zeros_like(self.step)
        step[..., 0] = 1.0
        held = {**base, name: self.held[name]}
        moved = self.delta(self.x, {**held, name: held[name] + step})[0] - self.delta(self.x, held)[0]
        return float(moved.norm()) > 1e-6 and float(moved[..., 1:].norm()) < 1e-3 * float(moved[..., 0].norm())

    def _is_cancelled(self, name: str, names: Sequence[str]) -> bool:
        """Whether a norm behind it makes the branch the same at 64 and at 128 times its output."""
        base = {other: self.held[other] for other in names}
        zero, _ = self.delta(self.x, {**base, name: torch.zeros_like(self.step)})
        small, large = (self.delta(self.x, {**base, name: k * base[name]})[0] - zero for k in (64.0, 128.0))
        return float((large - small).norm()) < 0.05 * float(small.norm())

    def _readers(self, name: str) -> int:
        """How many children of the block take the norm's output."""
        value, readers = self.held[name], []

        def note(child: nn.Module) -> Callable[..., None]:
            def hook(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
                tensors = [t for t in (*args, *kwargs.values()) if torch.is_tensor(t) and t.numel() == value.numel()]
                if any(torch.equal(t.reshape(value.shape), value) for t in tensors):
                    readers.append(child)

            return hook

        children = [child for child in self.block.children() if child is not self.norms[name]]
        with _hooks(child.register_forward_pre_hook(note(child), with_kwargs=True) for child in children):
            self.delta(self.x, {name: value})
        return len(set(readers))


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) and output else output


def _is_norm(module: nn.Module, args: tuple[Any, ...]) -> bool:
    """Whether ``module`` normalizes: 64 and 128 times an input give the same, another input something else."""
    if not args[0].is_floating_point():
        return False
    x, y = torch.randn((2, *args[0].shape), generator=torch.Generator().manual_seed(3)).to(args[0].device)
    small, large, other = (_first(module(value, *args[1:])).double() for value in (64.0 * x, 128.0 * x, 64.0 * y))
    size = float(small.norm())
    return float((large - small).norm()) < 1e-3 * size and float((other - small).norm()) > 1e-3 * size


# --- what a norm gives ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Response:
    """A norm's output on random rows and its gradient with respect to them, fp64. :param dtype: it computed in."""

    output: torch.Tensor
    gradient: torch.Tensor | None
    dtype: torch.dtype

    def problem(self, before: Response, factor: float) -> str:
        """The first part that is not ``factor`` times that of ``before``, in words; ``""`` if both are."""
        tolerance = 1e-4 if self.dtype in (torch.float32, torch.float64) else 0.02
        for name in ("output", "gradient"):
            wanted, found = getattr(before, name), getattr(self, name)
            if wanted is None:
                continue
            if found.shape != wanted.shape:
                return f"{name} of shape {tuple(found.shape)}, expected {tuple(wanted.shape)}"
            size = float(wanted.norm())
            if not float((found - factor * wanted).norm()) <= tolerance * abs(factor) * size:  # true for NaN, too
                ratio = float((found * wanted).sum()) / size**2 if size else math.nan
                return f"{name} of {ratio:.4g} times the framework's own, expected {factor:.4g} times"
        return ""


def response(module: nn.Module, width: int) -> Response:
    """Run a norm on random rows with random parameters, forward and backward.

    The module's own parameters are neither read nor changed: they may be on the meta device, or hold ``main_grad``.

    :param width: the hidden size; the rows are (4, 1, width), of the parameters' dtype and on their device.
    """
    parameters = dict(module.named_parameters())
    device, dtype = next(((p.device, p.dtype) for p in parameters.values()), (torch.device("cpu"), torch.float32))
    if device.type == "meta":
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator().manual_seed(4)
    own = {
        name: (1 + 0.25 * torch.randn(p.shape, generator=generator)).to(device, p.dtype)
        for name, p in parameters.items()
    }
    with torch.enable_grad():
        x = torch.randn((4, 1, width), generator=generator).to(device, dtype).requires_grad_()
        output = _first(torch.func.functional_call(module, own, (x,)))
        weights = torch.randn(output.shape, generator=generator).to(device, output.dtype)
        (gradient,) = torch.autograd.grad(output, x, weights)
    return Response(output.detach().double(), gradient.double(), dtype)


def check_drawn(weights: Mapping[str, torch.Tensor], std: float, *, where: str) -> bool:
    """Check that freshly drawn matrices have the standard deviation ``std``.

    :param weights: name -> weight, or this process's shard of it; none is changed.
    :returns: whether there was anything to measure: not on the meta device, nor with fewer than 1,000 elements.
    :raises MeasurementError: found and expected standard deviation.
    """
    measured = False
    for name, weight in weights.items():
        weight = getattr(weight, "_local_tensor", weight)
        if weight.is_meta or weight.numel() < 1000 or not weight.is_floating_point():
            continue
        measured, found = True, float(weight.detach().float().std())
        if not 0.85 * std <= found <= 1.15 * std:
            raise MeasurementError(
                f"{where}, {name}: found weights drawn with a standard deviation of {found:.4g}, expected {std:.4g}. "
                "This upstream initializes its output projections in another way than was asked for; "
                "OLMO_LNS_DISABLE=1 starts it without a scheme."
            )
    return measured


def agree(problem: str) -> None:
    """Raise on every process of a launch if one of them has a problem, before the next collective runs.

    :param problem: of this process; ``""`` if it has none. Every process of the launch calls this.
    :raises MeasurementError: the problems, with the ranks that have them.
    """
    import torch.distributed as dist

    problems: list[Any] = [problem]
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        problems = [None] * dist.get_world_size()
        dist.all_gather_object(problems, problem)
    if found := {text: rank for rank, text in enumerate(problems) if text}:
        raise MeasurementError(
            "; ".join(f"rank {rank}: {text}" for text, rank in sorted(found.items(), key=lambda p: p[1]))
        )
