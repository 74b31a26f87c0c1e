"""Run a model once and observe its modules.

A :class:`Trace` says which modules ran, how often and in which order. It keeps the calls of the modules that may be
blocks, and the shapes of the inputs of all layers:

.. code-block:: python

    trace = trace_forward(model, lambda: model(ids), members=model.h)
    trace.runs[model.h[0]]  # 1: the first block ran once
    trace.calls[model.h[0]].stream  # the tensor that it received
    trace.shapes[model.h[0].norm1]  # the shape that this norm read

The other modules of this package decide what these observations mean.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any, Callable, Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.utils._pytree import tree_map

from olmo_lns import probe
from olmo_lns.response import replace_first


@dataclass
class Trace:
    """The observations of one forward of a model.

    :param runs: module -> how often it ran, in the order in which the modules finished their first run.
    :param calls: module -> its last call, or None if it did not return a stream.
    :param outputs: module with a call -> the stream that it returned.
    :param shapes: module without children that have weights -> the shape of its input.
    :param norm_calls: module that may be a norm -> the arguments of its first call. Its input is replaced by a tensor
        of the same shape that takes no memory.
    :param widths: module whose output has the shape of its input -> the last dimension of this shape in its last call.
    """

    runs: dict[nn.Module, int] = field(default_factory=dict)
    calls: dict[nn.Module, probe.Call | None] = field(default_factory=dict)
    outputs: dict[nn.Module, torch.Tensor] = field(default_factory=dict)
    shapes: dict[nn.Module, tuple[int, ...]] = field(default_factory=dict)
    widths: dict[nn.Module, int] = field(default_factory=dict)

    norm_calls: dict[nn.Module, tuple[Any, Any]] = field(default_factory=dict)
    _is_norm: dict[nn.Module, bool] = field(default_factory=dict)

    def is_norm(self, module: nn.Module) -> bool:
        """Return true if a module is a norm, judged by the name of its class, or else by what it computed."""
        if module not in self._is_norm:
            found = probe.looks_like_norm(module)
            if not found and module in self.norm_calls:
                with contextlib.suppress(Exception):
                    found = probe.is_norm(module, *self.norm_calls[module])
            self._is_norm[module] = found
        return self._is_norm[module]

    def norm_count(self, module: nn.Module) -> int:
        """Return the number of norms in a module. A norm inside of another norm is not counted."""
        norms = [part for part in module.modules() if self.is_norm(part)]
        return len(norms) - sum(inner in norms for norm in norms for inner in norm.modules() if inner is not norm)

    def ran_once(self, module: nn.Module) -> bool:
        """Return true for a module that ran exactly once, and returned a stream in the shape of its input."""
        return self.runs.get(module) == 1 and self.calls.get(module) is not None

    def is_stack(self, listed: Sequence[nn.Module]) -> bool:
        """Return true if each module ran once, in this order, and returned a stream in the shape of its input."""
        members = set(listed)
        in_order = [module for module in self.runs if module in members] == list(listed)
        return in_order and len(members) == len(listed) and all(map(self.ran_once, listed))


def trace_forward(
    model: nn.Module,
    run: Callable[[], Any],
    members: Iterable[nn.Module],
    *,
    apart_from: Iterable[nn.Module] = (),
    is_repeated: bool = False,
) -> Trace:
    """Run the model once and observe its modules.

    :param run: runs one forward of the model.
    :param members: the modules whose calls are kept.
    :param apart_from: modules that are not observed, and get no hook.
    :param is_repeated: true for a second run, after the first one has built further modules.
    """
    trace, members, apart_from = Trace(), set(members), set(apart_from)

    def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        trace.runs[module] = trace.runs.get(module, 0) + 1
        call, stream = call_of(args, kwargs, output), probe.stream_of(output)
        if call is not None and stream is not None:
            trace.widths[module] = call.stream.shape[-1]
        if module in members:
            trace.calls[module] = call
            if call is not None and stream is not None:
                trace.outputs[module] = stream
        value = next(iter((*args, *kwargs.values())), None)
        if torch.is_tensor(value) and (probe.is_leaf(module) or module._parameters):
            trace.shapes[module] = tuple(value.shape)
            may_be = value.is_floating_point() and value.dim() > 1 and probe.has_vectors_only(module)
            if may_be and module not in trace.norm_calls and (call is not None or torch.is_tensor(stream)):
                trace.norm_calls[module] = tree_map(
                    lambda leaf: leaf if leaf is not value else _empty(leaf), (args, dict(kwargs))
                )

    watched = [
        module
        for module in dict.fromkeys([*model.modules(), *members])
        if not isinstance(module, torch.jit.ScriptModule) and module not in apart_from
    ]
    with probe.hooks(module.register_forward_hook(note, with_kwargs=True) for module in watched), torch.no_grad():
        run()
    if set(model.modules()) - {*watched, *apart_from} - _scripted(model) and not is_repeated:  # it built modules
        return trace_forward(model, run, members, apart_from=apart_from, is_repeated=True)
    return trace


def _scripted(model: nn.Module) -> set[nn.Module]:
    return {module for module in model.modules() if isinstance(module, torch.jit.ScriptModule)}


def _empty(like: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the same shape, dtype and device whose elements share one memory cell."""
    return like.new_zeros(1).expand(like.shape)


def call_of(args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> probe.Call | None:
    """Return the call of a module, or None if the module did not return a stream.

    The stream is the first floating argument that has two dimensions or more and the shape of the output.
    """
    arguments: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    stream = probe.stream_of(output)
    for key, value in arguments:
        is_matrix = torch.is_tensor(value) and value.is_floating_point() and value.dim() >= 2
        if is_matrix and stream is not None and stream.shape == value.shape:
            return probe.Call(tuple(args), dict(kwargs), key)
    return None


def replace_stream(output: Any, value: torch.Tensor) -> Any:
    """Return a block's output with ``value`` as its stream.

    The stream is the output itself, the first element of a tuple or list, or the field ``last_hidden_state``.
    """
    if hasattr(output, "last_hidden_state"):
        return type(output)(**{**dict(output), "last_hidden_state": value})
    return replace_first(output, value)
