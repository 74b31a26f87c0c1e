"""Repeat one block while norms are frozen or outputs are changed.

A :class:`Replay` has a copy of a block and the call that the block received. Its method :meth:`Replay.run` freezes some
norms, which means that it replaces their outputs by fixed random tensors, and runs the copy. It returns what the block
adds to its stream, and what each frozen norm read. For the block of the example in :mod:`olmo_lns.probe`:

.. code-block:: python

    replay = Replay(random_copy(block), call, torch.float32)
    find_norms(replay)
    delta, inputs = replay.run(replay.x, ("norm1", "norm2"))
    delta  # attn(h1) + mlp(h2), where h1 and h2 are the fixed random tensors
    inputs  # what norm1 and norm2 read, minus x: zeros and attn(h1)

All other methods are short forms of such a run, or compare the results of two runs. Other modules decide what a result
means for the block.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.utils._pytree import tree_leaves

from olmo_lns.probe.call import BlockFailed, Call, NotPreLN, code_of_the_block, hooks, stream_of
from olmo_lns.probe.copies import closed_gates, random_copy, set_training
from olmo_lns.probe.recognize import normalized_input
from olmo_lns.response import first_output, replace_first

Hook = Callable[..., Any]
#: A function that is applied to the output of a module.
Change = Callable[[torch.Tensor], torch.Tensor]

#: What the block adds to its stream, and the input of each frozen norm minus the stream.
Result = tuple[torch.Tensor, list[torch.Tensor]]

#: Two fp32 results count as equal if their relative difference is below this value.
SAME = 1e-4
#: The corresponding value for blocks that run in half precision only, such as those with flash attention.
SAME_HALF = 0.02
#: A change in a result of size 1 is rounding if it is below this value.
ROUNDING = 1e-6
#: An element of a result in fp32 counts as unchanged if its change is below this part of the largest change.
_UNMOVED = 1e-3


class Replay:
    """A copy of a block and its call, to be run repeatedly.

    :param block: the copy of the block, which this class runs.
    :param call: the call of the block, with which the copy runs. Only its stream is replaced.
    :param dtype: dtype of the copy, or None if the copy has the dtypes of the block.
    """

    def __init__(self, block: nn.Module, call: Call, dtype: torch.dtype | None) -> None:
        self.block, self.call, self.dtype = block, call, dtype
        #: Two results count as equal if their relative difference is below this value.
        self.tolerance = SAME if dtype == torch.float32 else SAME_HALF
        #: Rows count as equally large if their sizes differ by less than this part.
        self.size_tolerance = 3e-3 if dtype == torch.float32 else SAME_HALF
        self._generator = torch.Generator().manual_seed(2)
        #: Two streams, in the shape of the one that the block received.
        self.x, self.second_input = self.draw(call.stream), 3.0 * self.draw(call.stream)
        #: The norms of the block, in the order in which they run. ``all_norms`` contains all of them, and ``norms``
        #: only those whose output has as many elements as the stream.
        self.norms: dict[str, nn.Module] = {}
        self.all_norms: dict[str, nn.Module] = {}
        #: Norm -> the random tensor that replaces its output while the norm is frozen.
        self.frozen: dict[str, torch.Tensor] = {}
        #: Norm -> the order of the stream's dimensions in which it reads the stream.
        self.layouts: dict[str, tuple[int, ...]] = {}
        #: Norm -> the shape of its input.
        self.shapes: dict[str, tuple[int, ...]] = {}
        #: Names of the sites, or ``()`` before the search has found them. The methods below freeze the sites, unless
        #: the caller passes the names of the norms to freeze.
        self.site_names: tuple[str, ...] = ()
        self._reference_delta: torch.Tensor | None = None
        self._effects: list[torch.Tensor] = []
        self._results: dict[bool, Result] = {}

    @property
    def sites_text(self) -> str:
        """The names of the sites as text for a message."""
        return " and ".join(self.site_names)

    @property
    def sites(self) -> list[nn.Module]:
        """The sites of the copy."""
        return [self.norms[name] for name in self.site_names]

    def draw(self, like: torch.Tensor) -> torch.Tensor:
        """Return random numbers in the shape of ``like``. All blocks with one structure get the same numbers."""
        numbers = torch.randn(like.shape, generator=self._generator, device="cpu")
        return numbers.to(like.device, self.dtype or like.dtype)

    def set_sites(self, names: Sequence[str], result: Result) -> None:
        """Set the sites.

        :param result: the result of :meth:`run` on the first stream while these norms are frozen.
        """
        self.site_names, self.reference_delta, self._effects, self._results = (
            tuple(names),
            result[0],
            [],
            {False: result},
        )

    # --- run the block ----------------------------------------------------------------------------------------------

    def forward(self) -> None:
        """Run the block on the first stream, without frozen norms. Hooks of the caller see its modules run.

        :raises BlockFailed: if the block raises.
        """
        with code_of_the_block():
            self.call.replay(self.block, self.x)

    def run(
        self,
        x: torch.Tensor,
        names: Sequence[str],
        changes: Mapping[nn.Module, Change] | None = None,
        *,
        call: Call | None = None,
    ) -> Result:
        """Freeze these norms, run the block on ``x``, and return ``block(x) - x`` and the input of each norm minus x.

        :param x: the stream before the block.
        :param names: names of the norms that are frozen.
        :param changes: module -> a function that is applied to its output. For a frozen norm it is applied to the
            frozen tensor.
        :param call: arguments of the block if they are not those of the model's forward.
        :raises BlockFailed: if the block raises.
        """
        inputs: dict[str, torch.Tensor] = {}

        def freeze(name: str) -> Hook:
            return lambda module, args, kwargs, output: self.frozen_output(name, x, inputs, args, kwargs, output)

        def change(function: Change) -> Hook:
            return lambda module, args, output: replace_first(output, function(first_output(output)))

        x = x.detach().requires_grad_(torch.is_grad_enabled())  # the block may read it
        handles = [self.all_norms[name].register_forward_hook(freeze(name), with_kwargs=True) for name in names]
        handles += [module.register_forward_hook(change(function)) for module, function in (changes or {}).items()]
        with hooks(handles), code_of_the_block():
            delta = (call or self.call).replay(self.block, x).detach().double() - x.detach().double()
        return delta, [inputs[name] for name in names if name in inputs]  # training may drop branches

    def frozen_output(
        self, name: str, x: torch.Tensor, inputs: dict[str, torch.Tensor], args: Any, kwargs: Any, output: Any
    ) -> Any:
        """Return the output of a norm in which the frozen tensor replaces what the norm computed.

        :param x: the stream before the block.
        :param inputs: receives the input of the norm by its name, minus ``x`` if the norm reads the stream.
        :param args, kwargs, output: those of the norm's call.
        """
        value, y, frozen = normalized_input(args, kwargs), first_output(output), self.frozen[name]
        if y.numel() != frozen.numel():  # training may run a branch on a part of the batch
            return replace_first(output, frozen[: len(y)].reshape(y.shape).to(y.dtype, copy=True))
        reads_stream = name in self.norms and value.numel() == x.numel()
        inputs[name] = (self.as_stream(name, value) - x.detach().double() if reads_stream else value).detach()
        return replace_first(output, frozen.reshape(y.shape).to(y.dtype, copy=True))

    def delta(self, changes: Mapping[nn.Module, Change] | None = None) -> torch.Tensor:
        """Freeze the sites, run the block, and return ``block(x) - x``.

        :param changes: module -> a function that is applied to its output.
        """
        return self.run(self.x, self.site_names, changes)[0]

    @property
    def reference_delta(self) -> torch.Tensor:
        """``block(x) - x`` while the sites are frozen and nothing is changed. It is computed once in each mode."""
        if self._reference_delta is None:
            self._reference_delta = self.delta()
        return self._reference_delta

    @reference_delta.setter
    def reference_delta(self, delta: torch.Tensor) -> None:
        self._reference_delta = delta

    def effect(self, *modules: nn.Module, change: Change | None = None) -> torch.Tensor:
        """Freeze the sites, change the outputs of these modules, and return by how much the block's output changes.

        :param change: the function that is applied to each output; the default is :func:`double_and_roll`.
        """
        delta = self.delta(dict.fromkeys(modules, change or double_and_roll))
        if delta.shape != self.reference_delta.shape:
            raise BlockFailed(f"its output has the shape {tuple(delta.shape)} once another output of a norm is changed")
        return delta - self.reference_delta

    def effects_of_sites(self) -> list[torch.Tensor]:
        """Return the :meth:`effect` of each site alone in eval mode. They are computed once."""
        if not self._effects:
            self._effects = [self.effect(site) for site in self.sites]
        return self._effects

    def inputs_of(
        self,
        names: Sequence[str],
        *,
        frozen: Sequence[str],
        x: torch.Tensor | None = None,
        changes: Mapping[nn.Module, Change] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Return what each of these norms reads while the norms ``frozen`` are frozen.

        :param x: the stream before the block; the default is the first of the two.
        :param changes: module -> a function that is applied to its output.
        """
        found: dict[str, torch.Tensor] = {}

        def note(name: str) -> Hook:
            return lambda module, args, kwargs: found.update({name: normalized_input(args, kwargs)})

        with hooks(self.all_norms[name].register_forward_pre_hook(note(name), with_kwargs=True) for name in names):
            self.run(self.x if x is None else x, frozen, changes)
        return found

    def outputs_of(
        self, modules: Iterable[nn.Module], changes: Mapping[nn.Module, Change]
    ) -> dict[nn.Module, torch.Tensor]:
        """Freeze the sites, and return the outputs of the modules that ran once.

        Only outputs with the size and the width of the stream are returned.

        :param changes: module -> a function that is applied to its output.
        """
        outputs: dict[nn.Module, list[torch.Tensor]] = {}

        def note(module: nn.Module, args: Any, output: Any) -> None:
            y = first_output(output)
            if torch.is_tensor(y) and y.numel() == self.x.numel() and y.shape[-1] == self.x.shape[-1]:
                outputs.setdefault(module, []).append(y.detach().double())

        with hooks(module.register_forward_hook(note) for module in modules):
            self.run(self.x, self.site_names, changes)
        return {module: found[0] for module, found in outputs.items() if len(found) == 1}

    def all_outputs(self, changes: Mapping[nn.Module, Change]) -> list[torch.Tensor]:
        """Return all tensors that the block returns while the sites are frozen. The stream is the first."""
        outputs: list[torch.Tensor] = []

        def note(block: nn.Module, args: Any, output: Any) -> None:
            leaves = tree_leaves(dict(output) if isinstance(output, Mapping) else output)
            stream = stream_of(output)
            others = [leaf.detach() for leaf in leaves if torch.is_tensor(leaf) and leaf is not stream]
            outputs.extend([stream.detach(), *others] if stream is not None else others)

        with hooks([self.block.register_forward_hook(note)]):
            self.run(self.x, self.site_names, changes)
        return outputs

    # --- compare ----------------------------------------------------------------------------------------------------

    def is_equal(self, a: torch.Tensor, b: torch.Tensor, tolerance: float | None = None) -> bool:
        """Return true if two results are equal.

        :param tolerance: how large their relative difference may be; the default is the rounding of the copy's dtype.
        """
        tolerance, scale = tolerance or self.tolerance, self.second_input.double().norm()
        return a.shape == b.shape and float((a - b).norm()) < tolerance * float(a.norm() + b.norm() + scale)

    def is_noticeable(self, effect: torch.Tensor) -> bool:
        """Return true if an effect on the block's output is more than rounding."""
        return not float(effect.norm()) < self.tolerance * float(self.reference_delta.norm())

    def run_twice(self, names: Sequence[str]) -> tuple[Result, Result]:
        """Freeze these norms, and return the results of :meth:`run` on the two streams."""
        return self.run(self.x, names), self.run(self.second_input, names)

    def are_independent_of_stream(self, results: tuple[Result, Result], *, accept_inner: bool = False) -> bool:
        """Return true if neither ``block(x) - x`` nor a norm's input minus x depends on x while some norms are frozen.

        :param results: what :meth:`run_twice` returned for these norms.
        :param accept_inner: also accept norms inside of a branch, whose input itself, without the subtraction, does not
            depend on x.
        """
        (delta, inputs), (second_delta, second_inputs) = results
        streams = self.x.double(), self.second_input.double()
        if len(inputs) != len(second_inputs):  # the stream decides which norms run
            return False
        return self.is_equal(delta, second_delta) and all(
            self.is_equal(a, b) or (accept_inner and self.is_equal(a + streams[0], b + streams[1]))
            for a, b in zip(inputs, second_inputs, strict=True)
        )

    def separates_branches_as(self, expected: Result) -> bool:
        """Return true if the branches read the stream through the sites only, in the present mode of the block.

        The caller has set a new mode, such as training mode or autocast, and has the result ``expected`` of an earlier
        mode. Two runs in the new mode, on both streams, would always show whether the result depends on the stream. In
        most blocks a single run is enough, because a block usually computes the same in both modes. This method
        therefore first runs the block on the second stream only. If the result is ``expected``, which comes from the
        first stream, the result does not depend on the stream. Otherwise the method also runs the first stream.

        :param expected: the result of :meth:`run` on the first stream in the earlier mode, while the sites are frozen.
        """
        second = self.run(self.second_input, self.site_names)
        if self.is_same_result(second, expected):
            return True
        return self.are_independent_of_stream((self.run(self.x, self.site_names), second))

    def is_added(self, module: nn.Module) -> bool:
        """Return true if the block adds the module's output to its stream.

        The method raises one element of the module's output by 1. If the block adds this output to its stream, one
        element of the block's output changes. If the block multiplies it by a matrix first, many elements change.
        """

        size = self.effect(module, change=raise_one_element).abs()
        return float(size.max()) > ROUNDING and int((size > _UNMOVED * size.max()).sum()) == 1

    # --- another block of the same structure ------------------------------------------------------------------------

    def take_from(self, earlier: Replay) -> None:
        """Use the same norms, sites, frozen outputs and streams as for an earlier block with the same structure."""
        self.norms = {name: self.block.get_submodule(name) for name in earlier.norms}
        self.all_norms = {name: self.block.get_submodule(name) for name in earlier.all_norms}
        self.x, self.second_input, self.frozen = earlier.x, earlier.second_input, earlier.frozen
        self.layouts, self.shapes, self.site_names = earlier.layouts, earlier.shapes, earlier.site_names
        self.call = replace(
            self.call, returns_parts=earlier.call.returns_parts, returns_change=earlier.call.returns_change
        )

    def result(self, *, trains: bool) -> Result:
        """Return the result of :meth:`run` on the first stream while the sites are frozen. It is computed once.

        :param trains: true to run the block in training mode with gradients, false to run it in eval mode without.
        """
        if trains not in self._results:
            with self.in_mode(trains):
                self._results[trains] = self.run(self.x, self.site_names)
        return self._results[trains]

    def store_result(self, result: Result, *, trains: bool) -> None:
        """Store what :meth:`result` would compute, if it is known."""
        self._results[trains] = result

    def computes_the_same_as(self, earlier: Replay) -> bool:
        """Return true if this block and an earlier one compute the same, in eval mode and in training mode."""
        return all(earlier.computes(self.result(trains=trains), trains=trains) for trains in (False, True))

    def computes(self, result: Result, *, trains: bool) -> bool:
        """Return true if the result of this block is ``result``, which another block has.

        :param trains: compare in training mode, and not in eval mode.
        """
        return self.is_same_result(result, self.result(trains=trains))

    def is_same_result(self, result: Result, other: Result, tolerance: float | None = None) -> bool:
        """Return true if two results of :meth:`run` are equal.

        :param tolerance: as for :meth:`is_equal`.
        """
        (delta, inputs), (other_delta, other_inputs) = result, other
        pairs = zip((delta, *inputs), (other_delta, *other_inputs), strict=False)
        return len(inputs) == len(other_inputs) and all(self.is_equal(a, b, tolerance) for a, b in pairs)

    @property
    def returns_stream(self) -> bool:
        """True if the block returns the stream itself. False if it returns a change, or two tensors whose sum it is."""
        return not (self.call.returns_parts or self.call.returns_change)

    def parameters_as(self, dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
        """Return the values of this copy's parameters in these dtypes.

        A value in its own dtype is not copied. Parameters that are views of one memory remain views of one memory
        (:class:`olmo_lns.shadow.RandomWeights`).
        """
        memories: dict[Any, torch.Tensor] = {}
        values = []
        for own, dtype in zip(self.block.parameters(), dtypes, strict=True):
            value = own.data
            if value.dtype != dtype:
                key = value.untyped_storage().data_ptr(), dtype
                if key not in memories:
                    memories[key] = value.new_empty(0).set_(value.untyped_storage()).to(dtype)
                value = memories[key].as_strided(value.shape, value.stride(), value.storage_offset())
            values.append(value)
        return values

    def result_of(self, block: nn.Module, call: Call) -> Result | None:
        """Return what :meth:`result` returns in eval mode, but for another block and in the dtypes of that block.

        :param block: a block with the same structure, which has the result of :meth:`parameters_as` as its parameters.
            A copy of it is run.
        :param call: the call of the block.
        :returns: the result, or None if the copy does not run.
        """
        try:
            with code_of_the_block():
                copied = random_copy(block, weights_from=block, dtype=None)
            own = Replay(copied, call.detached(None), None)
            own.take_from(self)
            return own.run(self.x.to(call.stream.dtype), self.site_names)
        except (BlockFailed, NotPreLN):
            return None

    @contextmanager
    def parameters_in(self, block: nn.Module, values: Sequence[torch.Tensor]) -> Iterator[None]:
        """Give a block with the same structure the parameters of this copy, and open its gates, while the context runs.

        A gate is a buffer with the single value 0, which would hide its branch (:mod:`olmo_lns.probe.copies`).

        :param values: the result of :meth:`parameters_as`.
        """
        saved = [(parameter, parameter.data) for parameter in block.parameters()]
        gates = [(gate, gate.clone()) for gate in closed_gates(block)]
        try:
            for (parameter, _), value in zip(saved, values, strict=True):
                parameter.data = value
                increment_version(parameter)  # for caches that compare versions
            for gate, _ in gates:
                gate.fill_(1.0)
            yield
        finally:
            for parameter, data in saved:
                parameter.data = data
                increment_version(parameter)
            for gate, value in gates:
                gate.copy_(value)

    def computes_the_same_with_factor(self, earlier: Replay, factor: float) -> bool:
        """Return true if this block computes what an earlier one does, but multiplies its norms by ``factor`` itself.

        :param earlier: the replay of a block with the same structure.
        """
        self.frozen, self.x, self.site_names = earlier.frozen, earlier.x, earlier.site_names
        divided = {self.norms[name]: lambda y: y / factor for name in earlier.site_names if name in self.norms}
        with torch.no_grad():
            return self.is_equal(self.delta(divided), earlier.delta())

    # --- state of the copy ------------------------------------------------------------------------------------------

    @contextmanager
    def in_mode(self, trains: bool) -> Iterator[None]:
        """Switch training mode and gradients on or off while the context runs. Dropout always stays off."""
        in_eval, call, self._reference_delta = self._reference_delta, self.call, None
        set_training(self.block, trains)
        try:
            with torch.set_grad_enabled(trains):
                yield
        finally:
            self.block.eval()
            self.call, self._reference_delta = call, in_eval

    @contextmanager
    def with_neutral_vectors(self) -> Iterator[None]:
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

    # --- images, whose norms may read the dimensions of the stream in another order -----------------------------------

    def as_stream(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Bring the input or output of a norm into the shape of the stream."""
        order = self.layouts.get(name, tuple(range(self.x.dim())))
        inverse = sorted(range(len(order)), key=order.__getitem__)
        return value.reshape(self.x.permute(order).shape).permute(inverse)

    def as_norm_reads(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Bring a tensor of the stream's shape into the order of dimensions in which a norm reads the stream."""
        return value.permute(self.layouts.get(name, tuple(range(self.x.dim()))))


def double_and_roll(y: torch.Tensor) -> torch.Tensor:
    """Double a tensor, and shift its channels by one."""
    return 2.0 * y.roll(1, -1)


def raise_one_element(y: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor in which the middle element is greater by one."""
    raised = y.clone(memory_format=torch.contiguous_format)
    raised.view(-1)[y.numel() // 2] += 1.0
    return raised
