"""Megatron's schemes of the residual addition: constants and gates folded away.

``x + c * g * f(N(x))`` is Pre-LN with c * g in the rows of ``linear_proj`` and ``linear_fc2``.
"""

from __future__ import annotations

import re
from typing import Sequence

import torch

from olmo_lns.checkpoints.megatron_schemes import Take
from olmo_lns.checkpoints.tensors import ChunkFunction
from olmo_lns.errors import LNSConfigError
from olmo_lns.export.fold import Rounding
from olmo_lns.integrations.megatron.addition import SLOTS
from olmo_lns.schemes import Scheme

__all__ = ["branch_functions"]

_OUTPUT = re.compile(
    r"decoder\.layers\.(?:(?P<layer>\d+)\.)?(?P<holder>self_attention\.linear_proj|mlp\.linear_fc2)\.(?:weight|bias)$"
)


def branch_functions(
    scheme: Scheme, n_layers: int, tensors: Sequence[str], take: Take, rounding: Rounding
) -> dict[str, ChunkFunction]:
    """Name of each output projection -> what multiplies the rows of its chunks.

    :param tensors: names of the checkpoint. :raises LNSConfigError: the branch of an MLP has several last matrices.
    """
    found = {name: match for name in tensors if (match := _OUTPUT.match(name))}
    if not any("linear_fc2" in name for name in found) or any(".experts." in name for name in tensors):
        raise LNSConfigError(
            f"{scheme.definition.title} ({scheme}) is not folded into a mixture of experts, whose branch is a sum of "
            "several matrices: it runs in Megatron with olmo-lns"
        )

    def factor(index: int, sub_layer: str) -> float | torch.Tensor:
        plan = scheme.plan(index + 1, n_layers, sub_layer)
        if plan.gate is None:
            return plan.branch_scale
        return take(f"decoder.layers.{SLOTS[sub_layer]}.gate", index).load().double() * plan.branch_scale

    def function(name: str, match: re.Match[str]) -> ChunkFunction:
        sub_layer = "attn" if match["holder"].startswith("self_attention") else "ff"
        number = match["layer"]

        def of_layer(index: int, start: int, rows: torch.Tensor) -> torch.Tensor:
            value = factor(index, sub_layer)
            if not isinstance(value, float):
                value = value.expand(len(rows)) if len(value) == 1 else value[start : start + len(rows)]
            return rounding.scale(name, rows, value, rows.dtype)

        def scale(_: str, offsets: tuple[int, ...], chunk: torch.Tensor) -> torch.Tensor:
            if number is not None:
                return of_layer(int(number), offsets[0], chunk)
            return torch.stack([of_layer(offsets[0] + i, offsets[1], rows) for i, rows in enumerate(chunk)])

        return scale

    return {name: function(name, match) for name, match in found.items()}
