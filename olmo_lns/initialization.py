"""Find the residual output projections of a model, measure how they were initialized, and remove a depth factor.

A residual output projection is the last matrix of a branch, whose output is added to the stream. Scaled initialization
draws these matrices smaller than all others: with the standard deviation std/sqrt(2L) in a model of L blocks, or
std/sqrt(2l) in block l. A scheme such as LayerNorm Scaling takes the place of this depth factor (arXiv 2502.05795,
footnote 1 and section 6), so a model under a scheme is initialized plainly, without it.
"""

from __future__ import annotations

import copy
import math
import random
import re
import statistics
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Callable, Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from olmo_lns.errors import LNSConfigError, MeasurementError

__all__ = [
    "Initialization",
    "Matrix",
    "check_drawn",
    "drawn_std",
    "make_plain",
    "mark",
    "mark_folded",
    "marked",
    "marks_restored_on_failure",
    "matrices_of",
    "measure",
    "residual_projections",
    "trained_part",
    "unmark",
]

#: Matrices with fewer elements are not measured, since their standard deviation would be too uncertain.
_MEASURABLE = 1000
#: Among parameters whose names differ only in a number, such as those of experts, this many are examined at the
#: beginning of the row and as many at its end. Parameters without an effect are not counted.
_EXAMINED_PER_END = 2
#: To detect training, up to 16 matrices are examined. Of each, a part of up to 512 rows and columns is used. Matrices
#: with fewer than 32 rows or columns are left out.
_SAMPLED, _PART, _SMALLEST = 16, 512, 32
#: The largest singular value of a random matrix is at most 1.02 times the expected one. Above this value, a matrix
#: counts as trained.
_RANDOM = 1.1
#: The attributes in which :func:`mark` records its findings on modules.
_MARKS = ("lns_matrices", "lns_norm")
#: The rules of initialization that this module recognizes. Each function takes the number of a block and the number of
#: blocks. The rule divides the standard deviation of a projection by the result.
_RULES: dict[str, Callable[[int, int], float]] = {
    "plain": lambda number, n_layers: 1.0,
    "sqrt(2L)": lambda number, n_layers: math.sqrt(2.0 * n_layers),
    "sqrt(2l)": lambda number, n_layers: math.sqrt(2.0 * number),
}
#: The usual rules for the sizes of matrices. The variance of a matrix is constant, or inversely proportional to its
#: fan-in, or to the sum of its fan-in and fan-out. Each function returns the divisor.
_SIZES: tuple[Callable[[int, int], float], ...] = (
    lambda fan_in, fan_out: 1.0,
    lambda fan_in, fan_out: fan_in,
    lambda fan_in, fan_out: fan_in + fan_out,
)


def residual_projections(block: nn.Module, moved: Callable[[], torch.Tensor], same: float) -> dict[str, int]:
    """Find the residual output projections of a block, parameter by parameter.

    One slice of a projection belongs to each channel of the stream. If this slice is multiplied, ``block(x) - x``
    changes in that channel only, and in proportion. The function looks for parameters with this property, so the names
    of modules and the order of a matrix's dimensions do not matter.

    :param block: a block with random parameters. Each of them is changed and restored.
    :param moved: runs the block on a fixed x with its sites held, and returns block(x) - x, shape (…, channels).
    :param same: two results count as equal if their relative difference is below this value.
    :returns: name of each projection -> the dimension of the parameter that counts the channels of the stream.

    Example: for GPT-2 ``{"attn.c_proj.weight": 1, "mlp.c_proj.weight": 1}``.
    """
    rest = moved()
    width = rest.shape[-1]
    # A router may select only some experts. The others have no effect, and are judged by those that it selects.
    groups: dict[Any, list[tuple[str, nn.Parameter]]] = defaultdict(list)
    for name, parameter in block.named_parameters():
        # A smaller parameter may hold scales of a branch, and is no projection.
        if parameter.dim() > 1 and parameter.numel() >= 8 * width and width in parameter.shape:
            groups[_place(name), parameter.shape].append((name, parameter))

    def projects(parameter: nn.Parameter, axis: int) -> bool | None:
        """Return true if this dimension of the parameter counts channels of the stream; None if nothing reads it."""

        def effect(channel: int, factor: float) -> torch.Tensor:
            with _multiplied(parameter, axis, channel, factor):
                return moved() - rest

        for channel in (0, width - 1):
            once = effect(channel, 2.0)
            size = float(once[..., channel].norm())
            others = torch.cat([once[..., :channel], once[..., channel + 1 :]], dim=-1)
            if float(once.norm()) <= same:
                return None
            if float(others.norm()) > 10 * same * size:
                return False
            if float((effect(channel, 3.0) - 2 * once).norm()) > 10 * same * size:  # a gate, which is not linear
                return False
        return True

    def axis(parameter: nn.Parameter) -> int | None:
        """Return the dimension of the channels, -1 if the parameter is no projection, or None if nothing reads it."""
        with _of_its_own(parameter):
            results = {axis: projects(parameter, axis) for axis, size in enumerate(parameter.shape) if size == width}
        if all(result is None for result in results.values()):
            return None
        return next((axis for axis, result in results.items() if result), -1)

    projections = {}
    for group in groups.values():
        axis_of: dict[str, int] = {}
        for ordered in (group, group[::-1]):  # perhaps only the last one ends the branch
            count = 0
            for name, parameter in ordered:
                if name not in axis_of and (result := axis(parameter)) is not None:
                    axis_of[name] = result
                count += name in axis_of
                if count == _EXAMINED_PER_END:
                    break
        found = set(axis_of.values())
        for name, _ in group:
            result = axis_of.get(name, next(iter(found)) if len(found) == 1 else -1)
            if result >= 0:
                projections[name] = result
    return projections


def _place(name: str) -> str:
    """Replace the numbers of modules in a parameter's name: ``experts.#.w2`` for ``experts.3.w2.weight``.

    A number in the last part of a name is kept, since it distinguishes different matrices of one module.
    """
    *outer, last = name.removesuffix(".weight").split(".")
    is_number = last.isdigit() and not any(part.isdigit() for part in outer)
    return ".".join([*(re.sub(r"\d+", "#", part) for part in outer), "#" if is_number else last])


@contextmanager
def _of_its_own(parameter: nn.Parameter) -> Iterator[None]:
    """Move a parameter to separate memory while the context runs, since it may share its memory with others."""
    value = parameter.data
    parameter.data = value.clone()
    try:
        yield
    finally:
        parameter.data = value


@contextmanager
def _multiplied(parameter: nn.Parameter, axis: int, channel: int, factor: float) -> Iterator[None]:
    """Multiply a channel's slice of a parameter while the context runs."""
    part = parameter.data.select(axis, channel)
    value = part.clone()
    part.mul_(factor)
    try:
        yield
    finally:
        part.copy_(value)


@dataclass(frozen=True)
class Matrix:
    """The record that :func:`mark` leaves of a matrix, on the module that has the parameter.

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

    def factor(self, rule: str) -> float:
        """Return the depth factor, by which ``rule`` divides the standard deviation of this matrix."""
        return _RULES[rule](self.number, self.n_layers)

    @property
    def short(self) -> str:
        """The short name of the matrix for a message, such as ``c_proj``."""
        parts = [part for part in self.name.removesuffix(".weight").split(".") if not part.isdigit()]
        return parts[-1] if parts else self.name


def mark(
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
        dims = {}  # number of dimensions -> the one that counts output channels, the same for all matrices of a block
        parameters = {name: parameter for name, parameter in block.named_parameters() if _shape(parameter)[1:]}
        for name, axis in axes.items():
            dims[len(_shape(parameters[name]))] = axis
        for name, parameter in parameters.items():
            shape = _shape(parameter)
            axis = axes.get(name, dims.get(len(shape), 0))
            # In a parameter of three dimensions or more, the first counts experts, unless it is that of the output.
            fan_in = math.prod(shape[1:]) if axis == 0 else shape[-2] if axis == len(shape) - 1 else shape[-1]
            path, _, own_name = name.rpartition(".")
            matrix = Matrix(name, number, len(blocks), (fan_in, shape[axis]), name in axes)
            vars(block.get_submodule(path)).setdefault("lns_matrices", {})[own_name] = matrix


def unmark(module: nn.Module) -> None:
    """Remove what :func:`mark` recorded on a module."""
    for name in _MARKS:
        vars(module).pop(name, None)


@contextmanager
def marks_restored_on_failure(model: nn.Module) -> Iterator[None]:
    """Restore the records of :func:`mark` to what they were before, if the ``with`` block raises."""
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


def marked(model: nn.Module) -> Iterator[tuple[Matrix, torch.Tensor]]:
    """Yield each matrix that :func:`mark` recorded, together with its present parameter.

    The parameter may be complete, a shard, or on the meta device.
    """
    for module in model.modules():
        for name, matrix in vars(module).get("lns_matrices", {}).items():
            if torch.is_tensor(parameter := getattr(module, name, None)):
                yield matrix, parameter


@dataclass(frozen=True)
class Initialization:
    """The rule by which the matrices of a model were initialized.

    :param rule: ``plain``, ``sqrt(2L)`` or ``sqrt(2l)``. It is ``""`` if the matrices follow none of these rules, and
        None if nothing could be measured.
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
        return f"{_spread(self.projections)}, others {statistics.median_low(others):.2g}"

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
    """Measure the matrices that :func:`mark` recorded, and recognize the rule of their initialization.

    :param merge: combine the measurements of all processes, so that all find the same rule. Every process must then
        call this function.
    """
    stds = {matrix: std for matrix, parameter in marked(model) if (std := _std(parameter)) is not None}
    if merge and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, stds)
        stds = {matrix: std for each in reversed(gathered) for matrix, std in each.items()}
    return _recognize(stds)


def make_plain(model: nn.Module, found: Initialization | None = None) -> str:
    """Recognize the rule of the initialization, and multiply the matrices by its depth factor to remove it.

    Each process changes only the weights that it has. Weights on the meta device are left unchanged.

    :param found: the initialization, if it has been measured already. By default it is measured, in all processes.
    :returns: a line that describes the change, with the standard deviations before and after.
    :raises LNSConfigError: if the weights are trained, none can be measured, or they follow no known rule. Nothing is
        changed then.
    """
    if any(hasattr(p, "_z3_optimizer") or getattr(p, "_hp_mapping", None) is not None for p in model.parameters()):
        raise LNSConfigError(
            f"{type(model).__name__}: DeepSpeed's optimizer holds copies of its weights, which would undo the change. "
            "plain_initialization expects a model before deepspeed.initialize. Call it earlier."
        )
    found = measure(model, merge=True) if found is None else found
    norms: dict[str, list[nn.Module]] = defaultdict(list)
    for module in model.modules():
        if "lns_norm" in vars(module):
            norms[vars(module)["lns_norm"]].append(module)
    if part := trained_part(norms, [(matrix.name, parameter) for matrix, parameter in marked(model)]):
        raise LNSConfigError(
            f"{type(model).__name__}: {part}, so the model was trained before. plain_initialization expects weights "
            "that have just been drawn. Build a new model. If this one is new, its own initialization did not reset "
            "the scaled norms. The class of a scaled norm is a subclass of the norm's class, so compare with "
            "isinstance(module, …) there."
        )
    if found.rule is None:
        raise LNSConfigError(
            f"{type(model).__name__}: no residual output projection could be measured. Expected matrices of at least "
            f"{_MEASURABLE} elements that are drawn and not on the meta device. Initialize the weights first, then "
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
    changed = found.scaled if found.rule == "sqrt(2l)" else {matrix.name for matrix in found.projections}
    done: dict[Any, torch.Tensor] = {}  # a weight may be tied to another block's
    for matrix, parameter in marked(model):
        if matrix.name in changed and (memory := _memory(parameter)) not in done:
            done[memory] = parameter  # keeps it alive, so that no other tensor gets its address
            _multiply(parameter, matrix.factor(found.rule))
    before = {matrix: std for matrix, std in found.stds.items() if matrix.name in changed}
    after = {matrix: std * matrix.factor(found.rule) for matrix, std in before.items()}
    line = f"plain initialization: {_spread(before)} -> {_spread(after)} (times {found.rule})"
    kept = {matrix: std for matrix, std in found.stds.items() if matrix.name in found.scaled - changed}
    return f"{line}; unchanged, since it does not end a branch: {_spread(kept)}" if kept else line


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
    for rule in _RULES:
        for ratios in usual:
            if all(_near(ratio * m.factor(rule)) for m, ratio in ratios.items() if m.is_projection):
                unlike = {m.name for m, ratio in ratios.items() if not _near(ratio * m.factor(rule))}
                return Initialization(rule, stds, frozenset(m.name for m in stds) - unlike)
    # In a model with more than one block, every depth factor makes some projection at most half as large.
    smallest = [min(ratio for m, ratio in ratios.items() if m.is_projection) for ratios in usual]
    return Initialization("plain" if max(smallest, default=0.0) > 0.75 else "", stds)


def _near(ratio: float) -> bool:
    return 0.9 < ratio < 1.1


def _spread(stds: Mapping[Matrix, float]) -> str:
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
    """Return true if matrices were drawn with one standard deviation.

    A depth factor that changes from block to block changes it at least 1.41-fold, random sampling at most 1.15-fold.
    """
    return max(stds) <= 1.25 * min(stds)


def _shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of a parameter, also of one that DeepSpeed has partitioned."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _std(parameter: torch.Tensor) -> float | None:
    """Return the standard deviation of a complete parameter, even if this process has only a shard of it.

    The mean is taken to be 0. The result is None for a parameter that cannot be measured.
    """
    if parameter.is_meta or not parameter.is_floating_point() or math.prod(_shape(parameter)) < _MEASURABLE:
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
    return float(norm) / math.sqrt(math.prod(_shape(parameter)))


def _memory(parameter: torch.Tensor) -> Any:
    """Return a key that is equal for two parameters if they are the same, or have their values in the same memory."""
    values = getattr(parameter, "ds_tensor", getattr(parameter, "_local_tensor", parameter))
    return id(parameter) if values.is_meta or not values.numel() else (values.data_ptr(), values.numel())


def _multiply(parameter: torch.Tensor, factor: float) -> None:
    with torch.no_grad():
        for tensor in (parameter, getattr(parameter, "ds_tensor", None)):
            if tensor is not None and not tensor.is_meta and (tensor.numel() or hasattr(tensor, "placements")):
                tensor.mul_(factor)


def trained_part(norms: Mapping[str, Sequence[nn.Module]], matrices: Iterable[tuple[str, torch.Tensor]] = ()) -> str:
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

    Example: ``trained_part({"norm1": [block.norm1 for block in model.blocks]}, matrices_of(model.blocks))``.
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
                shape = _shape(parameter)
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


def matrices_of(blocks: Sequence[nn.Module]) -> list[tuple[str, torch.Tensor]]:
    """Return all parameters of the blocks that have two dimensions or more, each with its name in its block."""
    return [(name, p) for block in blocks for name, p in block.named_parameters() if p.dim() > 1]


def _trained_matrix(matrices: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Return the name of the least random matrix if at least a third of the matrices is not random, or else ``""``.

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
    return max(ratios, key=lambda name: ratios[name]) if count and 3 * exceeding >= count else ""


def _excess(matrix: torch.Tensor) -> float | None:
    """Return the largest singular value of a part of a matrix, divided by that of a random matrix of its shape.

    Rows and columns of zeros, which are padding, are removed first. The other rows and columns are scaled to one size,
    since the parts of a fused matrix may have been drawn with different standard deviations. The result is None if the
    remaining part is too small or cannot be judged.
    """
    while matrix.dim() > 2:  # take the first expert, or a whole convolution kernel
        matrix = matrix.flatten(1) if matrix.shape[-1] < _SMALLEST else matrix[0]
    part = matrix[:_PART, :_PART].to("cpu", torch.float32)  # SVD takes no half precision
    part = part[part.square().sum(1) > 0][:, part.square().sum(0) > 0]
    if min(part.shape) < _SMALLEST or not bool(part.isfinite().all()) or bool((part == part[0, 0]).all()):
        return None
    part = part / part.square().mean(1, keepdim=True).sqrt()
    part = part / part.square().mean(0, keepdim=True).sqrt()
    return float(torch.linalg.matrix_norm(part, 2)) / (math.sqrt(part.shape[0]) + math.sqrt(part.shape[1]))


def mark_folded(norm: nn.Module) -> None:
    """Record on a norm without weights that a fold has multiplied the linear layers after it by its factor."""
    vars(norm)["lns_folded"] = True


def drawn_std(weight: torch.Tensor) -> float | None:
    """Return the standard deviation of a weight, or of this process's shard of it.

    :returns: None if the weight is on the meta device, consists of integers, or has fewer than 1,000 elements.
    """
    weight = getattr(weight, "_local_tensor", weight)
    measurable = not weight.is_meta and weight.numel() >= 1000 and weight.is_floating_point()
    return float(weight.detach().float().std()) if measurable else None


def check_drawn(weights: Mapping[str, torch.Tensor], std: float, *, where: str) -> bool:
    """Check that freshly drawn matrices have the standard deviation ``std``.

    :param weights: name -> weight, or this process's shard of it. They are not changed.
    :param std: the expected standard deviation, in the unit of the weights.
    :param where: beginning of the error message.
    :returns: true if at least one weight could be measured, see :func:`drawn_std`.
    :raises MeasurementError: if a standard deviation differs by more than 15 %. The message gives both values.
    """
    measured = False
    for name, weight in weights.items():
        if (actual_std := drawn_std(weight)) is None:
            continue
        measured = True
        if not 0.85 * std <= actual_std <= 1.15 * std:
            raise MeasurementError(
                f"{where}, {name}: the weights were drawn with a standard deviation of {actual_std:.4g}. Expected "
                f"{std:.4g}. This version of the framework does not initialize its output projections as requested. "
                "Use another version, or set OLMO_LNS_DISABLE=1 to run without a scheme."
            )
    return measured
