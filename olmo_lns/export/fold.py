"""Which weights a factor is multiplied into, and how: in float64, rounded once, when they are written.

``x + g * c * f(s * N(x))`` is Pre-LN once s is in the norm's gain (as for LayerNorm Scaling) and
g * c in the rows of ``attn_out`` or ``ff_out``, g a learned gate and c a constant.

Adam's moments follow where a factor is taken out again: a gain ``g`` of the folded model is ``s·w``, so ``w = g/s`` and
the gradient by ``w`` is ``s`` times the gradient by ``g``: the first moment is multiplied by ``s``, the second by
``s²``. Without gains the same holds for the projections after the norms.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from typing import Hashable, Iterable, Mapping, TypeVar

import torch

from olmo_lns import __version__
from olmo_lns.checkpoints.distributed import DistributedCheckpoint, Edit
from olmo_lns.checkpoints.olmo import Architecture
from olmo_lns.checkpoints.tensors import LazyTensor, check_dtype
from olmo_lns.errors import LNSConfigError
from olmo_lns.record import Record
from olmo_lns.schemes import Scheme

#: What a tensor is multiplied by: a number, or fp64 with one for each index of its leading axes.
Factor = float | torch.Tensor
Key = TypeVar("Key", bound=Hashable)
#: Elements handled at once, in float64.
_CHUNK = 1 << 18
#: Sub-layer -> the matrix whose rows are its outputs.
_OUTPUTS = {"attn": "attn_out", "ff": "ff_out"}
#: Optimizer state of a parameter -> the power of the factor by which it is multiplied.
MOMENT_POWERS = {"exp_avg": 1, "exp_avg_sq": 2, "max_exp_avg_sq": 2, "grad_norm_exp_avg": 1, "step": 0}
#: Of these every parameter that was trained has one; the rest is kept by some optimizers for some parameters.
_OF_EVERY_PARAMETER = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
#: What wrappers put into a parameter's name: DDP in front of all, FSDP and torch.compile anywhere.
_WRAPPERS = re.compile(r"^module\.|\b(?:_fsdp_wrapped_module|_orig_mod)\.")
_SHARDED_STATE = re.compile(r"optim\.state\.(?P<parameter>.+)\.(?P<moment>[a-z_]+)$")


@dataclass
class Rounding:
    """Largest relative error that rounding made, over all tensors that were changed.

    Relative to the exact product in float64; elements that are zero are left out.
    """

    worst: float = 0.0
    where: str = ""
    changed: set[str] = field(default_factory=set)

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
        :param factor: dimensionless; of the shape of the tensor's leading axes where it is a tensor.
        :param shift: 1.0 for a zero-centred gain, whose stored value is the gain minus one.
        :param in_place: whether ``tensor`` may be changed; it is where it has the dtype.
        :raises LNSConfigError: a value is NaN or infinite, or overflows ``dtype``; or the tensor is to be changed and
            not of a plain floating dtype.
        """
        check_finite(name, tensor)
        if _same(factor, shift) and tensor.dtype == dtype:
            return tensor
        check_dtype(name, tensor.dtype, "cannot scale")
        if not tensor.numel():
            return tensor.to(dtype)
        own = in_place and tensor.dtype == dtype and tensor.is_contiguous()
        result = tensor if own else torch.empty(tensor.shape, dtype=dtype)
        axes = tensor.shape[:1] if isinstance(factor, float) else factor.shape
        rows = tensor.reshape(axes.numel(), -1)
        written, worst = result.view(rows.shape), 0.0
        step = max(1, _CHUNK // rows.shape[1])
        for start in range(0, len(rows), step):
            by = factor if isinstance(factor, float) else factor.reshape(-1, 1)[start : start + step]
            exact = (rows[start : start + step].double() + shift) * by
            rounded = exact.to(dtype)
            written[start : start + step] = rounded
            # Of a zero the relative error is 0/0.
            errors = ((rounded.double() - exact) / exact).abs().nan_to_num(nan=0.0, posinf=math.inf)
            worst = max(worst, float(errors.max()))
        if worst == math.inf:
            raise LNSConfigError(f"{name} holds values that overflow {dtype}: choose bf16 or fp32")
        self.changed.add(name)
        if worst > self.worst:
            self.worst, self.where = worst, name
        return result

    def folded(
        self, name: str, tensor: LazyTensor, factor: Factor, dtype: torch.dtype | None, shift: float = 0.0
    ) -> LazyTensor:
        """:meth:`scale`, when the tensor is read; in its own dtype for None."""
        dtype = dtype or tensor.dtype
        in_place = tensor.memory > 0 and tensor.dtype == dtype
        own = {"memory": tensor.memory} if in_place or (tensor.dtype == dtype and _same(factor, shift)) else {}
        return tensor.map(lambda t: self.scale(name, t, factor, dtype, shift, in_place=in_place), dtype=dtype, **own)

    def edit(self, name: str, factor: Factor, dtype: torch.dtype | None = None, shift: float = 0.0) -> Edit:
        """:meth:`scale` of every chunk of a distributed checkpoint; in its own dtype for None."""

        def function(offsets: tuple[int, ...], chunk: torch.Tensor) -> torch.Tensor:
            part = factor
            if isinstance(part, torch.Tensor):
                axes = zip(offsets, chunk.shape, strict=True)
                part = part[tuple(slice(start, start + size) for start, size in list(axes)[: part.dim()])]
            return self.scale(name, chunk, part, dtype or chunk.dtype, shift, in_place=True)

        return Edit(function, dtype)


def _same(factor: Factor, shift: float) -> bool:
    return isinstance(factor, float) and factor == 1.0 and shift == 0.0


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
    return {name: rounding.folded(name, tensor, factors.get(name, 1.0), dtype) for name, tensor in tensors.items()}


def fold_record(record: Record) -> Record:
    """The record of the same weights with the factor inside."""
    return replace(record, folded=record.folded or record.active, plugin_version=__version__)


def unfolded_record(saved: Record, source: object, n_layers: int | None = None) -> Record:
    """The record of folded weights with the factor outside again.

    :param n_layers: given where no more than factors of norms can be taken out again.
    :raises LNSConfigError: the weights are not folded, or hold more.
    """
    if saved.folded and n_layers and not saved.scheme.keeps_forward(n_layers):
        raise LNSConfigError(
            f"scheme {saved.scheme} ({saved.scheme.definition.title}) cannot be unfolded from a stock Pre-LN model: it "
            "does more than multiply the norms in front of the sub-layers"
        )
    if saved.folded:
        return replace(saved, folded=False, plugin_version=__version__)
    if saved.active:
        raise LNSConfigError(f"{source} is not folded: it can be trained on under LNS as it is")
    raise LNSConfigError(
        f"{source} is Pre-LN and never was LNS: there is no factor to take out, and a new label makes no LNS model"
    )


def require_foldable(scheme: Scheme, n_layers: int, source: object, otherwise: str = "") -> None:
    """:param otherwise: what to do instead. :raises LNSConfigError: no weights of a Pre-LN model hold the scheme."""
    if problem := obstacle(scheme, n_layers):
        title = f"{scheme.definition.title} ({scheme})"
        raise LNSConfigError(f"{source}: {title} cannot be folded into a stock model: {problem}{otherwise}")


def obstacle(scheme: Scheme, n_layers: int) -> str:
    """Why the scheme does not fold into stock Pre-LN, ``""`` if it does."""
    for _, _, plan in scheme.plans(n_layers):
        if plan.post:
            return "its norms sit on the sums, and no weight of a Pre-LN block can undo a norm"
        if plan.branch:
            return "it normalises the branches, which a Pre-LN block does not"
        if plan.groups != 1:
            return "its norms take statistics over groups of channels"
        if plan.pre_scale != 1.0 or plan.stream_scale != 1.0:
            return "it equals Pre-LN only up to the eps of the norms"
        if not plan.folds_into_pre_ln:
            return "it weighs the shortcut, which a Pre-LN block does not"
    return ""


def gates(model: Architecture) -> set[str]:
    """Names of the learned gates: a stock model has none of them."""
    return {name for name in model.shapes() if name.endswith("_gate.weight")}


def factors(model: Architecture, scheme: Scheme, tensors: Mapping[str, LazyTensor]) -> dict[str, Factor]:
    """Parameter -> what it is multiplied by: a number, or fp64 (rows,), one for each row.

    :param scheme: one without :func:`obstacle`. :param tensors: OLMo's names, block groups flattened.
    """
    found: dict[str, Factor] = {}
    for number, sub_layer, plan in scheme.plans(model.n_layers):
        block = f"transformer.blocks.{number - 1}"
        factor: Factor = plan.branch_scale
        if plan.gate is not None:
            factor = tensors[f"{block}.{sub_layer}_gate.weight"].load().double() * factor
            factor = factor.expand(model.d_model)
        if plan.gate is not None or factor != 1.0:
            kinds = ("weight", "bias") if model.include_bias else ("weight",)
            found.update({f"{block}.{_OUTPUTS[sub_layer]}.{kind}": factor for kind in kinds})
        found.update(dict.fromkeys(model.sites(number - 1, sub_layer), plan.norm_scale))
    return found


def inverse(model: Architecture, saved: Record) -> dict[str, Factor]:
    """Parameter -> the factor that takes the constants of a folded checkpoint out again.

    It is empty where a gate was folded: nothing tells the gate from its matrix.
    """
    scheme, layers = saved.scheme, model.n_layers
    if not saved.folded or any(plan.gate is not None for _, _, plan in scheme.plans(layers)):
        return {}
    return {name: 1 / factor for name, factor in factors(model, scheme, {}).items()}


def moments(
    stored: Iterable[tuple[Key, str, str]], scales: Mapping[str, Factor], canonical: Mapping[str, str], source: object
) -> dict[Key, Factor]:
    """Key of a moment -> what it is multiplied by, for the parameters in ``scales``.

    :param stored: key, parameter and kind of every moment that an optimizer holds.
    :param scales: parameter -> factor of the folded model. :param canonical: name of a parameter as stored -> there.
    :raises LNSConfigError: of a scaled parameter none or not all are there, or a kind whose scaling is unknown.
    """
    known_as = {_unwrapped(name): known for name, known in canonical.items()}
    found: dict[str, set[str]] = {}
    made: dict[Key, Factor] = {}
    for key, parameter, kind in stored:
        known = known_as.get(_unwrapped(parameter), parameter)
        found.setdefault(known, set()).add(kind)
        if known not in scales:
            continue
        if kind not in MOMENT_POWERS:
            raise LNSConfigError(f"{source} holds optimizer state {kind!r} of unknown scaling: give --drop-optimizer")
        if power := MOMENT_POWERS[kind]:
            made[key] = scales[known] ** power
    expected = _OF_EVERY_PARAMETER & {kind for kinds in found.values() for kind in kinds}
    lacking = sorted(name for name in scales if not expected <= found.get(name, set()) or not expected)
    if found and lacking:
        raise LNSConfigError(
            f"{source}: found the moments of {len(scales) - len(lacking)} of the {len(scales)} parameters to rescale, "
            f"none or not all of {lacking[0]}'s (it names {min(found)}, …): training would go on with moments of "
            "another scale; give --drop-optimizer to leave the optimizer's state out"
        )
    return made


def sharded_moments(
    stored: DistributedCheckpoint, scales: Mapping[str, Factor], canonical: Mapping[str, str], rounding: Rounding
) -> dict[str, Edit]:
    """Name of a stored moment -> its rescaling. :raises LNSConfigError: as :func:`moments`."""
    matches = [match for name in stored.names if (match := _SHARDED_STATE.match(name))]
    names = ((match.string, match["parameter"], match["moment"]) for match in matches)
    found = moments(names, scales, canonical, stored.folder)
    return {name: rounding.edit(name, factor) for name, factor in found.items()}


def _unwrapped(name: str) -> str:
    """The parameter's name in the model itself, without its wrappers."""
    return _WRAPPERS.sub("", name.removeprefix("model."))
