"""What is folded where, and how: weights multiplied by a factor and rounded once, when they are written.

``x + g * c * f(s * N(x))`` is Pre-LN once s is in the norm's gain (as for LayerNorm Scaling) and
g * c in the rows of ``attn_out`` or ``ff_out``, g a learned gate and c a constant.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Callable, Mapping

import torch

from olmo_lns import __version__
from olmo_lns.checkpoints.architecture import Architecture
from olmo_lns.checkpoints.tensors import ChunkFunction, LazyTensor, check_dtype
from olmo_lns.errors import LNSConfigError
from olmo_lns.record import Record
from olmo_lns.schemes import SUB_LAYERS, Plan, Scheme

__all__ = [
    "Factor",
    "Rounding",
    "check_finite",
    "chunk_scaler",
    "factors",
    "fold_record",
    "gates",
    "inverse",
    "norm_factor",
    "obstacle",
    "scaled",
    "unfolded_record",
]

#: What a tensor is multiplied by: a number, or one for each of its rows.
Factor = float | torch.Tensor
#: Elements handled at once, in float64.
_CHUNK = 1 << 18
#: Sub-layer -> the matrix whose rows are its outputs.
_OUTPUTS = {"attn": "attn_out", "ff": "ff_out"}


def norm_factor(scheme: Scheme, n_layers: int) -> Callable[[int], float]:
    """1-based layer number -> what both block norms are multiplied by under ``scheme``.

    :raises LNSConfigError: a scheme that does more than multiply them; so does the function where they differ.
    """
    if not scheme.keeps_forward(n_layers):
        raise LNSConfigError(
            f"scheme {scheme} ({scheme.definition.title}) cannot be folded into a stock Pre-LN model: it does more "
            "than multiply the norms in front of the sub-layers"
        )

    def of_both(number: int) -> float:
        scales = {scheme.plan(number, n_layers, sub_layer).norm_scale for sub_layer in SUB_LAYERS}
        if len(scales) > 1:
            raise LNSConfigError(f"scheme {scheme} multiplies the two norms of block {number} differently: {scales}")
        return scales.pop()

    return of_both


@dataclass
class Rounding:
    """Largest relative error that rounding made, over all tensors that were changed.

    Relative to the exact product in float64; elements that are zero are left out. Of the tensors in
    ``cast`` only the dtype is another.
    """

    worst: float = 0.0
    where: str = ""
    multiplied: set[str] = field(default_factory=set)
    cast: set[str] = field(default_factory=set)

    def note(self, name: str, error: float, *, multiplied: bool) -> None:
        (self.multiplied if multiplied else self.cast).add(name)
        if error > self.worst:
            self.worst, self.where = error, name

    def scale(
        self,
        name: str,
        tensor: torch.Tensor,
        factor: Factor,
        dtype: torch.dtype,
        shift: float = 0.0,
        *,
        in_place: bool = False,
    ) -> torch.Tensor:
        """``(tensor + shift) * factor`` in ``dtype``, computed in float64 and rounded once.

        :param tensor: any shape, any floating dtype; of another one, only what stays as it is.
        :param factor: dimensionless; a number, or fp64 (rows,), one for each row.
        :param shift: 1.0 for a zero-centred gain, whose stored value is the gain minus one.
        :param in_place: whether ``tensor`` may be changed; it is where it has the dtype.
        :raises LNSConfigError: a value is NaN or infinite, or overflows ``dtype``; or the tensor is to be changed and
            not of a plain floating dtype.
        """
        check_finite(name, tensor)
        same = isinstance(factor, float) and factor == 1.0 and shift == 0.0
        if same and tensor.dtype == dtype:
            return tensor
        check_dtype(name, tensor.dtype, "cannot scale")
        if not tensor.numel():
            return tensor.to(dtype)
        own = in_place and tensor.dtype == dtype and tensor.is_contiguous()
        result = tensor if own else torch.empty(tensor.shape, dtype=dtype)
        rows = tensor.reshape(tensor.shape[0] if tensor.dim() else 1, -1)
        written, worst = result.view(rows.shape), 0.0
        step = max(1, _CHUNK // rows.shape[1])
        for start in range(0, len(rows), step):
            by = factor if isinstance(factor, float) else factor[start : start + step, None]
            exact = (rows[start : start + step].double() + shift) * by
            rounded = exact.to(dtype)
            written[start : start + step] = rounded
            # Of a zero the relative error is 0/0.
            errors = ((rounded.double() - exact) / exact).abs().nan_to_num(nan=0.0, posinf=math.inf)
            worst = max(worst, float(errors.max()))
        if worst == math.inf:
            raise LNSConfigError(f"{name} holds values that overflow {dtype}: choose bf16 or fp32")
        self.note(name, worst, multiplied=not same)
        return result

    def folded(
        self, name: str, tensor: LazyTensor, factor: Factor, dtype: torch.dtype, shift: float = 0.0
    ) -> LazyTensor:
        """:meth:`scale`, when the tensor is read."""
        in_place = tensor.memory > 0 and tensor.dtype == dtype
        same = tensor.dtype == dtype and isinstance(factor, float) and factor == 1.0 and shift == 0.0
        changes = {"memory": tensor.memory} if in_place or same else {}
        return tensor.map(
            lambda t: self.scale(name, t, factor, dtype, shift, in_place=in_place), dtype=dtype, **changes
        )


def check_finite(name: str, tensor: torch.Tensor) -> None:
    """:raises LNSConfigError: a value is NaN or infinite; it says how many are."""
    if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2 or not tensor.numel():
        return
    low, high = torch.aminmax(tensor)
    if not math.isfinite(low) or not math.isfinite(high):
        bad = int((~torch.isfinite(tensor)).sum())
        raise LNSConfigError(
            f"{name} holds NaN or infinite values ({bad} of {tensor.numel()}): the checkpoint is of a run that "
            "diverged, or was damaged; expected finite weights, such as those of an earlier checkpoint"
        )


def scaled(
    tensors: Mapping[str, LazyTensor], factors: Mapping[str, Factor], rounding: Rounding, dtype: torch.dtype | None
) -> dict[str, LazyTensor]:
    """``tensors`` multiplied by ``factors`` where they have one, in ``dtype`` (None: each in its own)."""
    return {
        name: rounding.folded(name, tensor, factors.get(name, 1.0), dtype or tensor.dtype)
        for name, tensor in tensors.items()
    }


def chunk_scaler(name: str, factor: Factor, rounding: Rounding, dtype: torch.dtype | None) -> ChunkFunction:
    """A function for :meth:`DistributedCheckpoint.rewrite` that scales every chunk, by rows if the factor has rows.

    :param dtype: of what is written, None as it is.
    """

    def scale(_: Any, offsets: Any, chunk: torch.Tensor) -> torch.Tensor:
        part = factor if isinstance(factor, float) else factor[offsets[0] : offsets[0] + chunk.shape[0]]
        return rounding.scale(name, chunk, part, dtype or chunk.dtype, in_place=True)

    return scale


def fold_record(record: Record) -> Record:
    """The record of the same weights with the factor inside."""
    return replace(record, folded=record.folded or record.active, plugin_version=__version__)


def unfolded_record(saved: Record, source: object) -> Record:
    """The record of folded weights with the factor outside again.

    :raises LNSConfigError: they are not folded.
    """
    if saved.folded:
        return replace(saved, folded=False, plugin_version=__version__)
    if saved.active:
        raise LNSConfigError(f"{source} is not folded: it can be trained on under LNS as it is")
    raise LNSConfigError(
        f"{source} is Pre-LN and never was LNS: there is no factor to take out, and a new label makes no LNS model"
    )


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
    names = [f"transformer.blocks.{i}.{sub_layer}_gate.weight" for i in range(model.n_layers) for sub_layer in _OUTPUTS]
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
            if plan.gate is not None or factor != 1.0:
                kinds = ("weight", "bias") if model.include_bias else ("weight",)
                found.update({f"{block}.{_OUTPUTS[sub_layer]}.{kind}": factor for kind in kinds})
            if plan.norm_scale != 1.0:
                found.update(dict.fromkeys(model.sites_of(index, sub_layer), plan.norm_scale))
    return found


def inverse(model: Architecture, saved: Record) -> dict[str, Factor]:
    """Parameter -> what takes the constants of a folded checkpoint out again; a gate is lost in its matrix."""
    scheme, layers = saved.scheme, model.n_layers
    if not saved.folded or any(plan.gate is not None for _, _, plan in scheme.plans(layers)):
        return {}
    return {name: 1 / factor for name, factor in factors(model, scheme, {}).items()}
