"""Record on the modules of a model which matrices and norms they have.

The weights may be drawn, sharded or partitioned afterwards. The records stay on the modules, so the matrices can be
measured then.
"""

from __future__ import annotations

import copy
import math
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Iterator, Mapping, Sequence

import torch
from torch import nn

#: The attributes in which :func:`mark_matrices` records its findings on modules.
_MARKS = ("lns_matrices", "lns_norm")


@dataclass(frozen=True)
class Matrix:
    """The record that :func:`mark_matrices` leaves of a matrix, on the module that has the parameter.

    :param name: name of the parameter in the block.
    :param number: number of the block, from 1.
    :param n_layers: number of blocks in the whole model.
    :param fans: fan-in and fan-out of the matrix.
    :param is_projection: true for a residual output projection.
    """

    name: str
    number: int
    n_layers: int
    fans: tuple[int, int]
    is_projection: bool

    @property
    def short(self) -> str:
        """The short name of the matrix for a message, such as ``c_proj``."""
        parts = [part for part in self.name.removesuffix(".weight").split(".") if not part.isdigit()]
        return parts[-1] if parts else self.name


def mark_matrices(
    blocks: Sequence[nn.Module], projections: Sequence[Mapping[str, int]], norms: Mapping[str, Sequence[nn.Module]]
) -> None:
    """Record on the modules of all blocks which matrices and norms they have.

    The records make it possible to measure weights that are drawn or sharded only later.

    :param blocks: all blocks of the model, in order.
    :param projections: the result of :func:`residual_projections` for each block.
    :param norms: name of a norm in its block -> this norm in all blocks.
    """
    for name, each in norms.items():
        for norm in each:
            vars(norm)["lns_norm"] = name
    for number, (block, axes) in enumerate(zip(blocks, projections, strict=True), start=1):
        # GPT-2 stores matrices as (inputs, outputs), other models as (outputs, inputs). The projections show which axis
        # has the outputs. All other matrices of the block with as many dimensions are taken to have the same order.
        dims = {}  # number of dimensions -> the axis of the outputs
        parameters = {name: parameter for name, parameter in block.named_parameters() if full_shape(parameter)[1:]}
        for name, axis in axes.items():
            dims[len(full_shape(parameters[name]))] = axis
        for name, parameter in parameters.items():
            shape = full_shape(parameter)
            axis = axes.get(name, dims.get(len(shape), 0))
            # In a parameter of three dimensions or more, the first counts experts, unless it is that of the output.
            fan_in = math.prod(shape[1:]) if axis == 0 else shape[-2] if axis == len(shape) - 1 else shape[-1]
            path, _, own_name = name.rpartition(".")
            matrix = Matrix(name, number, len(blocks), (fan_in, shape[axis]), name in axes)
            vars(block.get_submodule(path)).setdefault("lns_matrices", {})[own_name] = matrix


def unmark(module: nn.Module) -> None:
    """Remove what :func:`mark_matrices` recorded on a module."""
    for name in _MARKS:
        vars(module).pop(name, None)


@contextmanager
def marks_restored_on_failure(model: nn.Module) -> Iterator[None]:
    """Restore the records of :func:`mark_matrices` to what they were before, if the ``with`` block raises."""
    before = {
        module: {name: copy.copy(vars(module)[name]) for name in _MARKS if name in vars(module)}
        for module in model.modules()
    }
    try:
        yield
    except BaseException:
        for module, marks in before.items():
            unmark(module)
            vars(module).update(marks)
        raise


def marked_matrices(model: nn.Module) -> Iterator[tuple[Matrix, torch.Tensor]]:
    """Yield each matrix that :func:`mark_matrices` recorded, together with its present parameter.

    The parameter may be complete, a shard, or on the meta device.
    """
    for module in model.modules():
        for name, matrix in vars(module).get("lns_matrices", {}).items():
            if torch.is_tensor(parameter := getattr(module, name, None)):
                yield matrix, parameter


def matrices_of(blocks: Sequence[nn.Module]) -> list[tuple[str, torch.Tensor]]:
    """Return all parameters of the blocks that have two dimensions or more, each with its name in its block."""
    return [(name, p) for block in blocks for name, p in block.named_parameters() if p.dim() > 1]


def full_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of a parameter, also of one that DeepSpeed has partitioned."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))
