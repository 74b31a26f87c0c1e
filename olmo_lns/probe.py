"""Find the Pre-LN sites of a block by running a copy of the block.

The sites of a block are the norms through which its branches read the stream. A scheme multiplies the outputs of these
norms. The probe finds them by an experiment. It needs to know neither the class of a block nor the names of its
modules, so it also works for models that this package has never seen.

Take a block that computes ``y = x + attn(norm1(x))`` and returns ``y + mlp(norm2(y))``. The probe replaces the outputs
of ``norm1`` and ``norm2`` by fixed random tensors ``h1`` and ``h2``. We say that it *holds* these two norms. It then
runs the block on two different streams x, and compares the two runs in two places:

* ``block(x) - x`` is ``attn(h1) + mlp(h2)`` in both runs, since neither branch sees x any more.
* The input of each held norm minus x is 0 for ``norm1`` and ``attn(h1)`` for ``norm2``, again in both runs.

Both are independent of x, so the branches read the stream through ``norm1`` and ``norm2`` and nowhere else. The probe
refuses a Post-LN block, ``norm1(x + attn(x))``, because its output is ``h1`` in both runs and ``block(x) - x`` differs.

The probe begins with all norms of the block. It then goes through them from the last to the first, and leaves out each
norm without which the comparison still succeeds. This removes the norms of queries, keys and latents, which read what
a branch has computed.

Some blocks pass this comparison although a scheme cannot scale them. The probe therefore also checks the following:

* No branch ends in another norm, which would cancel the factor (Sandwich-LN). This norm may be a module or a function.
* No norm of the block reads a second stream.
* The block has two branches, and they are not built alike. A single sub-layer and a pair of blocks are refused.
* Each norm has an effect on what the block returns.
* The comparison also succeeds with gradients, under autocast and in training mode.

The copy runs in fp32 where its kernels allow it. Its parameters are random, because a gate or an output projection that
starts at zero would hide the branch behind it.
"""

from __future__ import annotations

import copy
import itertools
import random
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from olmo_lns.errors import LNSConfigError, MeasurementError
from olmo_lns.initialization import residual_projections
from olmo_lns.response import first_output, replace_first
from olmo_lns.shadow import RandomWeights, deep_copy, is_absent, is_quantized

__all__ = [
    "BlockSites",
    "Call",
    "Replay",
    "has_vectors_only",
    "hooks",
    "is_leaf",
    "is_norm",
    "looks_like_norm",
    "normed_branches",
    "pre_ln_sites",
    "random_copy",
    "same_randomness",
    "set_training",
    "stream_of",
]

_Hook = Callable[..., Any]
_Change = Callable[[torch.Tensor], torch.Tensor]

#: Two fp32 results count as equal if their relative difference is below this value.
SAME = 1e-4
#: The corresponding value for blocks that run in half precision only, such as those with flash attention.
SAME_HALF = 0.02


@dataclass(frozen=True)
class Call:
    """The arguments of one call of a block.

    :param args: positional arguments of the call.
    :param kwargs: keyword arguments of the call.
    :param place: position or keyword of the stream among the arguments.
    :param summed: true if the block returns several tensors, such as (hidden, residual), whose sum is the stream.
    :param is_change: true if the block returns only the change, which the model itself adds to the stream.
    :param seed: seed of the random generators during a replay.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    place: int | str
    summed: bool = False
    is_change: bool = False
    seed: int = 0

    @property
    def stream(self) -> torch.Tensor:
        stream: torch.Tensor = self.args[self.place] if isinstance(self.place, int) else self.kwargs[self.place]
        return stream

    def replay(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Run ``block`` on the stream ``x`` and otherwise unchanged arguments. Return the stream after the block."""
        args, kwargs = copy.deepcopy((list(self.args), dict(self.kwargs)))
        (args if isinstance(self.place, int) else kwargs)[self.place] = x.clone()  # type: ignore[index]
        with _seeded(x.device, self.seed):
            output = block(*args, **kwargs)
        if (after := stream_of(output)) is None:
            raise _NotPreLN(
                f"its output is a {type(output).__name__}, expected a tensor or a tuple that starts with one"
            )
        if self.summed:
            parts = [part for part in tree_leaves(output) if torch.is_tensor(part) and part.shape == x.shape]
            return torch.stack(parts).sum(0)
        return x + after if self.is_change else after

    def tensors(self) -> list[torch.Tensor]:
        """Return all tensors among the arguments, also those in lists, tuples and dicts."""
        return [leaf for leaf in tree_leaves((self.args, dict(self.kwargs))) if torch.is_tensor(leaf)]

    def with_tensor(self, index: int, value: torch.Tensor) -> Call:
        """Return a copy of the call in which ``value`` replaces the tensor ``tensors()[index]``."""
        replaced = self.tensors()[index]
        args, kwargs = tree_map(lambda leaf: value if leaf is replaced else leaf, (self.args, dict(self.kwargs)))
        return replace(self, args=args, kwargs=kwargs)


@dataclass(frozen=True)
class BlockSites:
    """The Pre-LN sites of a block.

    :param names: names of the norms, in the order in which they run. A parallel block, whose two branches read the
        same norm, has one; every other block has two.
    :param cancelled: names of the norms whose factor is cancelled completely by a later norm.
    :param partly_cancelled: names of the norms whose factor is cancelled by a later norm in a part of the branch.
    :param projections: result of :func:`olmo_lns.initialization.residual_projections` for this block.
    :param replay: the experiment, which holds the copy of the block and its call.
    """

    names: tuple[str, ...]
    cancelled: tuple[str, ...] = ()
    partly_cancelled: tuple[str, ...] = ()
    projections: Mapping[str, int] = field(default_factory=dict)
    replay: Replay = field(repr=False, compare=False, kw_only=True)


class _NotPreLN(Exception):
    """The block is not Pre-LN.

    :param reason: why it is not, as the end of a message.
    :param curable: true if ``apply`` can still succeed once the user names the norms with ``norms=``.
    """

    def __init__(self, reason: str, *, curable: bool = False) -> None:
        super().__init__(reason)
        self.curable = curable


def stream_of(output: Any) -> torch.Tensor | None:
    """Return the stream in a block's output, or None if the output has none.

    The stream is the output itself, the first element of a tuple or list, or the field ``last_hidden_state``.
    """
    output = getattr(first_output(output), "last_hidden_state", first_output(output))
    return output if torch.is_tensor(output) else None


@contextmanager
def _seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Seed the random generators that a block may use. Afterwards, restore the states of Python's and numpy's."""
    # torch.manual_seed also prepares a later start of CUDA and stores a stack trace for it at each call. On a CPU
    # that would take half of the probe's time.
    (torch.default_generator if device.type == "cpu" else torch).manual_seed(seed)
    numpy, state = sys.modules.get("numpy"), random.getstate()
    numpy_state = None if numpy is None else numpy.random.get_state()
    random.seed(seed)
    if numpy is not None:
        numpy.random.seed(seed)
    try:
        yield
    finally:
        random.setstate(state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)


@contextmanager
def same_randomness(device: torch.device) -> Iterator[None]:
    """Let each forward use the same random numbers, and restore the states of the generators afterwards."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []), _seeded(device, 0):
        yield


@contextmanager
def hooks(handles: Iterable[Any]) -> Iterator[None]:
    """Remove the hooks with these handles when the context ends."""
    registered: list[Any] = []
    try:
        for handle in handles:  # a generator registers them one by one, and may fail
            registered.append(handle)
        yield
    finally:
        for handle in registered:
            handle.remove()


def pre_ln_sites(
    block: nn.Module,
    call: Call,
    *,
    where: str = "block 1",
    names: tuple[str, ...] | None = None,
    like: BlockSites | None = None,
    given: bool = False,
    advice: str = "",
    weights: RandomWeights | None = None,
) -> BlockSites:
    """Find the norms through which ``block`` reads its stream, by running a copy of the block.

    :param block: a block with weights of any floating dtype. They must not be on the meta device.
    :param call: the arguments that the block received in a real forward of the model.
    :param where: name of the block in error messages.
    :param names: the expected norms, which the probe confirms.
    :param like: the result for an earlier block with the same structure. This block then gets the same random
        parameters and held outputs, and runs once in eval and once in training mode. If it computes the same as the
        earlier block, ``like`` is returned. Otherwise it is probed separately.
    :param given: true if the user named the norms ``names``. The probe then searches for no others, and only checks
        that the block reads its stream through these.
    :param advice: text that is added to an error if naming the norms can help.
    :param weights: memory of the random parameters, which the copies of several blocks share.
    :raises LNSConfigError: if the block is not Pre-LN. The message names the block and the reason.
    :raises MeasurementError: if the copy of the block cannot be run.

    Example: ``pre_ln_sites(model.model.layers[0], call).names`` is ``("input_layernorm", "post_attention_layernorm")``
    for a Llama.
    """
    problem: Exception | None = None
    parameters_of = None if like is None else like.replay.block
    # The last attempt keeps the dtypes of the block.
    dtypes = (torch.float32, torch.bfloat16, None) if like is None else (like.replay.dtype,)
    for dtype in dtypes:  # some kernels accept half precision only
        try:
            # Each run sets its own seed, so the random state of the training run is restored afterwards.
            with torch.no_grad(), torch.random.fork_rng([call.stream.device] if call.stream.is_cuda else []):
                replay = Replay(random_copy(block, parameters_of, weights, dtype), _cast(call, dtype), dtype, like)
                if like is not None:
                    if replay.equals(like.replay):
                        return like
                    replay = Replay(replay.block, replay.call, dtype)
                _refuse_a_run_of_the_original(block, replay)
                found = replay.given_sites(names or ()) if given else replay.sites(like.names if like else names)
                projections = like.projections if like else replay.projections(call)
                return replace(found, projections=projections)
        except _NotPreLN as reason:
            raise LNSConfigError(
                f"{where} ({type(block).__name__}) is not Pre-LN: {reason}. A scheme needs a block whose two branches "
                "read the stream through a norm that is a module; docs/without-a-plugin.md scales other models."
                + (f" {advice}" if advice and reason.curable else "")
            ) from None
        except Exception as error:
            problem = problem or error
    raise MeasurementError(
        f"{where} ({type(block).__name__}) could not be run a second time ({type(problem).__name__}: {problem}). "
        "Expected a forward without caches that other calls share; give an example= that uses none. "
        f"{advice}"
    ) from problem


def _refuse_a_run_of_the_original(block: nn.Module, replay: Replay) -> None:
    """Check that the copy runs its own modules, and none of the block that it was copied from.

    :raises MeasurementError: if it runs a module of the original, which the message names.
    """
    names = {module: name for name, module in block.named_modules() if not isinstance(module, torch.jit.ScriptModule)}
    ran: list[nn.Module] = []
    with hooks(module.register_forward_pre_hook(lambda module, args: ran.append(module)) for module in names):
        replay.call.replay(replay.block, replay.x)
    if ran:
        raise MeasurementError(
            f"its copy runs {names[ran[0]] or 'the block itself'} of the original, to which it refers"
        )


def random_copy(
    block: nn.Module, like: nn.Module | None = None, weights: RandomWeights | None = None, dtype: Any = torch.float32
) -> nn.Module:
    """Return a copy of ``block`` in evaluation mode, with random parameters or with those of ``like``.

    :param like: a module with the same structure, whose parameters the copy uses; None for random ones.
    :param weights: shared memory of several copies. The random parameters are views of it.
    :param dtype: floating dtype of the copy; None keeps the dtypes of the block.
    """
    if any(map(is_absent, block.parameters())):
        raise _NotPreLN("its weights are on the meta device or partitioned; build or load them first")
    if any(map(is_quantized, block.parameters())):
        raise _NotPreLN("its weights are quantized; apply the scheme before quantization")
    if like is not None:
        pairs = zip(block.parameters(), like.parameters(), strict=True)
        copied = deep_copy(block, {id(original): weight for original, weight in pairs})
    else:
        copied = (weights or RandomWeights()).copy(block, dtype=dtype)
    # A buffer with the single value 0 is a gate that would hide its branch. The dtypes are converted one by one below,
    # since Module.to() would drop the imaginary part of complex rotary tables.
    for part in copied.modules():
        for buffer in part._buffers.values():
            if buffer is not None and buffer.is_floating_point() and buffer.numel() == 1 and not buffer.any():
                buffer.fill_(1.0)
    copied.eval()
    return copied if dtype is None else copied._apply(lambda t: t.to(dtype) if t.is_floating_point() else t)


def _cast(call: Call, dtype: torch.dtype | None) -> Call:
    def cast(value: Any) -> Any:
        if torch.is_tensor(value):
            return value.detach().to(dtype) if dtype and value.is_floating_point() else value.detach()
        return value

    args, kwargs = tree_map(cast, (call.args, dict(call.kwargs)))
    return replace(call, args=args, kwargs=kwargs)


def looks_like_norm(module: nn.Module) -> bool:
    """Return true for a module that may be a norm, judged by the name of its class and the shapes of its weights."""
    name = type(module).__name__.lower()
    return is_leaf(module) and ("norm" in name or name.startswith("ln")) and has_vectors_only(module)


def is_leaf(module: nn.Module) -> bool:
    """Return true for a module that has no children with parameters. A dropout inside of it does not matter."""
    children = [child for name, child in module.named_children() if name != "parametrizations"]
    return not any(list(child.parameters()) for child in children)


def has_vectors_only(module: nn.Module) -> bool:
    """Return true if at most one dimension of each weight is larger than 1, as in the gain of a norm."""
    return all(p.numel() == max(p.shape, default=1) for p in module.parameters())


class Replay:
    """The experiment on one block: run its copy repeatedly, hold the outputs of norms, and change other outputs.

    The module's docstring explains what *to hold* means. The attribute ``names`` has the sites once they are found.

    :param block: the copy of the block, which this class runs.
    :param call: arguments of the block other than its stream.
    :param dtype: dtype of the copy; None if it keeps those of the block.
    :param like: the result for a block with the same structure, whose norms, held outputs and streams are used here.
    """

    def __init__(self, block: nn.Module, call: Call, dtype: torch.dtype | None, like: BlockSites | None = None) -> None:
        self.block, self.call, self.dtype = block, call, dtype
        self.same = SAME if dtype == torch.float32 else SAME_HALF
        #: Rows count as equally large if their sizes differ by less than this part.
        self.same_size = 3e-3 if dtype == torch.float32 else SAME_HALF
        self._generator = torch.Generator().manual_seed(2)
        self.x, self.other = self.draw(call.stream), 3.0 * self.draw(call.stream)
        #: The norms of the block, in the order in which they run. ``norms`` has those whose output has as many elements
        #: as the stream, ``all_norms`` has all.
        self.norms: dict[str, nn.Module] = {}
        self.all_norms: dict[str, nn.Module] = {}
        #: Norm -> the random tensor that replaces its output while the norm is held.
        self.held: dict[str, torch.Tensor] = {}
        #: Norm -> the order of the stream's dimensions in which it reads the stream.
        self.layouts: dict[str, tuple[int, ...]] = {}
        #: True if the block computes something different in training mode, for another reason than dropout.
        self._trains_otherwise = False
        #: Norm -> the shape of its input.
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.names: tuple[str, ...] = ()
        self._results: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
        if like is None:
            self._find_norms()
        else:
            self.take_from(like.replay, like.names)

    def draw(self, like: torch.Tensor) -> torch.Tensor:
        """Return random numbers in the shape of ``like``. All blocks with one structure get the same numbers."""
        numbers = torch.randn(like.shape, generator=self._generator, device="cpu")
        return numbers.to(like.device, self.dtype or like.dtype)

    def _find_norms(self) -> None:
        """Find the norms of the block. A norm is a module whose output does not depend on the size of its input."""
        calls_by_name: dict[str, list[tuple[Any, Any, Any]]] = {}
        leaves = {
            name: module
            for name, module in self.block.named_modules()
            if name
            and (is_leaf(module) or module._parameters)
            and has_vectors_only(module)
            and "parametrizations" not in name
        }

        def note(name: str) -> _Hook:
            return lambda _, args, kwargs, output: calls_by_name.setdefault(name, []).append((args, kwargs, output))

        with hooks(module.register_forward_hook(note(name), with_kwargs=True) for name, module in leaves.items()):
            self.call.replay(self.block, self.x)
        for name, norm_calls in calls_by_name.items():
            args, kwargs, output = norm_calls[0]
            y = first_output(output)
            if not torch.is_tensor(y) or not torch.is_tensor(_norm_input(args, kwargs)) or not y.dim():
                continue
            if not is_norm(leaves[name], args, kwargs):
                continue
            self.shapes[name] = tuple(_norm_input(args, kwargs).shape)
            if y.numel() == self.x.numel():
                if len(norm_calls) > 1 and y.shape[-1] == self.x.shape[-1]:
                    raise _NotPreLN(f"its norm {name} ran {len(norm_calls)} times in one forward, expected once")
                self.norms[name] = leaves[name]
            if len(norm_calls) == 1:
                self.all_norms[name], self.held[name] = leaves[name], self.draw(y)
        # A norm may contain another norm, to whose output it applies its own gain or bias. Only the outer one counts.
        for inner in [name for name in calls_by_name if self._outer_norm(name)]:
            for found in (self.norms, self.all_norms, self.held):
                found.pop(inner, None)
        for name in [name for name in self.norms if name not in self.all_norms]:  # ran several times
            del self.norms[name]
        self._find_layouts()

    def _find_layouts(self) -> None:
        """Find in which order of dimensions each norm reads the stream, since images may have channels first.

        While all norms are held, the input of a norm of the stream changes by exactly the change of the stream, in some
        order of the dimensions. A norm whose input does not is inside of a branch. It is removed from ``norms`` unless
        its input has the size and the width of the stream.
        """
        usual = tuple(range(self.x.dim()))
        self.layouts = dict.fromkeys(self.norms, usual)
        inputs = [self._inputs(x, [*self.norms]) for x in (self.x, self.other)]
        moved = (self.x - self.other).double()
        orders = [usual, *(order for order in itertools.permutations(usual) if order != usual)]
        for name in [*self.norms]:
            if not all(name in each for each in inputs):
                continue
            found = inputs[0][name] - inputs[1][name]
            found = found if found.shape == self.x.shape else found.flatten()
            for order in orders if self.x.dim() < 6 else [usual]:
                expected = moved.permute(order)
                if found.dim() > 1 and expected.shape != found.shape:
                    continue
                if self._equal(found.flatten(), expected.flatten()):
                    self.layouts[name] = order
                    break
            else:
                if self.shapes[name][-1] != self.x.shape[-1] or found.numel() != self.x.numel():
                    del self.norms[name]

    def _inputs(self, x: torch.Tensor, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return the input of each of these norms while all of them are held."""
        found: dict[str, torch.Tensor] = {}

        def note(name: str) -> _Hook:
            return lambda module, args, kwargs: found.update({name: _stream_input(args, kwargs)})

        with hooks(self.all_norms[name].register_forward_pre_hook(note(name), with_kwargs=True) for name in names):
            self.run(x, names)
        return found

    def _in_stream(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Bring the input or output of a norm into the shape of the stream."""
        order = self.layouts.get(name, tuple(range(self.x.dim())))
        inverse = sorted(range(len(order)), key=order.__getitem__)
        return value.reshape(self.x.permute(order).shape).permute(inverse)

    def _in_norm(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Bring a tensor of the stream's shape into the order of dimensions in which a norm reads the stream."""
        return value.permute(self.layouts.get(name, tuple(range(self.x.dim()))))

    def _outer_norm(self, name: str) -> str | None:
        """Return the name of the norm that contains the norm ``name``, or None."""
        return next((outer for outer in self.all_norms if name.startswith(f"{outer}.")), None)

    def run(
        self,
        x: torch.Tensor,
        names: Sequence[str],
        changes: Mapping[nn.Module, _Change] | None = None,
        *,
        call: Call | None = None,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Hold these norms, run the block on ``x``, and return ``block(x) - x`` and the input of each norm minus x.

        :param x: the stream in front of the block.
        :param names: names of the norms that are held.
        :param changes: module -> a function that is applied to its output. For a held norm it is applied to the held
            tensor.
        :param call: arguments of the block if they are not those of the model's forward.
        """
        inputs: dict[str, torch.Tensor] = {}

        def hold(name: str) -> _Hook:
            def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
                value, y, held = _stream_input(args, kwargs), first_output(output), self.held[name]
                if y.numel() != held.numel():  # training may run a branch on a part of the batch
                    return replace_first(output, held[: len(y)].reshape(y.shape).clone())
                reads_stream = name in self.norms and value.numel() == x.numel()
                inputs[name] = self._in_stream(name, value) - x.detach().double() if reads_stream else value
                return replace_first(output, held.reshape(y.shape).clone())

            return hook

        def change(function: _Change) -> _Hook:
            return lambda module, args, output: replace_first(output, function(first_output(output)))

        x = x.detach().requires_grad_(torch.is_grad_enabled())  # the block may read it
        handles = [self.all_norms[name].register_forward_hook(hold(name), with_kwargs=True) for name in names]
        handles += [module.register_forward_hook(change(function)) for module, function in (changes or {}).items()]
        with hooks(handles):
            moved = (call or self.call).replay(self.block, x).detach().double() - x.detach().double()
        return moved, [inputs[name] for name in names if name in inputs]  # training may drop branches

    def constant(self, names: Sequence[str], *, inner: bool = False) -> bool:
        """Return true if neither ``block(x) - x`` nor a norm's input minus x depends on x while these norms are held.

        :param inner: also accept norms inside of a branch, whose input itself, without the subtraction, does not depend
            on x.
        """
        (moved, inputs), (other_moved, other_inputs) = self.run(self.x, names), self.run(self.other, names)
        streams = self.x.double(), self.other.double()
        return self._equal(moved, other_moved) and all(
            self._equal(a, b) or (inner and self._equal(a + streams[0], b + streams[1]))
            for a, b in zip(inputs, other_inputs, strict=True)
        )

    def _equal(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        scale = self.other.double().norm()
        return a.shape == b.shape and float((a - b).norm()) < self.same * float(a.norm() + b.norm() + scale)

    def effect(self, *modules: nn.Module, change: _Change | None = None) -> torch.Tensor:
        """Hold the sites, change the outputs of these modules, and return by how much the block's output changes.

        :param change: the function that is applied to each output; the default shuffles the channels.
        """
        return self.run(self.x, self.names, dict.fromkeys(modules, change or _roll_channels))[0] - self.rest

    @property
    def rest(self) -> torch.Tensor:
        """``block(x) - x`` while the sites are held. It is computed once in each mode."""
        if not hasattr(self, "_rest"):
            self._rest = self.moved()
        return self._rest

    def moved(self) -> torch.Tensor:
        """Run the block and return ``block(x) - x`` while the sites are held."""
        return self.run(self.x, self.names)[0]

    def take_from(self, like: Replay, names: tuple[str, ...]) -> None:
        """Use the same norms, held outputs and streams as for a block with the same structure.

        :param like: the experiment on that block.
        :param names: the sites of that block.
        """
        self.norms = {name: self.block.get_submodule(name) for name in like.norms}
        self.all_norms = {name: self.block.get_submodule(name) for name in like.all_norms}
        self.x, self.other, self.held = like.x, like.other, like.held
        self.layouts, self.shapes, self.names = like.layouts, like.shapes, names
        self.call = replace(self.call, summed=like.call.summed, is_change=like.call.is_change)

    def results(self) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
        """Return the results of :meth:`run` in eval mode and in training mode while the sites are held."""
        if not self._results:
            for trains in (False, True):
                with self._training(trains):
                    self._results.append(self.run(self.x, self.names))
        return self._results

    def equals(self, like: Replay) -> bool:
        """Return true if this block and the other one compute the same, in eval mode and in training mode."""
        for (moved, inputs), (expected, expected_inputs) in zip(self.results(), like.results(), strict=True):
            pairs = zip((moved, *inputs), (expected, *expected_inputs), strict=False)
            if len(inputs) != len(expected_inputs) or not all(self._equal(a, b) for a, b in pairs):
                return False
        return True

    def equals_scaled(self, like: BlockSites, factor: float) -> bool:
        """Return true if this block computes what the other one does, but multiplies its norms by ``factor`` itself.

        :param like: the result for the other block, which has the same structure.
        """
        self.held, self.x, self.names = like.replay.held, like.replay.x, like.names
        divided = {self.norms[name]: lambda y: y / factor for name in like.names if name in self.norms}
        with torch.no_grad():
            return self._equal(self.run(self.x, self.names, divided)[0], like.replay.moved())

    @contextmanager
    def _training(self, trains: bool) -> Iterator[None]:
        """Switch training mode and gradients on or off while the context runs. Dropout always stays off."""
        in_eval, call = vars(self).pop("_rest", None), self.call
        set_training(self.block, trains)
        try:
            with torch.set_grad_enabled(trains):
                yield
        finally:
            self.block.eval()
            self.call = call
            vars(self).pop("_rest", None)
            if in_eval is not None:
                self._rest = in_eval

    def given_sites(self, names: tuple[str, ...]) -> BlockSites:
        """Check that the block reads its stream through the norms that the user named, and nowhere else.

        :raises _NotPreLN: if it does not, or if it fails one of the other checks of the module's docstring.
        """
        if missing := [name for name in names if name not in self.norms]:
            others = f"; its norms are {', '.join(self.norms)}" if self.norms else ""
            raise _NotPreLN(f"{', '.join(missing)} given by norms= is no norm of its stream{others}")
        self.names = names
        forms: tuple[dict[str, bool], ...] = ({}, {"summed": True}, {"is_change": True})
        for form in forms:
            self.call = replace(self.call, **{"summed": False, "is_change": False, **form})  # type: ignore[arg-type]
            if self.constant(names):
                break
        else:
            raise _NotPreLN(f"it reads its stream elsewhere than through {' and '.join(names)}, given by norms=")
        if len(names) == 1 and not self._has_both_branches():
            raise _NotPreLN(
                f"one branch reads {names[0]}, given by norms=. A block has two branches, so give its two norms as a "
                "pair, also if they are in two modules"
            )
        self._check(f"{' and '.join(names)}, given by norms=")
        return self._result()

    def sites(self, known: tuple[str, ...] | None) -> BlockSites:
        """Find the sites of the block.

        :param known: the expected sites, which are confirmed; None to search for them.
        :raises _NotPreLN: if the block is not Pre-LN, or has other sites than expected.
        """
        if not self.norms:
            raise _NotPreLN(
                "none of its modules is a norm of the stream; norms that are functions cannot be scaled", curable=True
            )
        if known is not None and not self.norms.keys() >= set(known):
            raise _NotPreLN(f"found {', '.join(self.norms)}, expected {', '.join(known)} as in a block built alike")
        names = list(known or self.norms)
        if not self.constant(names, inner=known is None):
            raise _NotPreLN(
                f"its norms {', '.join(self.norms)}, held fixed, do not separate its branches from the stream",
                curable=True,
            )
        if known is None:
            # A norm inside of a branch, such as one of queries, reads what an earlier norm has passed on. The search
            # goes from the last norm to the first, so it leaves out the inner norm and keeps the earlier one.
            for name in reversed(self.norms):
                without = [other for other in names if other != name]
                if without and self.constant(without, inner=True):
                    names = without
        self.names = tuple(names)
        if not self.constant(names):
            raise _NotPreLN(f"its norms {', '.join(names)} do not read its stream", curable=True)
        self._check(" and ".join(self.names))
        return self._result()

    def projections(self, call: Call) -> Mapping[str, int]:
        """Return the residual output projections of the block.

        The result is empty if a branch ends in a matrix that is not a parameter of the block, since the result would
        then be incomplete.

        :param call: the call as the model made it. Its arguments show whether the model passes parameters to the block.
        """
        found = residual_projections(self.block, self.moved, self.same)
        parameters = dict(self.block.named_parameters())
        matrices = [
            parameter for parameter in parameters.values() if parameter.numel() > max(parameter.shape, default=1)
        ]
        remain = [self._remains(name, [parameters[other] for other in found]) for name in self.names]
        if not any(remain):
            return found
        given = any(
            isinstance(tensor._base if tensor._is_view() else tensor, nn.Parameter) for tensor in call.tensors()
        )
        # A branch without matrices, such as pooling, has no projection that could be missed.
        owned = any(left and not self._remains(name, matrices) for name, left in zip(self.names, remain, strict=True))
        return {} if given or owned else found

    def _remains(self, name: str, parameters: Sequence[nn.Parameter]) -> bool:
        """Return true if the output of this site still has an effect on the stream while these parameters are zero."""
        saved = [parameter.data for parameter in parameters]
        for parameter in parameters:
            parameter.data = torch.zeros_like(parameter)
        try:
            change = {self.norms[name]: _roll_channels}
            moved = self.run(self.x, self.names, change)[0] - self.moved()
        finally:
            for parameter, data in zip(parameters, saved, strict=True):
                parameter.data = data
        return float(moved.norm()) > self.same * float(self.rest.norm())

    def _result(self) -> BlockSites:
        shares = {name: self._moved_share(name) for name in self.names}
        if self._trains_otherwise:  # BatchNorm cancels a factor in training mode only
            with self._training(True), torch.no_grad():
                shares = {name: min(share, self._moved_share(name)) for name, share in shares.items()}
        return BlockSites(
            self.names,
            tuple(name for name, share in shares.items() if share < 0.01),
            tuple(name for name, share in shares.items() if 0.01 <= share < 0.25),
            replay=self,
        )

    def _check(self, site_names: str) -> None:
        """Run the checks that the docstring of the module lists.

        :param site_names: the sites in the words of an error message.
        :raises _NotPreLN: if a site or another norm has no effect, a branch ends in a norm, a norm reads a second
            stream, the block has not exactly two branches, or the two branches are built alike.
        """
        single_effects = [self.effect(self.norms[name]) for name in self.names]
        for name, effect in zip(self.names, single_effects, strict=True):
            if float(effect.norm()) < self.same * float(self.rest.norm()):
                raise _NotPreLN(f"nothing reads its norm {name}")
        if len(self.names) > 2:
            found = f"{len(self.names)} norms read the stream ({', '.join(self.names)}), expected two"
            raise _NotPreLN(found, curable=len(self.names) > 3)
        for name in [name for name in self.norms if name not in self.names]:
            if not self._has_effect(name):
                raise _NotPreLN(
                    f"its norm {name} runs without any effect, as if its branch were switched off; its factor would "
                    "be missing once the branch is switched on"
                )
        self._check_one_stream(site_names)
        if alike := self._like_branches():
            raise _NotPreLN(
                f"its two branches {' and '.join(alike)} are built alike, so it holds two layers of one branch, or two "
                "blocks; expected attention and feed-forward"
            )
        self._check_ends_of_branches(site_names)
        if len(self.names) == 2:
            together = self.effect(*(self.norms[name] for name in self.names)) - sum(single_effects)
            if float(together.norm()) > 10 * self.same * float(self.rest.norm()):
                raise _NotPreLN(f"it has one branch, after {site_names}; expected attention and feed-forward")
        elif not self._has_both_branches():
            raise _NotPreLN(
                f"it has one branch, after {site_names}; expected attention and feed-forward, one of which mixes "
                "positions",
                curable=True,
            )
        self._check_training()

    def _like_branches(self) -> tuple[str, ...]:
        """Return the names of the two branches if they are modules with the same structure, or else ``()``.

        A branch is the module that contains one site but not the other, or that reads the output of one site.
        """
        if len(self.names) != 2:
            return ()
        names = {module: name for name, module in self.block.named_modules()}
        readers: dict[str, nn.Module] = {}
        outputs: dict[int, str] = {}
        kept: list[torch.Tensor] = []  # keeps the outputs alive, so that no other tensor gets their address

        def wrote(name: str) -> _Hook:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                kept.append(first_output(output))
                outputs[kept[-1].data_ptr()] = name

            return hook

        def read(module: nn.Module, args: Any, kwargs: Any) -> None:
            value = _norm_input(args, kwargs)
            if torch.is_tensor(value) and not is_leaf(module):
                name = outputs.get(value.data_ptr())
                if name is not None and self.norms[name] not in set(module.modules()):
                    readers.setdefault(name, module)

        handles = [module.register_forward_pre_hook(read, with_kwargs=True) for module in names]
        handles += [self.norms[name].register_forward_hook(wrote(name)) for name in self.names]
        with hooks(handles):
            self.call.replay(self.block, self.x)
        holders = [self._holder(name) for name in self.names]
        for pair in (holders, [readers.get(name) for name in self.names]):
            first, second = pair
            if first is None or second is None or first is second or not _is_built_like(first, second):
                continue
            if self._is_added(first) and self._is_added(second):  # a conditioned norm is not added
                return names[first], names[second]
        return ()

    def _holder(self, name: str) -> nn.Module | None:
        """Return the largest module in the block that contains this site and no other, or None if none does."""
        others = {self.norms[other] for other in self.names if other != name}
        parts = name.split(".")
        for length in range(1, len(parts)):
            module = self.block.get_submodule(".".join(parts[:length]))
            if not others.intersection(module.modules()):
                return module
        return None

    def _has_effect(self, name: str) -> bool:
        """Return true if the output of this norm has an effect on the stream or on any other output of the block."""
        outputs = self._all_outputs({}), self._all_outputs({self.norms[name]: _roll_channels})
        return not all(self._equal(a.double(), b.double()) for a, b in zip(*outputs, strict=True))

    def _all_outputs(self, changes: Mapping[nn.Module, _Change]) -> list[torch.Tensor]:
        """Return all tensors that the block returns while the sites are held. The stream is the first."""
        outputs: list[torch.Tensor] = []

        def note(block: nn.Module, args: Any, output: Any) -> None:
            leaves = tree_leaves(dict(output) if isinstance(output, Mapping) else output)
            stream = stream_of(output)
            others = [leaf.detach() for leaf in leaves if torch.is_tensor(leaf) and leaf is not stream]
            outputs.extend([stream.detach(), *others] if stream is not None else others)

        with hooks([self.block.register_forward_hook(note)]):
            self.run(self.x, self.names, changes)
        return outputs

    def _use_a_seed_with_all_branches(self) -> None:
        """Choose a seed with which a block that drops branches in training drops none. Eight seeds are tried."""
        usual = self.call
        for seed in range(8):
            self.call = replace(usual, seed=seed)
            if len(self.run(self.x, self.names)[1]) == len(self.names):
                return
        self.call = usual

    def _constant_under_autocast(self) -> bool:
        """Return true if the comparison also succeeds under autocast to bf16, or if the block does not run there."""
        same, self.same = self.same, SAME_HALF
        try:
            with torch.autocast(self.x.device.type, torch.bfloat16):
                return self.constant(self.names)
        except Exception:
            return True
        finally:
            self.same = same

    def _check_ends_of_branches(self, site_names: str) -> None:
        """Refuse Sandwich-LN.

        :param site_names: the sites in the words of an error message.
        :raises _NotPreLN: if a branch ends in a norm, which may be a module or a function.
        """
        for name in self.norms.keys() - set(self.names):
            if _is_one_element(self.effect(self.norms[name], change=_raise_one_element)):
                raise _NotPreLN(f"its norm {name} sits on a branch, besides {site_names} (Sandwich-LN)")
        for name in self.names:
            if self._ends_in_function(name):
                raise _NotPreLN(f"the branch that reads {name} ends in a norm that is a function (Sandwich-LN)")

    def _check_training(self) -> None:
        """Check the block with gradients, under autocast and in training mode.

        :raises _NotPreLN: if a branch reads the stream past the sites in one of them, or ends in a norm in training.
        """
        site_names = " and ".join(self.names)
        changes = dict.fromkeys((self.norms[name] for name in self.names), _roll_channels)
        with torch.enable_grad():
            if not self.constant(self.names):
                raise _NotPreLN(f"in eval mode with gradients its branches bypass {site_names}")
        if not self._constant_under_autocast():
            raise _NotPreLN(f"under autocast its branches bypass {site_names}")
        in_eval = self.rest, self.run(self.x, self.names, changes)[0]
        with self._training(True):
            self._use_a_seed_with_all_branches()
            with torch.no_grad():
                without = self.constant(self.names)
            if not (without and self.constant(self.names)):
                raise _NotPreLN(f"in training mode its branches bypass {site_names}")
            in_training = self.rest, self.run(self.x, self.names, changes)[0]
            if not all(self._equal(a, b) for a, b in zip(in_eval, in_training, strict=True)):
                self._trains_otherwise = True
                self._check_ends_of_branches(f"{site_names} in training mode")

    def _check_one_stream(self, site_names: str) -> None:
        """Refuse a block with a second stream, such as one that also normalizes the states of an encoder.

        A norm that is not a site reads a second stream in two cases. Either its input does not change when the outputs
        of the sites change. Or its input is another argument of the block plus a part that does not depend on that
        argument, as in a second residual connection.

        :param site_names: the sites in the words of an error message.
        :raises _NotPreLN: if a norm reads a second stream. The message names it.
        """
        outside = [name for name in self.all_norms if name not in self.names]
        if not outside:
            return
        changed_sites = dict.fromkeys((self.norms[name] for name in self.names), _roll_channels)
        still, moved = self._free_inputs(outside, {}), self._free_inputs(outside, changed_sites)
        suspects = {name for name in still.keys() & moved.keys() if self._equal(still[name], moved[name])}
        varied: set[str] = set()  # norms that read an argument, or something that the block computes from one
        unchanged: set[str] = set()  # norms that read an argument which the block does not update, such as shared keys
        names = [*self.names, *outside]
        for index, tensor in enumerate(self.call.tensors()):
            if not tensor.is_floating_point() or tensor.dim() < 2 or tensor is self.call.stream:
                continue
            values = [tensor, tensor + 3.0 * self.draw(tensor)]
            try:
                runs = [self.run(self.x, names, call=self.call.with_tensor(index, value))[1] for value in values]
            except Exception:  # the argument cannot have other values, so it is no stream
                varied |= suspects
                continue
            for name, *inputs in zip(names, *runs, strict=True):
                if name not in outside or self._equal(*inputs):
                    continue
                varied.add(name)
                if inputs[0].numel() != tensor.numel():
                    continue
                rests = [y.flatten() - value.double().flatten() for y, value in zip(inputs, values, strict=True)]
                suspects |= {name} if self._equal(*rests) else set()
                if not self._returns_another(tensor):
                    unchanged.add(name)
        # A norm that is not in ``varied`` may read a learned parameter, which is no stream.
        suspects = (suspects - unchanged) & varied
        if suspects:
            names_found = ", ".join(name for name in outside if name in suspects)
            raise _NotPreLN(f"it has two streams: its norm {names_found} reads another one than {site_names}")

    def _returns_another(self, argument: torch.Tensor) -> bool:
        """Return true if, besides its stream, the block returns a tensor in the shape of this argument that is new.

        A tensor that equals one of the arguments is not new.
        """
        arguments = [tensor.double() for tensor in self.call.tensors() if tensor.shape == argument.shape]
        others = [leaf.double() for leaf in self._all_outputs({})[1:] if leaf.shape == argument.shape]
        return any(not any(self._equal(leaf, tensor) for tensor in arguments) for leaf in others)

    def _free_inputs(self, names: Sequence[str], changes: Mapping[nn.Module, _Change]) -> dict[str, torch.Tensor]:
        """Return the inputs of these norms while only the sites are held."""
        found: dict[str, torch.Tensor] = {}

        def note(name: str) -> _Hook:
            return lambda module, args, kwargs: found.update({name: _stream_input(args, kwargs)})

        with hooks(self.all_norms[name].register_forward_pre_hook(note(name), with_kwargs=True) for name in names):
            self.run(self.x, self.names, changes)
        return found

    def _moved_share(self, name: str) -> float:
        """Return how much of a branch is lost if the output of its norm is halved, as a part of the whole branch.

        The result is about 0.5 for a linear branch, and 0 if a later norm cancels the factor.
        """
        with self._without_biases():
            zero, half, whole = (
                self.run(self.x, self.names, {self.norms[name]: lambda y, k=k: k * y})[0]  # type: ignore[misc]
                for k in (0.0, 0.5, 1.0)
            )
        size = float((whole - zero).norm())
        # In training mode a branch may be dropped. Nothing is cancelled then.
        return float((whole - half).norm()) / size if size > self.same * float(self.rest.norm()) else 0.5

    @contextmanager
    def _without_biases(self) -> Iterator[None]:
        """Set all biases to 0 and all other vectors, such as gains, to 1 while the context runs."""
        saved = {parameter: parameter.data for parameter in self.block.parameters()}
        for name, parameter in self.block.named_parameters():
            if parameter.numel() == max(parameter.shape, default=1):
                parameter.data = torch.full_like(parameter, 0.0 if name.endswith("bias") else 1.0)
        try:
            yield
        finally:
            for parameter, data in saved.items():
                parameter.data = data

    def _ends_in_function(self, name: str) -> bool:
        """Return true if all rows of the branch's output have the same size, however the output of its norm changes.

        A norm without gain and bias gives such rows. Gains and biases are therefore neutralized during the check.
        """
        with self._without_biases():
            norm = self.norms[name]

            def by_row(y: torch.Tensor) -> torch.Tensor:
                factors = torch.arange(1.0, 1.0 + y.shape[-2], device=y.device, dtype=y.dtype)
                return factors[:, None] * y.roll(1, -1)

            zero, *moved = (
                self.run(self.x, self.names, {norm: change})[0]
                for change in (
                    torch.zeros_like,
                    lambda y: y,
                    by_row,
                    lambda y: 3.0 * y.roll(2, -1),
                )
            )
        branch = torch.stack([each - zero for each in moved])
        # A function may normalize each position, each position of an image, in the norm's order, or each example.
        in_norm = torch.stack([self._in_norm(name, each) for each in branch])
        views = [branch, branch.movedim(2, -1) if branch.dim() == 5 else branch, in_norm, branch.flatten(2)]
        for view in views:
            sizes = view.norm(dim=-1)
            if float(sizes.min()) > 0 and float(sizes.max() / sizes.min()) < 1 + self.same_size:
                return True
        return False

    def _has_both_branches(self) -> bool:
        """Return true if the block adds two outputs to its stream, of which one mixes positions and the other does not.

        These are the outputs of attention and feed-forward in a parallel block, whose branches read one norm.
        """
        (name,) = self.names
        here = torch.zeros_like(self.x)
        self._in_norm(name, here)[(0,) * (here.dim() - 1)].fill_(1.0)
        if self._mixes_and_does_not(name, here):
            return True
        # A GroupNorm reads images that have their channels first.
        here = torch.zeros_like(self.x)
        here.movedim(1, -1)[(0,) * (here.dim() - 1)].fill_(1.0)
        return here.dim() > 3 and self._mixes_and_does_not(name, here)

    def _mixes_and_does_not(self, name: str, here: torch.Tensor) -> bool:
        """Change one position, and return true if one added output spreads the change and another does not.

        :param name: the norm whose output is changed.
        :param here: a mask in the shape of the stream, 1 for all channels of that position and 0 elsewhere.
        """
        in_norm = self._in_norm(name, here)
        modules = [module for module in self.block.modules() if module not in (self.block, *self.all_norms.values())]
        change = {self.norms[name]: lambda y: y + in_norm.reshape(y.shape) * (1.0 + y.roll(1, -1))}
        before, after = self._outputs(modules, {}), self._outputs(modules, change)
        mixing: list[nn.Module] = []
        others: list[nn.Module] = []
        for module in [module for module in before if module in after and self._is_added(module)]:
            moved = (after[module] - before[module]).reshape(self.x.shape)
            inside, outside = float((moved * here).norm()), float((moved * (1 - here)).norm())
            if inside + outside > 0:
                (mixing if outside > 1e-6 * (inside + outside) else others).append(module)
        # Both outputs may belong to one branch. The second is a separate branch only if the block still depends on it
        # while the output that mixes positions is replaced by zeros.
        for first, second in itertools.product(mixing, others):
            held = {first: torch.zeros_like}
            pair = [self.run(self.x, self.names, {**held, **more})[0] for more in ({}, {second: _roll_channels})]
            if not self._equal(*pair):
                return True
        return False

    def _outputs(
        self, modules: Iterable[nn.Module], changes: Mapping[nn.Module, _Change]
    ) -> dict[nn.Module, torch.Tensor]:
        """Return the outputs of the modules that ran once and whose output has the size and width of the stream."""
        outputs: dict[nn.Module, list[torch.Tensor]] = {}

        def note(module: nn.Module, args: Any, output: Any) -> None:
            y = first_output(output)
            if torch.is_tensor(y) and y.numel() == self.x.numel() and y.shape[-1] == self.x.shape[-1]:
                outputs.setdefault(module, []).append(y.detach().double())

        with hooks(module.register_forward_hook(note) for module in modules):
            self.run(self.x, self.names, changes)
        return {module: found[0] for module, found in outputs.items() if len(found) == 1}

    def _is_added(self, module: nn.Module) -> bool:
        """Return true if the block adds the module's output to its stream.

        In that case, a change of one element of this output changes the block's output in one element.
        """
        return _is_one_element(self.effect(module, change=_raise_one_element))


def set_training(module: nn.Module, trains: bool) -> None:
    """Set training or eval mode for all parts of a module, except that dropout stays off."""
    for part in module.modules():
        part.training = trains and not isinstance(part, nn.modules.dropout._DropoutNd)


def normed_branches(module: nn.Module, call: Call) -> int:
    """Return how many branches of a module read its stream through a norm.

    The function looks only at what the module adds to its stream, so it also finds norms that are functions. Behind a
    norm, this addition does not depend on the size of the stream. A second branch lets it depend on the size a little,
    since that branch also reads the output of the first one. A branch that ends in a norm does not count.

    :returns: 0 without such a branch, 1 for a single branch that does not mix positions, such as that of a head, and 2
        for any other module.
    """
    try:
        with torch.no_grad(), torch.random.fork_rng([call.stream.device] if call.stream.is_cuda else []):
            copied, call = random_copy(module), _cast(call, torch.float32)
            generator = torch.Generator().manual_seed(5)
            x, another = torch.randn((2, *call.stream.shape), generator=generator, device="cpu").to(call.stream)

            def added(x: torch.Tensor) -> torch.Tensor:
                return call.replay(copied, x).double() - x.double()

            small, large, other = added(64.0 * x), added(256.0 * x), added(64.0 * another)
            first = x.clone().flatten(0, -2)
            first[0] = another.flatten(0, -2)[0]
            one_row = added(64.0 * first.view(x.shape))
    except Exception:  # the module is not counted if its shapes depend on values or it needs half precision
        return 0
    size, moved = float(small.norm()), float((large - small).norm())
    depends = float((other - small).norm()) > 0.2 * size > 1e-3 * float(x.norm())
    rows = small.norm(dim=-1)
    if not depends or moved >= 0.2 * size or float(rows.max()) < (1 + 3e-3) * float(rows.min()):
        return 0
    mixes = float((one_row - small).flatten(0, -2)[1:].norm()) > 1e-3 * size
    return 2 if mixes or moved > 1e-3 * size else 1


def _is_built_like(one: nn.Module, other: nn.Module) -> bool:
    """Return true if two modules have parts of the same names and classes, and parameters of the same shapes."""

    def structure(module: nn.Module) -> Any:
        classes = [(name, type(part)) for name, part in module.named_modules()]
        return classes, [(name, parameter.shape) for name, parameter in module.named_parameters()]

    return structure(one) == structure(other)


def _roll_channels(y: torch.Tensor) -> torch.Tensor:
    return 2.0 * y.roll(1, -1)


def _raise_one_element(y: torch.Tensor) -> torch.Tensor:
    """Add 1 to one element.

    If a module's output is added to the stream, this changes the stream in one element. A matrix in between would
    spread the change over many.
    """
    raised = y.clone(memory_format=torch.contiguous_format)
    raised.view(-1)[y.numel() // 2] += 1.0
    return raised


def _is_one_element(moved: torch.Tensor) -> bool:
    """Return true if a block's output changed in one element only."""
    size = moved.abs()
    return float(size.max()) > 1e-6 and int((size > 1e-3 * size.max()).sum()) == 1


def _norm_input(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the input of a norm, which is its first argument, positional or keyword."""
    return next(iter((*args, *kwargs.values())), None)


def _stream_input(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """Return what a norm reads in fp64.

    This is its input, or the sum of all inputs of one shape if the module adds them before it normalizes.
    """
    first = _norm_input(args, kwargs)
    return torch.stack([value.detach().double() for value in _alike(first, args, kwargs)]).sum(0)


def _alike(first: torch.Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the floating tensors among the arguments that have the shape of the first."""
    tensors = [value for value in (*args, *kwargs.values()) if torch.is_tensor(value) and value.is_floating_point()]
    return [value for value in tensors if value.shape == first.shape] if first.dim() > 1 else [first]


def is_norm(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return true if a module computes a norm.

    A norm returns the same output for 64 and for 128 times an input, and a different output for a different input.
    """
    example = _norm_input(args, kwargs)
    if not example.is_floating_point():
        return False

    def run(value: torch.Tensor) -> torch.Tensor:
        alike = {id(tensor) for tensor in _alike(example, args, kwargs)}
        arguments = tree_map(lambda leaf: value if id(leaf) in alike else leaf, (args, dict(kwargs)))
        return torch.as_tensor(first_output(module(*arguments[0], **arguments[1]))).double()

    x, another = torch.randn((2, *example.shape), generator=torch.Generator().manual_seed(3), device="cpu").to(example)
    small, large, other = run(64.0 * x), run(128.0 * x), run(64.0 * another)
    size = float(small.norm())
    has_steps = small.unique().numel() < min(17, small.numel())  # a sign function passes the test, but is no norm
    return float((large - small).norm()) < 1e-3 * size and float((other - small).norm()) > 1e-3 * size and not has_steps
