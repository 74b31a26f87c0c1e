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
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn

from olmo_lns.errors import LNSConfigError, MeasurementError
from olmo_lns.response import Response, agree, check_drawn, response
from olmo_lns.response import first as _first

__all__ = [
    "Call",
    "Found",
    "Response",
    "agree",
    "check_drawn",
    "find_blocks",
    "pre_ln_sites",
    "response",
    "structure",
    "twin",
]

#: Relative difference below which two fp32 results are the same.
SAME = 1e-4
#: The same for bf16, in which a block is measured where it does not run in fp32 (flash attention).
SAME_HALF = 0.02


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
        # On a CPU torch.manual_seed keeps a stack trace of each call for GPUs that may come: half the time of a probe.
        (torch.default_generator if x.device.type == "cpu" else torch).manual_seed(0)
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
    if (found := _stream(output)) is None:
        raise _NotPreLN(f"the block gives a {type(output).__name__}, expected a tensor or a tuple that begins with one")
    return found


def _stream(output: Any) -> torch.Tensor | None:
    if isinstance(output, (tuple, list)) and output:
        output = output[0]
    output = getattr(output, "last_hidden_state", output)
    return output if torch.is_tensor(output) else None


def _call(args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Call | None:
    """The call of a module whose output is its first floating matrix, the stream, after it; None for any other."""
    places: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for place, value in places:
        if torch.is_tensor(value) and value.is_floating_point() and value.dim() >= 2:
            after = _stream(output)
            return Call(tuple(args), dict(kwargs), place) if after is None or after.shape == value.shape else None
    return None


@contextmanager
def _hooks(handles: Iterable[Any]) -> Iterator[None]:
    handles = list(handles)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def find_blocks(
    model: nn.Module, run: Callable[[], Any], blocks: Sequence[nn.Module] | None = None
) -> tuple[str, list[nn.Module], list[Call]]:
    """Find the blocks of ``model``: the outermost list whose elements each run once, in order, on one stream.

    :param run: runs one forward of the model.
    :param blocks: the blocks themselves, where they are known; the name is then ``""``.
    :returns: the list's name, the blocks, and the call of each.
    :raises LNSConfigError: there is no such list, or there are several.
    """
    lists = {
        name: list(module.children())
        for name, module in model.named_modules()
        if isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)) and len(list(module.children()))
    }
    # A layer without parts is no block: the head of a model may be a Sequential of its norm and a dropout.
    lists = {name: each for name, each in lists.items() if all(any(block.children()) for block in each)}
    if blocks is not None:
        lists = {"": list(blocks)}
    ran: dict[nn.Module, list[tuple[Any, Any, Any]]] = {block: [] for each in lists.values() for block in each}
    order: list[nn.Module] = []

    def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        order.append(module)
        ran[module].append((args, dict(kwargs), output))

    kinds, others = {type(block) for block in ran}, set()
    alike = [module for module in model.modules() if type(module) in kinds and module not in ran]
    handles = [module.register_forward_hook(note, with_kwargs=True) for module in ran]
    handles += [module.register_forward_hook(lambda module, args, output: others.add(module)) for module in alike]
    with _hooks(handles), torch.no_grad():
        run()
    found: dict[str, list[Call]] = {}
    for name, each in lists.items():
        whole = [call for call in (_call(*ran[block][0]) if len(ran[block]) == 1 else None for block in each) if call]
        members, inside = set(each), any(name.startswith(f"{outer}.") for outer in found)
        in_order = [module for module in order if module in members] == each
        if in_order and not inside and len(whole) == len(each) and len({c.stream.shape for c in whole}) == 1:
            found[name] = whole
    if len(found) != 1:
        names = ", ".join(found) or "none"
        raise LNSConfigError(
            f"{type(model).__name__}: expected one list of modules that each run once, in order, on one stream; found "
            f"{names}. Give the blocks themselves: blocks=model.layers."
        )
    ((name, whole),) = found.items()
    if blocks is None:
        _require_all(model, name, lists[name], others | {block for block, calls in ran.items() if calls})
    return name, lists[name], whole


def _require_all(model: nn.Module, name: str, blocks: Sequence[nn.Module], ran: set[nn.Module]) -> None:
    """:raises LNSConfigError: the list is a part of a model, or blocks like its own ran besides it."""
    keys = [key for key, _ in model.get_submodule(name).named_children()]
    if all(key.isdigit() for key in keys) and [int(key) for key in keys] != list(range(len(keys))):
        raise LNSConfigError(
            f"{type(model).__name__}: found blocks {', '.join(keys)} in {name}, expected 0 to {len(keys) - 1}: the "
            "factor of a block depends on its number in the whole model. Apply before the model is split into stages."
        )
    kinds, inside = {type(block) for block in blocks}, {module for block in blocks for module in block.modules()}
    besides = [at for at, module in model.named_modules() if module in ran and type(module) in kinds - {nn.Sequential}]
    if besides := [at for at in besides if model.get_submodule(at) not in inside]:
        raise LNSConfigError(
            f"{type(model).__name__}: found {len(blocks)} blocks in {name} and others like them besides: "
            f"{', '.join(besides)}; expected all in one list. Give all of them in order: blocks=[…]."
        )


def require_run_once(modules: Mapping[str, nn.Module], run: Callable[[], Any]) -> None:
    """Check that one forward of the model runs each site once: nothing computes past it, nothing else reads it.

    :raises LNSConfigError: found and expected number of runs.
    """
    count = dict.fromkeys(modules, 0)

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            count[name] += 1

        return hook

    with _hooks(module.register_forward_hook(note(name)) for name, module in modules.items()), torch.no_grad():
        run()
    if wrong := [f"{name} {times} times" for name, times in count.items() if times != 1]:
        raise LNSConfigError(
            f"one forward of the model runs the norms {', '.join(wrong)}, expected each once: something computes past "
            "them, or another part of the model has the same norm. Give each place a norm of its own."
        )


def structure(block: nn.Module) -> Any:
    """Equal for blocks that are built alike: the types of their modules and the shapes of their parameters."""
    modules = tuple((name, type(module)) for name, module in block.named_modules())
    return modules, tuple((name, tuple(p.shape)) for name, p in block.named_parameters())


def pre_ln_sites(
    block: nn.Module, call: Call, *, where: str = "block 1", names: tuple[str, ...] | None = None
) -> Found:
    """Find the norms that ``block`` reads its stream through, by running a copy of it.

    :param block: called as block(x, …); its weights may be of any floating dtype, not on the meta device.
    :param call: its arguments in a real forward.
    :param names: what was found in a block that is built alike, to be confirmed: a block may ask for its number.
    :raises LNSConfigError: it is not Pre-LN; the message names the block and the reason.
    :raises MeasurementError: the copy cannot be run again.

    Example: ``pre_ln_sites(model.model.layers[0], call).names`` is ``("input_layernorm", "post_attention_layernorm")``
    for a Llama.
    """

    def measure(dtype: torch.dtype) -> Found:
        return _Replay(twin(block).to(dtype), _cast(call, dtype), dtype).sites(names)

    try:
        # Each run is seeded; the launch's own random numbers go on as they would have.
        with torch.no_grad(), torch.random.fork_rng([call.stream.device] if call.stream.is_cuda else []):
            try:
                return measure(torch.float32)
            except (RuntimeError, TypeError, ValueError, AssertionError) as error:  # kernels for half precision alone
                try:
                    return measure(torch.bfloat16)
                except _NotPreLN:
                    raise
                except Exception:
                    raise error from None
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


def twin(block: nn.Module) -> nn.Module:
    """A copy of ``block`` in fp32 and evaluation mode, its parameters drawn at random."""
    if any(parameter.is_meta for parameter in block.parameters()):
        raise _NotPreLN("its weights are on the meta device; build or load them first")
    if any(not parameter.is_floating_point() for parameter in block.parameters()):
        raise _NotPreLN("its weights are quantized; apply the scheme before quantization")
    copied = copy.deepcopy(block).float().eval()
    pool = torch.randn(1_000_003, generator=torch.Generator().manual_seed(1), device="cpu")
    start = 0
    for parameter in copied.parameters():
        # A prime length: rows differ. Drawing 200 million numbers anew takes seconds.
        part = pool[start : start + parameter.numel()].to(parameter.device)
        if len(part) < parameter.numel():
            part = pool.to(parameter.device).roll(-start).repeat(-(-parameter.numel() // len(pool)))
            part = part[: parameter.numel()]
        start = (start + 7919) % len(pool)
        drawn = part.reshape(parameter.shape) if parameter.dim() else torch.tensor(1.3)
        wide = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 1.0
        parameter.data = (drawn * wide if parameter.dim() > 1 else 1 + 0.2 * drawn).to(parameter.device)
    return copied


def _cast(call: Call, dtype: torch.dtype) -> Call:
    def cast(value: Any) -> Any:
        if torch.is_tensor(value):
            return value.detach().to(dtype) if value.is_floating_point() else value.detach()
        if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
            return type(value)(map(cast, value))
        return value

    return Call(tuple(map(cast, call.args)), {key: cast(value) for key, value in call.kwargs.items()}, call.place)


class _Replay:
    """A block that is run again and again with the outputs of some of its norms held fixed."""

    def __init__(self, block: nn.Module, call: Call, dtype: torch.dtype = torch.float32) -> None:
        self.block, self.call = block, call
        self.same = SAME if dtype == torch.float32 else SAME_HALF
        generator = torch.Generator().manual_seed(2)
        shape, device = call.stream.shape, call.stream.device

        def draw() -> torch.Tensor:
            return torch.randn(shape, generator=generator, device="cpu").to(device, dtype)

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
            return lambda module, args, kwargs, output: ran.setdefault(name, []).append(((args, kwargs), output))

        with _hooks(m.register_forward_hook(note(name), with_kwargs=True) for name, m in leaves.items()):
            self.call.on(self.block, self.x)
        found = {}
        for name, calls in ran.items():
            (args, kwargs), output = calls[0]
            if torch.is_tensor(_first(output)) and torch.is_tensor(_input(args, kwargs)) and _first(output).dim():
                same = _first(output).shape[-1] == self.x.shape[-1] and _first(output).numel() == self.x.numel()
                if same and _is_norm(leaves[name], args, kwargs):
                    if len(calls) > 1:
                        raise _NotPreLN(f"its norm {name} ran {len(calls)} times in one forward, expected once")
                    found[name] = leaves[name]
        return found

    def delta(self, x: torch.Tensor, held: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """``block(x) - x`` with the outputs of the norms in ``held`` replaced, and the input of each minus x."""
        inputs: dict[str, torch.Tensor] = {}

        def hold(name: str) -> Callable[..., Any]:
            def hook(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Any:
                inputs[name] = (_input(args, kwargs).detach().reshape(x.shape) - x).double()
                value = held[name].reshape(_first(output).shape)
                return (value, *output[1:]) if isinstance(output, tuple) else value

            return hook

        with _hooks(self.norms[name].register_forward_hook(hold(name), with_kwargs=True) for name in held):
            return self.call.on(self.block, x).detach().double() - x.double(), inputs

    def constant(self, names: Sequence[str]) -> bool:
        """Return true if, with these norms held, neither block(x) - x nor the input of a norm minus x depends on x."""
        held = {name: self.held[name] for name in names}
        (one, inputs), (two, others) = self.delta(self.x, held), self.delta(self.other, held)
        scale = self.other.double().norm()
        pairs = [(one, two), *((inputs[name], others[name]) for name in inputs)]  # training may drop branches
        return all(float((a - b).norm()) < self.same * float(a.norm() + b.norm() + scale) for a, b in pairs)

    def sites(self, known: tuple[str, ...] | None = None) -> Found:
        if not self.norms:
            raise _NotPreLN("none of its modules is a norm of the stream; norms that are functions cannot be scaled")
        if known is not None and not self.norms.keys() >= set(known):
            raise _NotPreLN(f"found {', '.join(self.norms)}, expected {', '.join(known)} as in a block built alike")
        sets = (names for count in (1, 2, 3) for names in itertools.combinations(self.norms, count))
        names = next(
            filter(self.constant, sets if known is None else [known]), None
        )  # the smallest: norms of queries and keys are not in it
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
            if float((after - before).norm()) < self.same * float(before.norm()):
                raise _NotPreLN(f"nothing reads its norm {name}")
        for name in self.norms.keys() - set(names):
            if self._is_on_branch(name, base):
                raise _NotPreLN(f"its norm {name} sits on a branch, besides {' and '.join(names)} (Sandwich-LN)")
        if len(names) > 2:
            raise _NotPreLN(f"{len(names)} norms read the stream ({', '.join(names)}), expected two")
        if self._branches(names) < 2:
            raise _NotPreLN(f"it has one branch, behind {' and '.join(names)}; expected attention and feed-forward")
        for module in self.block.modules():
            module.training = not isinstance(module, nn.modules.dropout._DropoutNd)
        with torch.enable_grad():
            trains = self.constant(names)
        self.block.eval()
        if not trains:
            raise _NotPreLN(f"in training its branches read the stream past {' and '.join(names)}")

    def _is_on_branch(self, name: str, base: Mapping[str, torch.Tensor]) -> bool:
        """Return true if the norm's output is added to the stream channel by channel: one moves one."""
        step = torch.zeros_like(self.step)
        step[..., 0] = 1.0
        held = {**base, name: self.held[name]}
        moved = self.delta(self.x, {**held, name: held[name] + step})[0] - self.delta(self.x, held)[0]
        return float(moved.norm()) > 1e-6 and float(moved[..., 1:].norm()) < 1e-3 * float(moved[..., 0].norm())

    def _is_cancelled(self, name: str, names: Sequence[str]) -> bool:
        """Return true if a norm behind it makes the branch the same at 64 and at 128 times its output."""
        base = {other: self.held[other] for other in names}
        zero, _ = self.delta(self.x, {**base, name: torch.zeros_like(self.step)})
        small, large = (self.delta(self.x, {**base, name: k * base[name]})[0] - zero for k in (64.0, 128.0))
        return float((large - small).norm()) < 0.05 * float(small.norm())

    def _branches(self, names: tuple[str, ...]) -> int:
        """The number of branches: what the norms give, or the children that read the only norm, acts on the stream
        together only within a branch (queries, keys and values do; attention and feed-forward are added).
        """
        base = {name: self.held[name] for name in names}
        units = [self.norms[name] for name in names] if len(names) > 1 else self._readers(names[0])
        zero = self._moved(base, [])
        alone = [self._moved(base, [unit]) - zero for unit in units]
        branch = list(range(len(units)))
        for i, j in itertools.combinations(range(len(units)), 2):
            both = self._moved(base, [units[i], units[j]]) - zero
            if float((both - alone[i] - alone[j]).norm()) > 10 * self.same * float(zero.norm()):
                branch = [branch[i] if of == branch[j] else of for of in branch]
        return len(set(branch))

    def _moved(self, base: Mapping[str, torch.Tensor], units: Sequence[nn.Module]) -> torch.Tensor:
        """``block(x) - x`` with these norms held, and what each of ``units`` gives doubled and turned round."""

        def move(module: nn.Module, args: Any, output: Any) -> Any:
            if not torch.is_tensor(_first(output)):
                return output
            value = 2.0 * _first(output).roll(1, -1)
            return (value, *output[1:]) if isinstance(output, tuple) else value

        norms = {self.norms[name]: name for name in base}
        held = {**base, **{norms[unit]: move(unit, (), base[norms[unit]]) for unit in units if unit in norms}}
        with _hooks(unit.register_forward_hook(move) for unit in units if unit not in norms):
            return self.delta(self.x, held)[0]

    def _readers(self, name: str) -> list[nn.Module]:
        """The children of the block that take the norm's output."""
        value = self.held[name]
        readers: dict[nn.Module, None] = {}

        def note(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            tensors = [t for t in (*args, *kwargs.values()) if torch.is_tensor(t) and t.numel() == value.numel()]
            if any(torch.equal(t.reshape(value.shape), value) for t in tensors):
                readers[module] = None

        children = [child for child in self.block.children() if child is not self.norms[name]]
        with _hooks(child.register_forward_pre_hook(note, with_kwargs=True) for child in children):
            self.delta(self.x, {name: value})
        return list(readers)


def _input(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the input of a norm: its first argument, by position or by keyword."""
    return next(iter((*args, *kwargs.values())), None)


def _is_norm(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return true for a norm: 64 and 128 times an input give the same, another input something else."""
    like = _input(args, kwargs)
    if not like.is_floating_point():
        return False

    def give(value: torch.Tensor) -> torch.Tensor:
        if args:
            return torch.as_tensor(_first(module(value, *args[1:], **kwargs))).double()
        return torch.as_tensor(_first(module(**{**kwargs, next(iter(kwargs)): value}))).double()

    x, y = torch.randn((2, *like.shape), generator=torch.Generator().manual_seed(3), device="cpu").to(like)
    small, large, other = give(64.0 * x), give(128.0 * x), give(64.0 * y)
    size = float(small.norm())
    return float((large - small).norm()) < 1e-3 * size and float((other - small).norm()) > 1e-3 * size
