"""Measure a built model: find the Pre-LN sites of a block by running a copy of the block.

A block is Pre-LN in the norms S if, with the outputs of S held fixed, block(x) - x and the input of each norm of S
minus x are the same for every x: the branches read the stream through S and nothing else. S is made minimal, which
excludes norms of queries, keys or latents. The probe does not depend on the model's family.

A block is measured on a copy in fp32 and eval mode with random parameters: a gate or an output projection that starts
at zero would hide its branch.
"""

from __future__ import annotations

import copy
import itertools
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn

from olmo_lns.errors import LNSConfigError, MeasurementError
from olmo_lns.initialization import residual_projections
from olmo_lns.response import first_output
from olmo_lns.shadow import RandomWeights, is_absent

__all__ = [
    "BlockSites",
    "Call",
    "hooks",
    "pre_ln_sites",
    "random_copy",
    "stream_of",
]

_Hook = Callable[..., Any]
_Change = Callable[[torch.Tensor], torch.Tensor]

#: Relative difference below which two fp32 results count as the same.
SAME = 1e-4
#: The same for bf16, for blocks that do not run in fp32 (flash attention).
SAME_HALF = 0.02


@dataclass(frozen=True)
class Call:
    """The arguments of one call of a block. :param place: position or keyword of the stream among the arguments."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    place: int | str

    @property
    def stream(self) -> torch.Tensor:
        stream: torch.Tensor = self.args[self.place] if isinstance(self.place, int) else self.kwargs[self.place]
        return stream

    def replay(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Run ``block`` on the stream ``x`` with the other arguments unchanged; return the stream after the block."""
        args, kwargs = copy.deepcopy((list(self.args), dict(self.kwargs)))
        (args if isinstance(self.place, int) else kwargs)[self.place] = x.clone()  # type: ignore[index]
        # Without CUDA, torch.manual_seed stores a stack trace per call for a later start of CUDA: half a probe's time.
        (torch.default_generator if x.device.type == "cpu" else torch).manual_seed(0)
        output = block(*args, **kwargs)
        if (after := stream_of(output)) is None:
            raise _NotPreLN(
                f"its output is a {type(output).__name__}, expected a tensor or a tuple that starts with one"
            )
        return after


@dataclass(frozen=True)
class BlockSites:
    """The Pre-LN sites of a block.

    :param names: names of the norms in running order: two, or one that both branches of a parallel block read.
    :param cancelled: norms whose factor a later norm cancels. :param random_copy: the copy that was run.
    :param projections: the residual output projections, as from :func:`olmo_lns.initialization.residual_projections`.
    """

    names: tuple[str, ...]
    cancelled: tuple[str, ...]
    random_copy: nn.Module = field(repr=False, compare=False)
    projections: Mapping[str, int] = field(default_factory=dict)


class _NotPreLN(Exception):
    """The reason why a block is not Pre-LN."""


def stream_of(output: Any) -> torch.Tensor | None:
    """Return the first tensor of a block's output: itself, the first of a tuple, or ``last_hidden_state``."""
    output = getattr(first_output(output), "last_hidden_state", first_output(output))
    return output if torch.is_tensor(output) else None


@contextmanager
def hooks(handles: Iterable[Any]) -> Iterator[None]:
    """Remove these hooks when the context ends."""
    handles = list(handles)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def pre_ln_sites(
    block: nn.Module,
    call: Call,
    *,
    where: str = "block 1",
    names: tuple[str, ...] | None = None,
    like: BlockSites | None = None,
    weights: RandomWeights | None = None,
) -> BlockSites:
    """Find the norms through which ``block`` reads its stream, by running a copy of the block.

    :param block: called as block(x, …); its weights may have any floating dtype, not on the meta device.
    :param call: arguments of the block in a real forward.
    :param names: expected norms, to be confirmed.
    :param like: result for a block built alike, to be confirmed, since a block may depend on its number. The copy takes
        the random parameters of ``like.random_copy``.
    :param weights: memory of the random parameters, which the copies of several blocks share.
    :raises LNSConfigError: the block is not Pre-LN; the message names the block and the reason.
    :raises MeasurementError: the copy cannot be run again.

    Example: ``pre_ln_sites(model.model.layers[0], call).names`` is ``("input_layernorm", "post_attention_layernorm")``
    for a Llama.
    """
    problem: Exception | None = None
    expected, parameters_of = (names, None) if like is None else (like.names, like.random_copy)
    cancelled = None if like is None else like.cancelled
    for dtype in (torch.float32, torch.bfloat16):  # some kernels accept half precision only
        try:
            # Each run is seeded; the launch's random state is kept.
            with torch.no_grad(), torch.random.fork_rng([call.stream.device] if call.stream.is_cuda else []):
                replay = _Replay(random_copy(block, parameters_of, weights, dtype), _cast(call, dtype), dtype)
                found = replay.sites(expected, cancelled)
                if like is not None:
                    return replace(found, projections=like.projections)
                return replace(found, projections=residual_projections(replay.block, replay.moved, replay.same))
        except _NotPreLN as reason:
            raise LNSConfigError(
                f"{where} ({type(block).__name__}) is not Pre-LN: {reason}. A scheme needs a block whose two branches "
                "read the stream through a norm that is a module; docs/without-a-plugin.md scales other models."
            ) from None
        except Exception as error:
            problem = problem or error
    raise MeasurementError(
        f"{where} ({type(block).__name__}) could not be run a second time ({type(problem).__name__}: {problem}). "
        "Expected a forward without caches that other calls share; give an example= that uses none."
    ) from problem


def random_copy(
    block: nn.Module, like: nn.Module | None = None, weights: RandomWeights | None = None, dtype: Any = torch.float32
) -> nn.Module:
    """Copy ``block`` in ``dtype`` and evaluation mode, with random parameters or with those of ``like``.

    :param weights: memory that copies share; the random parameters are views of it.
    """
    if any(map(is_absent, block.parameters())):
        raise _NotPreLN("its weights are on the meta device or partitioned; build or load them first")
    if any(not parameter.is_floating_point() for parameter in block.parameters()):
        raise _NotPreLN("its weights are quantized; apply the scheme before quantization")
    if like is not None:
        pairs = zip(block.parameters(), like.parameters(), strict=True)
        copied = copy.deepcopy(block, {id(original): weight for original, weight in pairs})
    else:
        copied = (weights or RandomWeights()).copy(block, dtype=dtype)
    # Module.to() would take the imaginary part off complex rotary tables.
    return copied._apply(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor).eval()


def _cast(call: Call, dtype: torch.dtype) -> Call:
    def cast(value: Any) -> Any:
        if torch.is_tensor(value):
            return value.detach().to(dtype) if value.is_floating_point() else value.detach()
        if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
            return type(value)(map(cast, value))
        return value

    return Call(tuple(map(cast, call.args)), {key: cast(value) for key, value in call.kwargs.items()}, call.place)


class _Replay:
    """A block that runs repeatedly, with the outputs of its sites held fixed and those of other modules changed."""

    def __init__(self, block: nn.Module, call: Call, dtype: torch.dtype) -> None:
        self.block, self.call = block, call
        self.same = SAME if dtype == torch.float32 else SAME_HALF
        generator = torch.Generator().manual_seed(2)
        shape, device = call.stream.shape, call.stream.device

        def draw() -> torch.Tensor:
            return torch.randn(shape, generator=generator, device="cpu").to(device, dtype)

        self.x, self.other = draw(), 3.0 * draw()
        self.norms = self._norms()
        self.held = {name: draw() for name in self.norms}
        self.names: tuple[str, ...] = ()

    def _norms(self) -> dict[str, nn.Module]:
        """Find the norms of the stream's shape that ran once, by their invariance to the size of the input."""
        calls_by_name: dict[str, list[tuple[Any, Any, Any]]] = {}
        leaves = {}
        for name, module in self.block.named_modules():
            # A norm may hold a dropout: a child without parameters.
            if name and not any(list(child.parameters()) for child in module.children()):
                leaves[name] = module

        def note(name: str) -> _Hook:
            return lambda _, args, kwargs, output: calls_by_name.setdefault(name, []).append((args, kwargs, output))

        with hooks(module.register_forward_hook(note(name), with_kwargs=True) for name, module in leaves.items()):
            self.call.replay(self.block, self.x)
        norms = {}
        for name, norm_calls in calls_by_name.items():
            args, kwargs, output = norm_calls[0]
            y = first_output(output)
            if not torch.is_tensor(y) or not torch.is_tensor(_norm_input(args, kwargs)) or not y.dim():
                continue
            has_stream_shape = y.shape[-1] == self.x.shape[-1] and y.numel() == self.x.numel()
            if has_stream_shape and _is_norm(leaves[name], args, kwargs):
                if len(norm_calls) > 1:
                    raise _NotPreLN(f"its norm {name} ran {len(norm_calls)} times in one forward, expected once")
                norms[name] = leaves[name]
        return norms

    def run(
        self, x: torch.Tensor, names: Sequence[str], changes: Mapping[nn.Module, _Change] | None = None
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return ``block(x) - x`` with the outputs of these norms held, and the input of each norm minus x.

        :param changes: module -> the change of its output; for a held norm, of the held output.
        """
        inputs: dict[str, torch.Tensor] = {}

        def hold(name: str) -> _Hook:
            def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
                inputs[name] = (_norm_input(args, kwargs).detach().reshape(x.shape) - x).double()
                return _replace_first(output, self.held[name].reshape(first_output(output).shape))

            return hook

        def change(function: _Change) -> _Hook:
            return lambda module, args, output: _replace_first(output, function(first_output(output)))

        handles = [self.norms[name].register_forward_hook(hold(name), with_kwargs=True) for name in names]
        handles += [module.register_forward_hook(change(function)) for module, function in (changes or {}).items()]
        with hooks(handles):
            moved = self.call.replay(self.block, x).detach().double() - x.double()
        return moved, [inputs[name] for name in names if name in inputs]  # training may drop branches

    def constant(self, names: Sequence[str]) -> bool:
        """Return true if, with these norms held, block(x) - x and each norm's input minus x do not depend on x."""
        (moved, inputs), (other_moved, other_inputs) = self.run(self.x, names), self.run(self.other, names)
        scale = self.other.double().norm()
        pairs = [(moved, other_moved), *zip(inputs, other_inputs, strict=True)]
        return all(float((a - b).norm()) < self.same * float(a.norm() + b.norm() + scale) for a, b in pairs)

    def effect(self, *modules: nn.Module, change: _Change | None = None) -> torch.Tensor:
        """Return the change of the block's output for changed outputs of these modules, with the sites held."""
        return self.run(self.x, self.names, dict.fromkeys(modules, change or _roll_channels))[0] - self.rest

    def moved(self) -> torch.Tensor:
        """Return block(x) - x with the sites held."""
        return self.run(self.x, self.names)[0]

    def sites(self, known: tuple[str, ...] | None, cancelled: tuple[str, ...] | None) -> BlockSites:
        """Find the sites. :param known: expected names. :param cancelled: cancelled norms of a block built alike."""
        if not self.norms:
            raise _NotPreLN("none of its modules is a norm of the stream; norms that are functions cannot be scaled")
        if known is not None and not self.norms.keys() >= set(known):
            raise _NotPreLN(f"found {', '.join(self.norms)}, expected {', '.join(known)} as in a block built alike")
        # The smallest set excludes norms of queries and keys.
        sets = (names for count in (1, 2, 3) for names in itertools.combinations(self.norms, count))
        self.names = next(filter(self.constant, sets if known is None else [known]), ())
        if not self.names:
            raise _NotPreLN(
                f"its norms {', '.join(self.norms)}, held fixed, do not separate its branches from the stream"
            )
        self.rest = self.run(self.x, self.names)[0]
        self._check(" and ".join(self.names))
        if cancelled is None:
            cancelled = tuple(filter(self._is_cancelled, self.names))
        return BlockSites(self.names, cancelled, self.block)

    def _check(self, site_names: str) -> None:
        """Check the sites.

        :raises _NotPreLN: a site without effect, another norm on a branch, or a number of branches other than two.
        """
        single_effects = [self.effect(self.norms[name]) for name in self.names]
        for name, effect in zip(self.names, single_effects, strict=True):
            if float(effect.norm()) < self.same * float(self.rest.norm()):
                raise _NotPreLN(f"nothing reads its norm {name}")
        for name in self.norms.keys() - set(self.names):
            moved = self.effect(self.norms[name], change=_raise_first_channel)
            if float(moved.norm()) > 1e-6 and float(moved[..., 1:].norm()) < 1e-3 * float(moved[..., 0].norm()):
                raise _NotPreLN(f"its norm {name} sits on a branch, besides {site_names} (Sandwich-LN)")
        if len(self.names) > 2:
            raise _NotPreLN(f"{len(self.names)} norms read the stream ({', '.join(self.names)}), expected two")
        if self._branches(single_effects) < 2:
            raise _NotPreLN(f"it has one branch, after {site_names}; expected attention and feed-forward")
        for module in self.block.modules():
            module.training = not isinstance(module, nn.modules.dropout._DropoutNd)
        with torch.enable_grad():
            trains = self.constant(self.names)
        self.block.eval()
        if not trains:
            raise _NotPreLN(f"in training mode its branches bypass {site_names}")

    def _is_cancelled(self, name: str) -> bool:
        """Return true if 64 and 128 times the norm's output give the same branch, because of a later norm."""
        zero, small, large = (self.effect(self.norms[name], change=lambda y, k=k: k * y) for k in (0.0, 64.0, 128.0))  # type: ignore[misc]
        return float((large - small).norm()) < 0.05 * float((small - zero).norm())

    def _branches(self, single_effects: Sequence[torch.Tensor]) -> int:
        """Count the branches: two modules are in different branches if their effects add.

        The modules are the sites, or the children that read the only site. Within a branch, as for queries, keys and
        values, effects do not add.

        :param single_effects: effect of each site.
        """
        modules = [self.norms[name] for name in self.names]
        if len(modules) == 1:
            modules = self._readers(self.names[0])
            single_effects = [self.effect(unit) for unit in modules]
        branch = list(range(len(modules)))
        for i, j in itertools.combinations(range(len(modules)), 2):
            together = self.effect(modules[i], modules[j]) - single_effects[i] - single_effects[j]
            if float(together.norm()) > 10 * self.same * float(self.rest.norm()):
                branch = [branch[i] if label == branch[j] else label for label in branch]
        return len(set(branch))

    def _readers(self, name: str) -> list[nn.Module]:
        """Return the children of the block that read the norm's output."""
        norm_output = self.held[name]
        readers: dict[nn.Module, None] = {}

        def note(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            tensors = [t for t in (*args, *kwargs.values()) if torch.is_tensor(t) and t.numel() == norm_output.numel()]
            if any(torch.equal(t.reshape(norm_output.shape), norm_output) for t in tensors):
                readers[module] = None

        children = [child for child in self.block.children() if child is not self.norms[name]]
        with hooks(child.register_forward_pre_hook(note, with_kwargs=True) for child in children):
            self.run(self.x, [name])
        return list(readers)


def _roll_channels(y: torch.Tensor) -> torch.Tensor:
    return 2.0 * y.roll(1, -1)


def _raise_first_channel(y: torch.Tensor) -> torch.Tensor:
    """Raise one channel; a branch that ends in this norm changes the stream in that channel only."""
    return y + torch.eye(1, y.shape[-1], dtype=y.dtype, device=y.device)[0]


def _replace_first(output: Any, value: Any) -> Any:
    """Return a module's output with another first tensor."""
    return (value, *output[1:]) if isinstance(output, tuple) else value


def _norm_input(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the input of a norm: its first argument, positional or keyword."""
    return next(iter((*args, *kwargs.values())), None)


def _is_norm(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return true for a norm: 64 and 128 times an input give the same output, another input another output."""
    example = _norm_input(args, kwargs)
    if not example.is_floating_point():
        return False

    def run(value: torch.Tensor) -> torch.Tensor:
        arguments = ((value, *args[1:]), kwargs) if args else ((), {**kwargs, next(iter(kwargs)): value})
        return torch.as_tensor(first_output(module(*arguments[0], **arguments[1]))).double()

    x, another = torch.randn((2, *example.shape), generator=torch.Generator().manual_seed(3), device="cpu").to(example)
    small, large, other = run(64.0 * x), run(128.0 * x), run(64.0 * another)
    size = float(small.norm())
    return float((large - small).norm()) < 1e-3 * size and float((other - small).norm()) > 1e-3 * size
