"""Check that a model runs the same blocks and norms in training mode as in eval mode.

The example may fail in training mode, for instance because the model then needs labels. The model is not checked in
this case. Some models write to their weights in such a forward, which is prevented.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from typing import Any, Callable, Iterable, Iterator, Sequence

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from olmo_lns.errors import LNSConfigError
from olmo_lns.shadow import has_no_values
from olmo_lns.whole_model.depth import functional_blocks, similar_modules
from olmo_lns.whole_model.trace import Trace, trace_forward

log = logging.getLogger("olmo_lns")


def trace_in_training(model: nn.Module, run: Callable[[], Any]) -> Trace:
    """Run a model once in training mode, which must be set, and observe its modules.

    :param run: runs one forward of the model.
    :raises LNSConfigError: if the model cannot run in training mode on the example, for instance because it needs
        labels, or if it writes to its weights.
    """
    with _read_only(model):
        return trace_forward(model, run, ())


def require_same_in_training(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    norms: Iterable[nn.Module],
    trace: Trace,
    run: Callable[[], Any],
    in_training: Trace | None = None,
) -> None:
    """Check that a model runs the same blocks and norms in training mode as in eval mode.

    A model that cannot run in training mode on the example, for instance because it needs labels, is not checked.

    :param blocks: the blocks, or the norms that the user passed if no module runs a block.
    :param norms: all norms that will be scaled.
    :param trace: the forward in eval mode.
    :param run: runs one forward of the model in training mode.
    :param in_training: the result of :func:`trace_in_training`, if there is one already.
    :raises LNSConfigError: if further blocks run in training mode, or a norm runs several times. The message names
        them.
    """
    names, norms = {module: name for name, module in model.named_modules()}, list(norms)
    widths = {trace.shapes[norm][-1] for norm in norms if norm in trace.shapes}
    try:
        in_training = in_training or trace_in_training(model, run)
        similar = similar_modules(model, blocks, in_training, widths, run)
        similar |= functional_blocks(model, blocks, in_training, widths, run)
    except LNSConfigError as error:  # it needs labels, or writes to its weights
        log.info("%s: the whole model was not checked in training mode: %s", type(model).__name__, error)
        return
    again = [names[norm] for norm in norms if in_training.runs.get(norm, 0) > 1]
    added = [name for name, module in similar.items() if not any(part in trace.runs for part in module.modules())]
    if again or added:
        raise LNSConfigError(
            f"{type(model).__name__}: in training mode its forward runs {', '.join(again or added)} "
            f"{'several times' if again else 'too. They look like blocks, and they do not run in eval mode'}. Expected "
            "the same blocks in both modes, each of them once. If the numbers of the blocks are right, pass "
            "blocks=model.layers, or an example= that runs them once, such as example=lambda model: "
            "model.encoder(ids)."
        )


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
