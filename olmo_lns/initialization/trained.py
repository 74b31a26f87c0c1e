"""Recognize weights that were trained, by the gains of their norms and by their largest singular values."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from typing import Iterable, Mapping, Sequence

import torch
from torch import nn

from olmo_lns.initialization.marks import full_shape

#: To detect training, up to 16 matrices are examined. Of each, a part of up to 512 rows and columns is used. Matrices
#: with fewer than 32 rows or columns are left out.
_SAMPLED, _PART, _SMALLEST = 16, 512, 32
#: The largest singular value of a random matrix is at most 1.02 times the expected one. Above this value, a matrix
#: counts as trained.
_RANDOM = 1.1
#: A model counts as trained if at least this share of its examined matrices does. The others may have learned little.
_TRAINED_SHARE = 1 / 3
#: Steps of Lanczos' method. For random matrices of up to 512 rows and columns they give four digits, in a tenth of the
#: time of all singular values.
_STEPS = 32
#: A new vector of this size, relative to the one it was made from, is rounding of fp32.
_ROUNDING = 1e-5


def why_trained(norms: Mapping[str, Sequence[nn.Module]], matrices: Iterable[tuple[str, torch.Tensor]] = ()) -> str:
    """Describe which weights show that a model was trained, or return ``""`` if they all look fresh.

    Two observations count. The gains of a fresh norm are all equal, within a block and between the blocks. Different
    gains were trained, or they contain a factor, as after a fold. And a fresh matrix consists of independent random
    numbers, so its largest singular value follows the Marchenko-Pastur law (1967). Training raises it above that. The
    second observation is needed for norms that have no gain, and for gains that stayed at 1 because they are in bf16.

    Weights that were trained for only a few dozen steps are not recognized, nor are matrices with fewer than 32 rows or
    columns.

    :param norms: name of a norm in its block -> this norm in all blocks. Weights on the meta device are left out. If
        the weights are sharded, every process must call this function. A norm without weights counts as trained if
        :func:`mark_folded` has marked it.
    :param matrices: pairs of a parameter's name in its block and the parameter, from :func:`matrices_of`. Vectors,
        shards, and partitioned or quantized weights are left out.
    :returns: the subject and the verb of a sentence for an error message.

    Example: ``why_trained({"norm1": [block.norm1 for block in model.blocks]}, matrices_of(model.blocks))``.
    """
    if name := _trained_norm(norms):
        return f"the weights of its norm {name} are not at their start"
    if name := _trained_matrix(matrices):
        return f"its matrices, such as {name}, are not independent random numbers"
    return ""


def _trained_norm(norms: Mapping[str, Sequence[nn.Module]]) -> str:
    for name, each in norms.items():
        if any("lns_folded" in vars(norm) for norm in each):
            return name
        starts: dict[str, set[float]] = defaultdict(set)
        for norm in each:
            for key, parameter in norm.named_parameters():
                shape = full_shape(parameter)
                if math.prod(shape) != max(shape, default=1):  # a linear layer that contains its norm
                    continue
                values = parameter.detach()
                values = (values.full_tensor() if hasattr(values, "full_tensor") else values).flatten()
                if values.is_meta or not values.numel():
                    continue
                if bool((values != values[0]).any()):
                    return name
                starts[key].add(float(values[0]))
        if any(len(values) > 1 for values in starts.values()):
            return name
    return ""


def _trained_matrix(matrices: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Return the name of the least random matrix if enough of the matrices are not random, or else ``""``.

    A few matrices may be structured from the start, such as a table of positions. They do not suffice.
    """
    unique = {id(p): (name, p) for name, p in matrices}
    candidates = [
        (name, p) for name, p in unique.values() if p.dim() > 1 and type(p.data) is torch.Tensor and not p.is_meta
    ]
    ratios: dict[str, float] = {}
    count = exceeding = 0
    for name, parameter in random.Random(0).sample(candidates, len(candidates)):
        if (ratio := _excess(parameter.detach())) is not None:
            ratios[name] = max(ratio, ratios.get(name, 0.0))
            count += 1
            exceeding += ratio > _RANDOM
        if count == _SAMPLED:
            break
    return max(ratios, key=lambda name: ratios[name]) if count and exceeding >= _TRAINED_SHARE * count else ""


def _excess(matrix: torch.Tensor) -> float | None:
    """Return the largest singular value of a part of a matrix, divided by that of a random matrix of its shape.

    Rows and columns of zeros, which are padding, are removed first. The other rows and columns are scaled to one size,
    since the parts of a fused matrix may have been drawn with different standard deviations. The result is None if the
    remaining part is too small or cannot be judged.
    """
    while matrix.dim() > 2:  # take the first expert, or a whole convolution kernel
        matrix = matrix.flatten(1) if matrix.shape[-1] < _SMALLEST else matrix[0]
    part = matrix[:_PART, :_PART].to("cpu", torch.float32)
    part = part[part.square().sum(1) > 0][:, part.square().sum(0) > 0]
    if min(part.shape) < _SMALLEST or not bool(part.isfinite().all()) or bool((part == part[0, 0]).all()):
        return None
    part = part / part.square().mean(1, keepdim=True).sqrt()
    part = part / part.square().mean(0, keepdim=True).sqrt()
    return _largest_singular_value(part) / (math.sqrt(part.shape[0]) + math.sqrt(part.shape[1]))


def _largest_singular_value(matrix: torch.Tensor) -> float:
    """Return the largest singular value of a matrix in fp32, by Lanczos' method (1950).

    Each step adds one vector to an orthonormal basis, in which the value is then computed.
    """
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(matrix.shape[1], generator=generator, dtype=matrix.dtype, device="cpu")
    basis = matrix.new_zeros(0, matrix.shape[1])
    with torch.autocast("cpu", enabled=False):  # the caller may build and change the model under autocast
        for _ in range(_STEPS):
            vector = vector / vector.norm()
            basis = torch.cat([basis, vector[None]])
            image = vector = matrix.T @ (matrix @ vector)
            for _ in range(2):
                vector = vector - basis.T @ (basis @ vector)
            if float(vector.norm()) <= _ROUNDING * float(image.norm()):  # the basis has the whole row space
                break
        return float(torch.linalg.matrix_norm(basis @ matrix.T, 2))


def mark_folded(norm: nn.Module) -> None:
    """Record on a norm without weights that a fold has multiplied the linear layers after it by its factor."""
    vars(norm)["lns_folded"] = True
