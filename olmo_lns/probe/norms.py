"""Find the norms of a block, and how each of them reads the stream.

:func:`find_norms` does this in two steps:

* First it runs the block once, and tests each module that may be a norm by what the module computes
  (:mod:`olmo_lns.probe.recognize`). If a norm contains another norm, only the outer one counts.
* Then it freezes all norms that it found, and runs the block on two streams x and x'. The inputs of ``norm1`` and
  ``norm2`` of the example in :mod:`olmo_lns.probe` then differ by exactly ``x - x'``. If ``attn`` also normalizes its
  queries, the input of that norm does not differ at all, so it is not a norm of the stream.

If a block of a vision model reads images with their channels first, the inputs of its norm differ by ``x - x'`` with
its dimensions in another order. The second step therefore tries all orders, and stores the one that fits.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import nn

from olmo_lns.probe.call import NotPreLN, code_of_the_block, hooks
from olmo_lns.probe.recognize import has_vectors_only, is_leaf, is_norm, norm_input
from olmo_lns.probe.replay import Hook, Replay
from olmo_lns.response import first_output


def find_norms(replay: Replay) -> None:
    """Find the norms of a block, and store them with their frozen outputs and shapes in ``replay``.

    :raises NotPreLN: if a norm of the stream runs several times.
    :raises BlockFailed: if the block raises.
    """
    calls_by_name: dict[str, list[tuple[Any, Any, Any]]] = {}
    leaves = {
        name: module
        for name, module in replay.block.named_modules()
        if name and (is_leaf(module) or module._parameters) and "parametrizations" not in name
    }

    def note(name: str) -> Hook:
        return lambda _, args, kwargs, output: calls_by_name.setdefault(name, []).append((args, kwargs, output))

    with hooks(module.register_forward_hook(note(name), with_kwargs=True) for name, module in leaves.items()):
        replay.forward()
    for name, norm_calls in calls_by_name.items():
        args, kwargs, output = norm_calls[0]
        y = first_output(output)
        if not torch.is_tensor(y) or not torch.is_tensor(norm_input(args, kwargs)) or not y.dim():
            continue
        if not _has_gains_only(leaves[name], norm_input(args, kwargs)):
            continue
        with code_of_the_block():
            ignores_size = is_norm(leaves[name], args, kwargs)
        if not ignores_size:
            continue
        replay.shapes[name] = tuple(norm_input(args, kwargs).shape)
        if y.numel() == replay.x.numel():
            if len(norm_calls) > 1 and y.shape[-1] == replay.x.shape[-1]:
                raise NotPreLN(f"its norm {name} ran {len(norm_calls)} times in one forward. Expected once")
            replay.norms[name] = leaves[name]
        if len(norm_calls) == 1:
            replay.all_norms[name], replay.frozen[name] = leaves[name], replay.draw(y)
    # A norm may contain another norm, to whose output it applies its own gain or bias. Only the outer one counts.
    for inner in [name for name in calls_by_name if any(name.startswith(f"{outer}.") for outer in replay.all_norms)]:
        for found in (replay.norms, replay.all_norms, replay.frozen):
            found.pop(inner, None)
    for name in [name for name in replay.norms if name not in replay.all_norms]:  # ran several times
        del replay.norms[name]
    _find_layouts(replay)


def _has_gains_only(module: nn.Module, x: torch.Tensor) -> bool:
    """Return true if the weights of a module are vectors, or fit the last dimensions of its input one to one.

    The weights of ``LayerNorm((tokens, channels))`` fit the last two dimensions of its input. A gain of the shape
    (heads, size of a head) fits the last dimension of an input whose width is heads times size of a head.
    """

    def fits(shape: torch.Size) -> bool:
        last = x.shape[-len(shape) :]
        fits_last = len(shape) < x.dim() and all(size in (1, other) for size, other in zip(shape, last, strict=True))
        return fits_last or math.prod(shape) == x.shape[-1]

    return has_vectors_only(module) or all(fits(parameter.shape) for parameter in module.parameters())


def _find_layouts(replay: Replay) -> None:
    """Find in which order of dimensions each norm reads the stream.

    If the input of a norm does not differ by ``x - x'`` in any order of dimensions, the norm is inside of a branch. The
    function then removes it from ``replay.norms``, unless its input has the size and the width of the stream. In that
    case, :mod:`olmo_lns.probe.search` decides later whether the norm is a site.
    """
    x, names = replay.x, [*replay.norms]
    usual = tuple(range(x.dim()))
    replay.layouts = dict.fromkeys(names, usual)
    if len(set(x.shape)) == x.dim() and all(replay.shapes[name] == tuple(x.shape) for name in names):
        return  # in any other order of its dimensions, the stream would have another shape
    inputs = [replay.inputs_of(names, frozen=names, x=stream) for stream in (x, replay.second_input)]
    moved = (x - replay.second_input).double()
    orders = [usual, *(order for order in itertools.permutations(usual) if order != usual)]
    for name in names:
        if not all(name in each for each in inputs) or inputs[0][name].shape != inputs[1][name].shape:
            continue
        found = inputs[0][name] - inputs[1][name]
        found = found if found.shape == x.shape else found.flatten()
        for order in orders if x.dim() < 6 else [usual]:
            expected = moved.permute(order)
            if found.dim() > 1 and expected.shape != found.shape:
                continue
            if replay.is_equal(found.flatten(), expected.flatten()):
                replay.layouts[name] = order
                break
        else:
            if replay.shapes[name][-1] != x.shape[-1] or found.numel() != x.numel():
                del replay.norms[name]
