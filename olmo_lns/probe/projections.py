"""Find the residual output projections of a block, and notice whether one of them may be missed.

The residual output projections of ``x + attn.out(…)`` and ``x + mlp.down(…)`` are ``attn.out.weight`` and
``mlp.down.weight``. They can only be found if they are parameters of the block. Some models keep such a matrix in
another module, or pass it to the block as an argument. To notice this, the search sets all projections that it found to
zero. If the output of a site still has an effect on the stream, its branch ends in a matrix that was not found.
"""

from __future__ import annotations

from typing import Mapping, Sequence

import torch
from torch import nn

from olmo_lns.initialization import residual_projections
from olmo_lns.probe.call import Call
from olmo_lns.probe.replay import Replay, double_and_roll


def find_projections(replay: Replay, call: Call) -> Mapping[str, int]:
    """Return the residual output projections of a block whose sites are found.

    The result is empty if a branch ends in a matrix that is not a parameter of the block, since the result would
    then be incomplete.

    :param call: the call as the model made it. Its arguments show whether the model passes parameters to the block.
    :returns: the result of :func:`olmo_lns.initialization.residual_projections`.
    """
    found = residual_projections(replay.block, replay.delta, replay.tolerance, replay.reference_delta)
    parameters = dict(replay.block.named_parameters())
    matrices = [parameter for parameter in parameters.values() if parameter.numel() > max(parameter.shape, default=1)]
    remain = _have_effect_without(replay, replay.site_names, [parameters[name] for name in found])
    if not any(remain):
        return found
    given = any(isinstance(tensor._base if tensor._is_view() else tensor, nn.Parameter) for tensor in call.tensors())
    # A branch without matrices, such as pooling, has no projection that could be missed.
    left = [name for name, has_effect in zip(replay.site_names, remain, strict=True) if has_effect]
    return {} if given or not all(_have_effect_without(replay, left, matrices)) else found


def _have_effect_without(replay: Replay, names: Sequence[str], parameters: Sequence[nn.Parameter]) -> list[bool]:
    """Return for each of these sites whether its output has an effect on the stream while these parameters are zero."""
    saved = [parameter.data for parameter in parameters]
    for parameter in parameters:
        parameter.data = torch.zeros_like(parameter)
    try:
        delta = replay.delta()
        effects = [replay.delta({replay.norms[name]: double_and_roll}) - delta for name in names]
    finally:
        for parameter, data in zip(parameters, saved, strict=True):
            parameter.data = data
    smallest = replay.tolerance * float(replay.reference_delta.norm())
    return [float(effect.norm()) > smallest for effect in effects]
