"""Initialization: residual output projections found by what they do, measured, and made plain.

A residual output projection is the last matrix of a branch. Scaled initialization draws these matrices smaller than all
others: at std/sqrt(2L) in a model of L blocks, or at std/sqrt(2l) in block l. A scheme replaces this factor (arXiv
2502.05795, footnote 1 and section 6).
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

#: A matrix of fewer elements is not measured: its standard deviation is too uncertain.
_MEASURABLE = 1000
#: Of many parameters whose names differ in numbers only, so many that have an effect are examined from either end.
_FEW = 2
#: Matrices that are examined for training, the size of the part of each, and of the smallest matrix.
_SAMPLED, _PART, _SMALLEST = 16, 512, 32
#: Random matrices have a largest singular value of up to 1.02 times the expected one, trained ones of more.
_RANDOM = 1.1
#: What :func:`mark` records on modules.
_MARKS = ("lns_matrices", "lns_norm")
#: Rule -> (block number, number of blocks) -> what a projection's standard deviation was divided by.
_RULES: dict[str, Callable[[int, int], float]] = {
    "plain": lambda number, n_layers: 1.0,
    "sqrt(2L)": lambda number, n_layers: math.sqrt(2.0 * n_layers),
    "sqrt(2l)": lambda number, n_layers: math.sqrt(2.0 * number),
}
#: What the variance of all matrices is inversely proportional to: nothing, fan-in, or the sum of both fans.
_SIZES: tuple[Callable[[int, int], float], ...] = (
    lambda fan_in, fan_out: 1.0,
    lambda fan_in, fan_out: fan_in,
    lambda fan_in, fan_out: fan_in + fan_out,
)


def residual_projections(block: nn.Module, moved: Callable[[], torch.Tensor], same: float) -> dict[str, int]:
    """Find the residual output projections of a block, parameter by parameter.

    A parameter is one if its slice for a channel of the stream changes block(x) - x in that channel only, and in
    proportion. The names of modules and the order of a matrix's dimensions do not matter.

    :param block: a block with random parameters; each is changed for a moment.
    :param moved: runs the block on a fixed x with its sites held, and returns block(x) - x, shape (…, channels).
    :param same: relative difference below which two results count as the same.
    :returns: name of the parameter -> its dimension of the stream's channels.

    Example: for GPT-2 ``{"attn.c_proj.weight": 1, "mlp.c_proj.weight": 1}``.
    """
    rest = moved()
    width = rest.shape[-1]
    # The router may leave experts without an effect; those that it selects stand for them.
    groups: dict[Any, list[tuple[str, nn.Parameter]]] = defaultdict(list)
    for name, parameter in block.named_parameters():
        # Fewer rows may be the scales of a branch.
        if parameter.dim() > 1 and parameter.numel() >= 8 * width and width in parameter.shape:
            groups[_place(name), parameter.shape].append((name, parameter))

    def projects(parameter: nn.Parameter, axis: int) -> bool | None:
        """Return None if nothing reads the parameter."""

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
        """Return the channels' dimension of a projection, -1 for another parameter, None if nothing reads it."""
        with _of_its_own(parameter):
            results = {axis: projects(parameter, axis) for axis, size in enumerate(parameter.shape) if size == width}
        if all(result is None for result in results.values()):
            return None
        return next((axis for axis, result in results.items() if result), -1)

    projections = {}
    for group in groups.values():
        axis_of: dict[str, int] = {}
        for ordered in (group, group[::-1]):  # the last of a row of matrices may end the branch
            count = 0
            for name, parameter in ordered:
                if name not in axis_of and (result := axis(parameter)) is not None:
                    axis_of[name] = result
                count += name in axis_of
                if count == _FEW:
                    break
        found = set(axis_of.values())
        for name, _ in group:
            result = axis_of.get(name, next(iter(found)) if len(found) == 1 else -1)
            if result >= 0:
                projections[name] = result
    return projections


def _place(name: str) -> str:
    """Return a name with ``#`` for the numbers of modules in a list: ``experts.#.w2`` for ``experts.3.w2.weight``.

    Numbers in the last part of a name tell different matrices of one module apart.
    """
    *outer, last = name.removesuffix(".weight").split(".")
    is_number = last.isdigit() and not any(part.isdigit() for part in outer)
    return ".".join([*(re.sub(r"\d+", "#", part) for part in outer), "#" if is_number else last])


@contextmanager
def _of_its_own(parameter: nn.Parameter) -> Iterator[None]:
    """Give a parameter, which may share its memory with others, memory of its own while the context runs."""
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
    """A matrix of a block, as recorded on the module that holds the parameter.

    :param name: its name in the block. :param number: the block's, 1-based. :param n_layers: of the whole model.
    :param fans: fan-in and fan-out. :param is_projection: true for a residual output projection.
    """

    name: str
    number: int
    n_layers: int
    fans: tuple[int, int]
    is_projection: bool

    def factor(self, rule: str) -> float:
        """What the standard deviation is divided by under ``rule``."""
        return _RULES[rule](self.number, self.n_layers)

    @property
    def short(self) -> str:
        """The name for a message: ``c_proj``."""
        parts = [part for part in self.name.removesuffix(".weight").split(".") if not part.isdigit()]
        return parts[-1] if parts else self.name


def mark(
    blocks: Sequence[nn.Module], projections: Sequence[Mapping[str, int]], norms: Mapping[str, Sequence[nn.Module]]
) -> None:
    """Record the matrices of all blocks on their modules, for weights that are drawn or sharded later.

    :param projections: the result of :func:`residual_projections` for each block.
    :param norms: name in the block -> that norm in all blocks.
    """
    for name, each in norms.items():
        for norm in each:
            vars(norm)["lns_norm"] = name
    for number, (block, axes) in enumerate(zip(blocks, projections, strict=True), start=1):
        dims = {}  # number of dimensions -> which of them has the output's channels, for all matrices of a block
        parameters = {name: parameter for name, parameter in block.named_parameters() if _shape(parameter)[1:]}
        for name, axis in axes.items():
            dims[len(_shape(parameters[name]))] = axis
        for name, parameter in parameters.items():
            shape = _shape(parameter)
            axis = axes.get(name, dims.get(len(shape), 0))
            # The first of three dimensions or more, if it is not the output's, counts experts.
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
    """Give a model the marks that it had before, if :func:`mark` or what follows it fails."""
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
    """Yield each matrix that :func:`mark` recorded, and its parameter as it is now: a whole, a shard, or on meta."""
    for module in model.modules():
        for name, matrix in vars(module).get("lns_matrices", {}).items():
            if torch.is_tensor(parameter := getattr(module, name, None)):
                yield matrix, parameter


@dataclass(frozen=True)
class Initialization:
    """How the matrices of a model are drawn.

    :param rule: ``plain``, ``sqrt(2L)`` or ``sqrt(2l)``; ``""`` for another rule or none; None if nothing was measured.
    :param stds: matrix -> its standard deviation.
    :param scaled: names in a block of all matrices that have the factor of ``rule``: the residual output projections
        and others, such as ``w3`` of torchtitan's feed-forward.
    """

    rule: str | None
    stds: Mapping[Matrix, float]
    scaled: frozenset[str] = frozenset()

    @property
    def is_scaled(self) -> bool:
        """True if the projections have a known depth factor."""
        return self.rule not in (None, "", "plain")

    @property
    def projections(self) -> dict[Matrix, float]:
        return {matrix: std for matrix, std in self.stds.items() if matrix.is_projection}

    @property
    def values(self) -> str:
        """The standard deviations: ``c_proj 0.005, others 0.02``."""
        others = [std for matrix, std in self.stds.items() if not matrix.is_projection]
        return f"{_spread(self.projections)}, others {statistics.median_low(others):.2g}"

    def __str__(self) -> str:
        """Return the part of the start-up line on the initialization; ``""`` if nothing was measured."""
        if self.rule is None:
            return ""
        if self.rule == "plain":
            return "scaled initialization off"
        if not self.rule:
            return f"initialization of the residual output projections follows no known rule ({self.values})"
        return f"scaled initialization found ({self.values}): call olmo_lns.plain_initialization(model) before training"


def measure(model: nn.Module, *, merge: bool = False) -> Initialization:
    """Measure the recorded matrices and recognize the rule of their initialization.

    :param merge: use what all processes have, so that all find the same rule. Every process must call it.
    """
    stds = {matrix: std for matrix, parameter in marked(model) if (std := _std(parameter)) is not None}
    if merge and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, stds)
        stds = {matrix: std for each in reversed(gathered) for matrix, std in each.items()}
    return _recognize(stds)


def make_plain(model: nn.Module, found: Initialization | None = None) -> str:
    """Multiply the recorded residual output projections by the factor of the rule that is recognized.

    Weights on the meta device and in other processes are left to those who have them.

    :param found: the initialization, if it is measured. The default measures it, in all processes.
    :returns: what changed, from what to what.
    :raises LNSConfigError: trained weights, none to measure, or an unknown rule. Nothing is changed.
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
            f"{type(model).__name__}: {part}, so the model was trained before. plain_initialization expects freshly "
            "drawn weights. Build a new model. If it is new, its initialization passes over the scaled norms: compare "
            "with isinstance(module, …) there, since their class is a subclass of the norm's."
        )
    if found.rule is None:
        raise LNSConfigError(
            f"{type(model).__name__}: found no weights to measure in its residual output projections. Expected "
            f"matrices of at least {_MEASURABLE} elements, drawn and not on the meta device. Initialize the weights "
            "first, then call plain_initialization(model) again."
        )
    if not found.rule:
        raise LNSConfigError(
            f"{type(model).__name__}: the residual output projections ({found.values}) follow no rule that is known. "
            "Expected freshly drawn weights times 1/sqrt(2L) or 1/sqrt(2l), or without a depth factor. Draw these "
            "weights as you want them; a scheme needs no other initialization."
        )
    if found.rule == "plain":
        return "plain initialization: scaled initialization was off, nothing changed"
    # A depth factor by block is unmistakable in any matrix; a constant one is a user's own choice elsewhere.
    changed = found.scaled if found.rule == "sqrt(2l)" else {matrix.name for matrix in found.projections}
    done: dict[Any, torch.Tensor] = {}  # a weight may be tied to another block's
    for matrix, parameter in marked(model):
        if matrix.name in changed and (memory := _memory(parameter)) not in done:
            done[memory] = parameter  # kept alive, so that its memory and id are not reused
            _multiply(parameter, matrix.factor(found.rule))
    before = {matrix: std for matrix, std in found.stds.items() if matrix.name in changed}
    after = {matrix: std * matrix.factor(found.rule) for matrix, std in before.items()}
    line = f"plain initialization: {_spread(before)} -> {_spread(after)} (times {found.rule})"
    kept = {matrix: std for matrix, std in found.stds.items() if matrix.name in found.scaled - changed}
    return f"{line}; unchanged, since it does not end a branch: {_spread(kept)}" if kept else line


def _recognize(stds: Mapping[Matrix, float]) -> Initialization:
    """Find the rule that explains all projections, by the other matrices."""
    if len({matrix.is_projection for matrix in stds}) < 2:
        return Initialization(None, stds)
    if not any(std for matrix, std in stds.items() if matrix.is_projection):
        return Initialization("plain", stds)  # they start at zero
    usual = []  # by size: matrix -> its standard deviation, times the root of its size, divided by that of most others
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
    # Every depth factor halves some projection of a model with more than one block.
    smallest = [min(ratio for m, ratio in ratios.items() if m.is_projection) for ratios in usual]
    return Initialization("plain" if max(smallest, default=0.0) > 0.75 else "", stds)


def _near(ratio: float) -> bool:
    return 0.9 < ratio < 1.1


def _spread(stds: Mapping[Matrix, float]) -> str:
    """Describe standard deviations by the matrices' short names: ``wo 0.014 to 0.0058, w2 0.014``."""
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
    """Return true for one draw: a depth factor changes by 1.41 at least, sampling by 1.15."""
    return max(stds) <= 1.25 * min(stds)


def _shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of a parameter, also of one that DeepSpeed has partitioned."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _std(parameter: torch.Tensor) -> float | None:
    """Return the standard deviation of a whole parameter, of which this process may have a shard."""
    if parameter.is_meta or not parameter.is_floating_point() or math.prod(_shape(parameter)) < _MEASURABLE:
        return None
    shard = getattr(parameter, "ds_tensor", None)  # DeepSpeed ZeRO-3's, flat and filled up with zeros
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
    """Return what two parameters have in common if they are one, or hold their values in the same memory."""
    values = getattr(parameter, "ds_tensor", getattr(parameter, "_local_tensor", parameter))
    return id(parameter) if values.is_meta or not values.numel() else (values.data_ptr(), values.numel())


def _multiply(parameter: torch.Tensor, factor: float) -> None:
    with torch.no_grad():
        for tensor in (parameter, getattr(parameter, "ds_tensor", None)):
            if tensor is not None and not tensor.is_meta and (tensor.numel() or hasattr(tensor, "placements")):
                tensor.mul_(factor)


def trained_part(norms: Mapping[str, Sequence[nn.Module]], matrices: Iterable[tuple[str, torch.Tensor]] = ()) -> str:
    """Say by which of its weights a model was trained, as the subject and verb of a sentence, or return ``""``.

    A fresh norm has equal gains, in all blocks. Different gains were trained, or hold a factor, as after a fold. A
    fresh matrix holds independent random numbers. Its largest singular value is then that of the Marchenko-Pastur law
    (1967), and training raises it above that. This shows what gains do not: norms without them, and gains that bf16
    kept at 1. Two kinds of weights pass as fresh: those of a few dozen steps, and matrices of fewer than 32 rows or
    columns.

    :param norms: name in the block -> that norm in all blocks. Weights on the meta device tell nothing. If they are
        sharded, every process must call this. A norm without weights that :func:`mark_folded` marked is not at its
        start either.
    :param matrices: name in its block and each of the parameters to be examined, from :func:`matrices_of`. Vectors,
        shards, and partitioned or quantized weights are left out.

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
                if math.prod(shape) != max(shape, default=1):  # a matrix of a linear layer with its norm in it
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
    """Return the name in its block and the value of each parameter with two dimensions or more."""
    return [(name, p) for block in blocks for name, p in block.named_parameters() if p.dim() > 1]


def _trained_matrix(matrices: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Return the name of a matrix in its block if a third of the matrices is not random, or ``""``.

    One kind of matrix in a block may start with a structure, such as a table of positions.
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
    """Return the largest singular value relative to that of random numbers, of a part of a matrix; None if too small.

    Rows and columns are brought to one size before, since parts of a fused matrix may be drawn at different sizes, and
    padding is zero.
    """
    while matrix.dim() > 2:  # the first expert, or all of a kernel
        matrix = matrix.flatten(1) if matrix.shape[-1] < _SMALLEST else matrix[0]
    part = matrix[:_PART, :_PART].to("cpu", torch.float32)  # SVD takes no half precision
    part = part[part.square().sum(1) > 0][:, part.square().sum(0) > 0]
    if min(part.shape) < _SMALLEST or not bool(part.isfinite().all()) or bool((part == part[0, 0]).all()):
        return None
    part = part / part.square().mean(1, keepdim=True).sqrt()
    part = part / part.square().mean(0, keepdim=True).sqrt()
    return float(torch.linalg.matrix_norm(part, 2)) / (math.sqrt(part.shape[0]) + math.sqrt(part.shape[1]))


def mark_folded(norm: nn.Module) -> None:
    """Record that the linear layers after a norm hold its factor, since a norm without weights does not show it."""
    vars(norm)["lns_folded"] = True


def drawn_std(weight: torch.Tensor) -> float | None:
    """Return the standard deviation of a weight, or of this process's shard of it.

    :returns: None for a weight on the meta device, of integers, or of fewer than 1,000 elements.
    """
    weight = getattr(weight, "_local_tensor", weight)
    measurable = not weight.is_meta and weight.numel() >= 1000 and weight.is_floating_point()
    return float(weight.detach().float().std()) if measurable else None


def check_drawn(weights: Mapping[str, torch.Tensor], std: float, *, where: str) -> bool:
    """Check that freshly drawn matrices have the standard deviation ``std``.

    :param weights: name -> weight, or this process's shard of it; none is changed.
    :returns: true if a weight was measured: not on the meta device, at least 1,000 elements.
    :raises MeasurementError: the found and the expected standard deviation.
    """
    measured = False
    for name, weight in weights.items():
        if (actual_std := drawn_std(weight)) is None:
            continue
        measured = True
        if not 0.85 * std <= actual_std <= 1.15 * std:
            raise MeasurementError(
                f"{where}, {name}: found weights drawn with a standard deviation of {actual_std:.4g}, expected "
                f"{std:.4g}. This upstream version does not initialize its output projections as requested. "
                "OLMO_LNS_DISABLE=1 runs without a scheme."
            )
    return measured
