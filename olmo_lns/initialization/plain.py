"""Remove the depth factor of scaled initialization from the weights of a model."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import nn

from olmo_lns.errors import LNSConfigError
from olmo_lns.initialization.marks import marked_matrices
from olmo_lns.initialization.rule import MEASURABLE, Initialization, measure, spread, without_depth_factor
from olmo_lns.initialization.trained import why_trained
from olmo_lns.schemes.depth_factor import INVERSE_AS_TEXT


def make_plain(model: nn.Module, found: Initialization | None = None) -> str:
    """Recognize the rule of the initialization, and divide the matrices by its depth factor to remove it.

    Each process changes only the weights that it has. Weights on the meta device are left unchanged.

    :param found: the initialization, if it has been measured already. By default it is measured, in all processes.
    :returns: a line that describes the change, with the standard deviations before and after.
    :raises LNSConfigError: if the weights are trained, none can be measured, or they follow no known rule. Nothing is
        changed then.
    """
    if any(hasattr(p, "_z3_optimizer") or getattr(p, "_hp_mapping", None) is not None for p in model.parameters()):
        raise LNSConfigError(
            f"{type(model).__name__}: DeepSpeed's optimizer has copies of its weights, which would undo the change. "
            "plain_initialization expects a model before deepspeed.initialize. Call it earlier."
        )
    found = measure(model, merge=True) if found is None else found
    norms: dict[str, list[nn.Module]] = defaultdict(list)
    for module in model.modules():
        if "lns_norm" in vars(module):
            norms[vars(module)["lns_norm"]].append(module)
    if part := why_trained(norms, [(matrix.name, parameter) for matrix, parameter in marked_matrices(model)]):
        raise LNSConfigError(
            f"{type(model).__name__}: {part}, so the model was trained before. plain_initialization expects weights "
            "that have just been drawn. Build a new model. If this one is new, its own initialization did not reset "
            "the scaled norms. The class of a scaled norm is a subclass of the norm's class, so compare with "
            "isinstance(module, …) there."
        )
    if found.rule is None:
        raise LNSConfigError(
            f"{type(model).__name__}: no residual output projection could be measured. Expected matrices of at least "
            f"{MEASURABLE} elements that are drawn and not on the meta device. Initialize the weights first, then "
            "call plain_initialization(model) again."
        )
    if not found.rule:
        raise LNSConfigError(
            f"{type(model).__name__}: the standard deviations of the residual output projections ({found.values}) "
            "follow no rule that olmo-lns knows. Expected weights that have just been drawn, with the factor "
            "1/sqrt(2L), 1/sqrt(2l) or none. Draw these weights as you want them. A scheme does not need "
            "plain_initialization."
        )
    if found.rule == "plain":
        return "plain initialization: scaled initialization was off, nothing changed"
    # A factor that changes from block to block is a depth factor in any matrix. A constant factor of a matrix that does
    # not end a branch may be a choice of the user, so it is kept.
    changed = found.scaled if found.rule == "depth_scaled" else {matrix.name for matrix in found.projections}
    done: dict[Any, torch.Tensor] = {}  # a weight may be tied to another block's
    for matrix, parameter in marked_matrices(model):
        if matrix.name in changed and (memory := _memory(parameter)) not in done:
            done[memory] = parameter  # keeps it alive, so that no other tensor gets its address
            _multiply(parameter, without_depth_factor(matrix, found.rule))
    before = {matrix: std for matrix, std in found.stds.items() if matrix.name in changed}
    after = {matrix: std * without_depth_factor(matrix, found.rule) for matrix, std in before.items()}
    line = f"plain initialization: {spread(before)} -> {spread(after)} (times {INVERSE_AS_TEXT[found.rule]})"
    kept = {matrix: std for matrix, std in found.stds.items() if matrix.name in found.scaled - changed}
    return f"{line}; unchanged, since it does not end a branch: {spread(kept)}" if kept else line


def _memory(parameter: torch.Tensor) -> Any:
    """Return a key that is equal for two parameters if they are the same, or have their values in the same memory."""
    values = getattr(parameter, "ds_tensor", getattr(parameter, "_local_tensor", parameter))
    return id(parameter) if values.is_meta or not values.numel() else (values.data_ptr(), values.numel())


def _multiply(parameter: torch.Tensor, factor: float) -> None:
    with torch.no_grad():
        for tensor in (parameter, getattr(parameter, "ds_tensor", None)):
            if tensor is not None and not tensor.is_meta and (tensor.numel() or hasattr(tensor, "placements")):
                tensor.mul_(factor)
