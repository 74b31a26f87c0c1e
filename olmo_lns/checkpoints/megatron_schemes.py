"""Megatron's schemes of the residual addition: where their parameters lie."""

from __future__ import annotations

import re
from typing import Any, Callable, Iterator

from olmo_lns.checkpoints.tensors import LazyTensor
from olmo_lns.integrations.megatron.addition import SLOTS
from olmo_lns.schemes import SUB_LAYERS, Scheme

__all__ = ["OWN", "Take", "own_weights"]

#: A parameter of a residual addition; a stock model has none.
OWN = re.compile(rf"decoder\.layers\.(?:\d+\.)?(?:{'|'.join(SLOTS.values())})\.")
#: (name with all layers stacked, 0-based layer) -> its tensor.
Take = Callable[[str, int], LazyTensor]


def own_weights(scheme: Scheme, n_layers: int, take: Take, gain: Take, parts: tuple[str, ...]) -> Iterator[Any]:
    """``(OLMo's name, tensor)`` of what the scheme adds to the weights of a Pre-LN model.

    :param gain: as ``take``, for gains that may be stored minus one. :param parts: of a norm.
    """
    for index in range(n_layers):
        for sub_layer in SUB_LAYERS:
            ours, theirs = f"transformer.blocks.{index}.{sub_layer}", f"decoder.layers.{SLOTS[sub_layer]}"
            plan = scheme.plan(index + 1, n_layers, sub_layer)
            if plan.gate is not None:
                yield f"{ours}_gate.weight", take(f"{theirs}.gate", index)
            for part in parts if plan.branch else ():
                yield f"{ours}_norm_out.{part}", (gain if part == "weight" else take)(f"{theirs}.norm.{part}", index)
