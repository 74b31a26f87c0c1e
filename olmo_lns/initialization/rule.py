"""Measure the recorded matrices, and recognize the rule by which they were initialized.

Scaled initialization draws the residual output projections smaller than all other matrices: with the standard deviation
std/sqrt(2L) in a model of L blocks, or std/sqrt(2l) in block l.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from olmo_lns.initialization.marks import Matrix, full_shape, marked_matrices
from olmo_lns.schemes.depth_factor import KNOWN_INITIALIZATIONS, inverse_depth_factor

#: Matrices with fewer elements are not measured, since their standard deviation would be too uncertain.
MEASURABLE = 1000
#: Two standard deviations are equal if their ratio differs from 1 by less than this. A matrix of :data:`MEASURABLE`
#: elements is measured to 2 %, and the smallest depth factor, in a model of one block, is 1.41.
_TOLERANCE = 0.1
#: A depth factor makes some projection of a model with several blocks at most half as large as other matrices. If the
#: smallest is larger than this, there is none.
_NO_DEPTH_FACTOR = 0.75
#: Matrices whose standard deviations differ by at most this factor were drawn with one. Random sampling changes them
#: at most 1.15-fold, a depth factor that changes from block to block at least 1.41-fold.
_ONE_DEVIATION = 1.25
#: The usual rules for the sizes of matrices. The variance of a matrix is constant, or inversely proportional to its
#: fan-in, or to the sum of its fan-in and fan-out. Each function returns the divisor.
_SIZES: tuple[Callable[[int, int], float], ...] = (
    lambda fan_in, fan_out: 1.0,
    lambda fan_in, fan_out: fan_in,
    lambda fan_in, fan_out: fan_in + fan_out,
)


@dataclass(frozen=True)
class Initialization:
    """The rule by which the matrices of a model were initialized.

    :param rule: ``plain``, ``scaled`` or ``depth_scaled`` (:mod:`olmo_lns.schemes.depth_factor`). It is ``""`` if the
        matrices follow none of these rules, and None if nothing could be measured.
    :param stds: matrix -> its standard deviation.
    :param scaled: names, in their block, of all matrices that have the depth factor of ``rule``. Besides the residual
        output projections these may be others, such as ``w3`` of torchtitan's feed-forward.
    """

    rule: str | None
    stds: Mapping[Matrix, float]
    scaled: frozenset[str] = frozenset()

    @property
    def is_scaled(self) -> bool:
        """True if the projections have a depth factor that this package recognizes."""
        return self.rule not in (None, "", "plain")

    @property
    def projections(self) -> dict[Matrix, float]:
        return {matrix: std for matrix, std in self.stds.items() if matrix.is_projection}

    @property
    def values(self) -> str:
        """The standard deviations as text, such as ``c_proj 0.005, others 0.02``."""
        others = [std for matrix, std in self.stds.items() if not matrix.is_projection]
        return f"{spread(self.projections)}, others {statistics.median_low(others):.2g}"

    def __str__(self) -> str:
        """Return what the start-up line says about the initialization, or ``""`` if nothing was measured."""
        if self.rule is None:
            return ""
        if self.rule == "plain":
            return "scaled initialization off"
        if not self.rule:
            return f"initialization of the residual output projections follows no known rule ({self.values})"
        return f"scaled initialization found ({self.values}): call olmo_lns.plain_initialization(model) before training"


def measure(model: nn.Module, *, merge: bool = False) -> Initialization:
    """Measure the matrices that :func:`mark_matrices` recorded, and recognize the rule of their initialization.

    :param merge: combine the measurements of all processes, so that all find the same rule. Every process must then
        call this function.
    """
    stds = {matrix: std for matrix, parameter in marked_matrices(model) if (std := _std(parameter)) is not None}
    if merge and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, stds)
        stds = {matrix: std for each in reversed(gathered) for matrix, std in each.items()}
    return _recognize(stds)


def _recognize(stds: Mapping[Matrix, float]) -> Initialization:
    """Find the rule under which all projections, without their depth factor, are as large as the other matrices."""
    if len({matrix.is_projection for matrix in stds}) < 2:
        return Initialization(None, stds)
    if not any(std for matrix, std in stds.items() if matrix.is_projection):
        return Initialization("plain", stds)  # they start at zero
    # For each rule of sizes: matrix -> its standard deviation relative to that of the matrices that are no projections.
    usual = []
    for size in _SIZES:
        sized = {matrix: std * math.sqrt(size(*matrix.fans)) for matrix, std in stds.items()}
        reference = statistics.median_low(std for matrix, std in sized.items() if not matrix.is_projection)
        if reference:
            usual.append({matrix: std / reference for matrix, std in sized.items()})
    for rule in KNOWN_INITIALIZATIONS:
        for ratios in usual:
            without = {matrix: ratio * without_depth_factor(matrix, rule) for matrix, ratio in ratios.items()}
            if all(_near(ratio) for matrix, ratio in without.items() if matrix.is_projection):
                unlike = {matrix.name for matrix, ratio in without.items() if not _near(ratio)}
                return Initialization(rule, stds, frozenset(m.name for m in stds) - unlike)
    smallest = [min(ratio for m, ratio in ratios.items() if m.is_projection) for ratios in usual]
    return Initialization("plain" if max(smallest, default=0.0) > _NO_DEPTH_FACTOR else "", stds)


def without_depth_factor(matrix: Matrix, rule: str) -> float:
    """Return the number that removes the depth factor of a rule when the matrix is multiplied by it."""
    return inverse_depth_factor(rule, matrix.number, matrix.n_layers)


def _near(ratio: float) -> bool:
    return abs(ratio - 1) < _TOLERANCE


def spread(stds: Mapping[Matrix, float]) -> str:
    """Describe standard deviations with the short names of the matrices, as in ``wo 0.014 to 0.0058, w2 0.014``."""
    values: dict[str, list[float]] = defaultdict(list)
    for matrix, std in sorted(stds.items(), key=lambda item: item[0].number):
        values[matrix.short].append(std)
    groups: list[tuple[list[str], list[float]]] = []
    for name, found in values.items():
        alike = next((group for group in groups if _is_constant([*group[1], *found])), None)
        if alike is None:
            groups.append(([name], found))
        else:
            alike[0].append(name)
            alike[1].extend(found)
    return ", ".join(
        f"{' and '.join(names)} " + (f"{statistics.fmean(v):.2g}" if _is_constant(v) else f"{v[0]:.2g} to {v[-1]:.2g}")
        for names, v in groups
    )


def _is_constant(stds: Sequence[float]) -> bool:
    """Return true if matrices were drawn with one standard deviation."""
    return max(stds) <= _ONE_DEVIATION * min(stds)


def _std(parameter: torch.Tensor) -> float | None:
    """Return the standard deviation of a complete parameter, even if this process has only a shard of it.

    The mean is taken to be 0. The result is None for a parameter that cannot be measured.
    """
    if parameter.is_meta or not parameter.is_floating_point() or math.prod(full_shape(parameter)) < MEASURABLE:
        return None
    shard = getattr(parameter, "ds_tensor", None)  # a flat shard of DeepSpeed ZeRO-3, padded with zeros
    values = (parameter if shard is None else shard).detach()
    norm = torch.linalg.vector_norm(values, dtype=torch.promote_types(values.dtype, torch.float32))
    if shard is not None:
        squared = norm.square()
        dist.all_reduce(squared, group=parameter.ds_process_group)  # type: ignore[attr-defined]
        norm = squared.sqrt()
    if hasattr(norm, "full_tensor"):  # of a DTensor
        norm = norm.full_tensor()
    return float(norm) / math.sqrt(math.prod(full_shape(parameter)))
