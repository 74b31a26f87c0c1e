"""Which schemes fold into a stock Pre-LN model, and into what: constants and gates into the rows of two matrices.

``x + g * c * f(s * N(x))`` is Pre-LN once s is in the norm's gain (as for LayerNorm Scaling) and
g * c in the rows of ``attn_out`` or ``ff_out``, g a learned gate and c a constant.
"""

from __future__ import annotations

from typing import Mapping

import torch

from olmo_lns.checkpoints.architecture import Architecture
from olmo_lns.checkpoints.tensors import LazyTensor
from olmo_lns.schemes import SUB_LAYERS, Plan, Scheme

__all__ = ["OUTPUTS", "factors", "gates", "obstacle"]

#: Sub-layer -> the matrix whose rows are its outputs.
OUTPUTS = {"attn": "attn_out", "ff": "ff_out"}


def obstacle(scheme: Scheme, n_layers: int) -> str:
    """Why the scheme does not fold into stock Pre-LN, ``""`` if it does."""
    found = [_obstacle(plan) for _, _, plan in scheme.plans(n_layers)]
    return next((problem for problem in found if problem), "")


def _obstacle(plan: Plan) -> str:
    if plan.post:
        return "its norms sit on the sums, and no weight of a Pre-LN block can undo a norm"
    if plan.branch:
        return "it normalises the branches, which a Pre-LN block does not"
    if plan.groups != 1:
        return "its norms take statistics over groups of channels"
    if plan.pre_scale != 1.0 or plan.stream_scale != 1.0:
        return "it equals Pre-LN only up to the eps of the norms"
    return "" if plan.folds_into_pre_ln else "it weighs the shortcut, which a Pre-LN block does not"


def gates(model: Architecture) -> list[str]:
    """Names of the learned gates: a stock model has none of them."""
    names = [f"transformer.blocks.{i}.{sub_layer}_gate.weight" for i in range(model.n_layers) for sub_layer in OUTPUTS]
    return [name for name in names if name in model.shapes()]


def factors(model: Architecture, scheme: Scheme, tensors: Mapping[str, LazyTensor]) -> dict[str, float | torch.Tensor]:
    """Parameter -> what it is multiplied by: a number, or fp64 (rows,), one for each row.

    :param scheme: one without :func:`obstacle`. :param tensors: OLMo's names, block groups flattened.
    """
    found: dict[str, float | torch.Tensor] = {}
    for index in range(model.n_layers):
        block = f"transformer.blocks.{index}"
        for sub_layer in SUB_LAYERS:
            plan = scheme.plan(index + 1, model.n_layers, sub_layer)
            factor: float | torch.Tensor = plan.branch_scale
            if plan.gate is not None:
                factor = tensors[f"{block}.{sub_layer}_gate.weight"].load().double() * factor
                factor = factor.expand(model.d_model)
            for kind in ("weight", "bias") if model.include_bias else ("weight",):
                found[f"{block}.{OUTPUTS[sub_layer]}.{kind}"] = factor
            if plan.norm_scale != 1.0:
                found.update(dict.fromkeys(model.sites_of(index, sub_layer), plan.norm_scale))
    return found
