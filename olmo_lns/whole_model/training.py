"""Check that a model runs the same blocks and norms in training mode as in eval mode, in the same order on one stream.

If the model cannot run on the example in training mode, for instance because it then needs labels, this module checks
nothing. Some models write to their weights in a forward in training mode, for instance to update a teacher. This module
then stops the forward before the write, so that the weights stay as they are.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
from typing import Any, Callable, Iterable, Iterator, Sequence

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from olmo_lns import probe
from olmo_lns.errors import LNSConfigError
from olmo_lns.shadow import has_no_values
from olmo_lns.whole_model.confirmation import Confirmation
from olmo_lns.whole_model.further_blocks import functional_blocks, similar_modules
from olmo_lns.whole_model.names import norms_example
from olmo_lns.whole_model.stream import is_same, require_residual_stream, tolerance_of_proportion
from olmo_lns.whole_model.trace import Trace, replace_stream, trace_forward

log = logging.getLogger("olmo_lns")


def trace_in_training(
    model: nn.Module,
    run: Callable[[], Any],
    members: Iterable[nn.Module] = (),
    *,
    apart_from: Iterable[nn.Module] = (),
) -> Trace:
    """Run a model once in training mode, which must be set, and observe its modules.

    :param run: runs one forward of the model.
    :param members: the modules whose calls are kept.
    :param apart_from: modules that are not observed, and get no hook.
    :raises LNSConfigError: if the model cannot run in training mode on the example, for instance because it needs
        labels, or if it writes to its weights.
    """
    with _read_only(model):
        return trace_forward(model, run, members, apart_from=apart_from)


def require_same_in_training(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    norms: Iterable[nn.Module],
    trace: Trace,
    run: Callable[[], Any],
    in_training: Trace | None = None,
    confirmation: Confirmation | None = None,
    *,
    named_by_user: bool = False,
) -> None:
    """Check that a model runs the same blocks and norms in training mode, which must be set, as in eval mode.

    A model that cannot run in training mode on the example, for instance because it needs labels, is not checked.

    :param blocks: the blocks.
    :param norms: all norms that will be scaled.
    :param trace: the forward in eval mode.
    :param run: runs one forward of the model.
    :param in_training: the result of :func:`trace_in_training`, if there is one already.
    :param confirmation: how the blocks ran while they were confirmed in training mode, if they were.
    :param named_by_user: true if the user passed the blocks. In training mode further blocks may then run, and norms
        may run several times.
    :raises LNSConfigError: if further blocks run in training mode, if a norm runs several times, if the blocks run in
        another order, or if the stream is normalized between them. The message names the blocks or norms.
    """
    names, norms = {module: name for name, module in model.named_modules()}, list(norms)
    numbers = {block: number for number, block in enumerate(blocks, start=1)}

    def problems(observed: Trace) -> tuple[list[str], list[str]]:
        """Return the names of norms that run several times, and of further blocks."""
        if named_by_user:
            return [], []
        widths = {trace.shapes[norm][-1] for norm in norms if norm in trace.shapes}
        similar = similar_modules(model, blocks, observed, widths, run)
        similar |= functional_blocks(model, blocks, observed, widths, run)
        counts = observed.runs if confirmation is None or observed is not in_training else confirmation.norm_runs
        again = [names[norm] for norm in norms if counts.get(norm, 0) > 1]
        return again, [n for n, module in similar.items() if not any(part in trace.runs for part in module.modules())]

    try:
        observed = in_training or trace_in_training(model, run, blocks)
        again, added = problems(observed)
        if (again or added) and in_training is not None:  # random numbers in the stream may have caused them
            again, added = problems(trace_in_training(model, run, blocks))
        order, changed = (confirmation.order, confirmation.changed) if confirmation else _flow(blocks, trace, observed)
        nonlinear = [
            (before, block)
            for before, block in changed
            if (call := trace.calls[block]) is not None
            and (numbers[block] != numbers[before] + 1 or is_same(trace.outputs[before], call.stream))  # in eval mode
            and not _keeps_proportion(before, block, call, model, run)
        ]
    except LNSConfigError as error:  # it needs labels, or writes to its weights
        log.info("%s: the whole model was not checked in training mode: %s", type(model).__name__, error)
        return
    if again or added:
        raise LNSConfigError(
            f"{type(model).__name__}: in training mode its forward runs {', '.join(again or added)} "
            f"{'several times' if again else 'too. They look like blocks, and they do not run in eval mode'}. Expected "
            "the same blocks in both modes, each of them once. If the numbers of the blocks are right, pass "
            "blocks=model.layers, or an example= that runs them once, such as example=lambda model: "
            "model.encoder(ids)."
        )
    if (ran := [numbers[block] for block in order]) != sorted(ran):
        raise LNSConfigError(
            f"{type(model).__name__}: in training mode its blocks run in the order {', '.join(map(str, ran))}. "
            "Expected the order of eval mode, because the factor of a block depends on its number in the depth. This "
            "model is not supported."
        )
    for before, block in nonlinear:
        raise LNSConfigError(
            f"{type(model).__name__}: in training mode the model changes its stream between the blocks "
            f"{numbers[before]} and {numbers[block]} by something else than an addition or dropout, for example by a "
            "norm. LayerNorm Scaling expects a residual stream that goes through all blocks. If you want the factors "
            f"in this model anyway, pass its norms: {norms_example(model, trace)}."
        )


class _DoesNotRun(Exception):
    """The model does not run in training mode on the example."""


def require_stream_in_training(
    model: nn.Module, blocks: Sequence[nn.Module], norms: Iterable[nn.Module], trace: Trace, run: Callable[[], Any]
) -> None:
    """Check in training mode, which must be set, that the blocks read the stream through these norms only.

    A model that cannot run in training mode on the example is not checked.

    :param trace: the forward in eval mode.
    :param run: runs one forward of the model.
    :raises LNSConfigError: if a block reads the stream past its norms. The message names the block.
    """

    def run_once() -> None:
        try:
            with _read_only(model):
                run()
        except LNSConfigError as error:  # it needs labels, or writes to its weights
            raise _DoesNotRun from error

    try:
        require_residual_stream(model, blocks, norms, trace, run_once, in_training=True)
    except _DoesNotRun as error:
        log.info("%s: its stream was not checked in training mode: %s", type(model).__name__, error.__cause__)


def _flow(
    blocks: Sequence[nn.Module], trace: Trace, observed: Trace
) -> tuple[list[nn.Module], list[tuple[nn.Module, nn.Module]]]:
    """Return the blocks in the order in which they ran, and the pairs between which their stream was changed.

    :param trace: the forward in eval mode, which shows the place of each stream among the arguments.
    :param observed: the forward whose blocks are returned, with their calls.
    """
    order, changed = [module for module in observed.runs if module in set(blocks)], []
    for before, block in itertools.pairwise(order):
        call, in_eval, output = observed.calls.get(block), trace.calls[block], observed.outputs.get(before)
        if call is None or in_eval is None or output is None or in_eval.returns_change:
            continue
        if not is_same(output, in_eval.stream_among(call.args, call.kwargs)):
            changed.append((before, block))
    return order, changed


def _keeps_proportion(
    before: nn.Module, block: nn.Module, call: probe.Call, model: nn.Module, run: Callable[[], Any]
) -> bool:
    """Return true if a change of what one block returns arrives at the next one in proportion to its size.

    The function adds noise to the output of the first block, once and once of double size. If the model applies dropout
    or an addition between the blocks, twice the noise moves the second block's stream twice as far. If the model
    applies a norm, it does not.

    The result is also true if the second block reads the very tensor that the first block returned. The caller saw a
    difference between the two in the confirmation, which adds large random numbers to the stream. In a forward without
    these numbers there is none.

    :param call: a call of the second block.
    """

    returned: list[torch.Tensor] = []

    def stream(size: float) -> torch.Tensor | None:
        found: list[torch.Tensor] = []

        def leave(module: nn.Module, args: Any, output: Any) -> Any:
            if (y := probe.stream_of(output)) is None:
                return output
            returned.append(y.detach().clone())
            noise = torch.randn(y.shape, generator=torch.Generator().manual_seed(9), device="cpu").to(y)
            return replace_stream(output, y + size * y.std() * noise)

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            found.append(call.stream_among(args, kwargs).detach())

        handles = [before.register_forward_hook(leave), block.register_forward_pre_hook(enter, with_kwargs=True)]
        with probe.hooks(handles), _read_only(model), torch.no_grad():
            run()
        return found[0] if found else None

    still = stream(0.0)
    if still is None or not returned or is_same(returned[0], still):
        return True
    once, twice = stream(1.0), stream(2.0)
    if once is None or twice is None or not still.shape == once.shape == twice.shape:
        return True
    tolerance = tolerance_of_proportion(call.stream.dtype)
    still, once, twice = still.double(), once.double(), twice.double()
    return float((twice - 2 * once + still).norm()) <= tolerance * float((twice - still).norm())


@contextlib.contextmanager
def _read_only(model: nn.Module) -> Iterator[None]:
    """Raise a RuntimeError before an operation writes to a parameter.

    Some models do this in a forward in training mode, for example to update the weights of a teacher.
    """
    saved = [(parameter, parameter.data) for parameter in model.parameters()]
    memory = {parameter.untyped_storage().data_ptr() for parameter, _ in saved if not has_no_values(parameter)}
    try:
        with _NoWrites(memory):
            yield
    finally:
        for parameter, data in saved:
            if parameter.data_ptr() != data.data_ptr():
                parameter.data = data


class _NoWrites(TorchDispatchMode):
    """Raise before an operation writes to one of these storages."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return false. Otherwise the first operation imports torch's compiler, which takes some three seconds.

        The method has the name that torch 2.13 calls. If another version of torch does not call it, the only loss is
        these three seconds.
        """
        return False

    def __init__(self, memory: set[int]) -> None:
        super().__init__()
        self.memory = memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for place, name in _written_arguments(func):
            for leaf in tree_leaves((args[place] if place < len(args) else None, kwargs.get(name))):
                if (
                    torch.is_tensor(leaf)
                    and leaf.layout == torch.strided
                    and leaf.untyped_storage().data_ptr() in self.memory
                ):
                    raise RuntimeError("a forward writes to a parameter")
        return func(*args, **kwargs)


@functools.cache  # reading a schema takes longer than a small operation
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """Return the places and the names of the arguments to which an operation writes."""
    arguments = enumerate(func._schema.arguments) if func._schema.is_mutable else ()
    return tuple((i, each.name) for i, each in arguments if each.alias_info is not None and each.alias_info.is_write)
