"""Multiply a scheme's factors into the weights of a built model, in place.

``s * N(x)`` is ``N(x)`` with gain and bias times ``s``. A zero-centred norm stores its gain less one, which becomes
``s * (1 + g) - 1``. A norm without a gain is followed by linear layers, and their weights are multiplied. Products are
in fp64 and are rounded once, to the dtype of the weight that is written.
"""

from __future__ import annotations

import copy
from typing import Any, Iterable, Mapping, Sequence

import torch
from torch import nn

from olmo_lns.errors import LNSConfigError, MeasurementError
from olmo_lns.schemes import Scheme

#: Factor of a whole parameter, or fp64 (rows,) with one for each of its rows.
Factor = float | torch.Tensor


def multiplied(data: torch.Tensor, factor: Factor, dtype: torch.dtype | None, shift: float = 0.0) -> torch.Tensor:
    """Return ``(data + shift) * factor - shift``, computed in fp64 and rounded once.

    :param data: any shape. :param factor: dimensionless; a tensor has one value for each row of ``data``.
    :param dtype: of the result, None: as ``data``. :param shift: 1.0 for a zero-centred gain.

    Example: ``multiplied(gain, 0.5, torch.bfloat16)``.
    """
    if isinstance(factor, torch.Tensor):
        factor = factor.reshape(-1, *[1] * (data.dim() - 1))
    return ((data.double() + shift) * factor - shift).to(dtype or data.dtype)


@torch.no_grad()
def multiply(module: nn.Module, factor: Factor, dtype: torch.dtype | None, *, bias: bool = True) -> None:
    """Multiply the weight of a linear layer in place. :param bias: also its bias, as for a branch's last projection."""
    for name, parameter in module.named_parameters(recurse=False):
        if name == "weight" or bias:
            parameter.data = multiplied(parameter.data, factor, dtype)


@torch.no_grad()
def fold_norm(norm: Any, dtype: torch.dtype | None = None, *, where: str, readers: Sequence[nn.Module] = ()) -> None:
    """Fold the factor of a scaled norm into its gain and bias, in place, and measure that it gives what it gave.

    :param norm: a :class:`~olmo_lns.sites.Scaled`; its factor is 1 afterwards.
    :param readers: linear layers that read a norm without a gain; the factor goes into their weights.
    :raises LNSConfigError: a norm without a gain whose readers are unknown.
    :raises MeasurementError: the norm computes something else after it. It is left as it was.
    """
    factor, own = norm.lns_scale, dict(norm.named_parameters(recurse=False))
    if not own and not readers and factor != 1.0:
        raise LNSConfigError(f"{where}: {type(norm).__name__} has no gain, and nothing is known to read its output.")
    for reader in readers if not own else ():
        multiply(reader, factor, dtype, bias=False)
    if not own:
        _set_factor(norm, 1.0)
        return
    before, kept = _output(norm, own), {name: parameter.data for name, parameter in own.items()}
    _set_factor(norm, 1.0)
    for centre in (0.0, 1.0):
        for name, parameter in own.items():
            shift = 0.0 if "bias" in name or "beta" in name else centre
            parameter.data = multiplied(kept[name], factor, dtype, shift)
            check_finite([(f"{where}.{name}", parameter)])
        rounding = max(torch.finfo(parameter.dtype).eps for parameter in own.values())
        if float((_output(norm, own) - before).abs().max()) <= max(1e-5, 2 * rounding) * float(before.abs().max()):
            return
    _set_factor(norm, factor)
    for name, parameter in own.items():
        parameter.data = kept[name]
    raise MeasurementError(
        f"{where}: {type(norm).__name__} with its gain and bias times {factor:.4g} isn't {factor:.4g} times what it "
        "was. Expected a norm with a gain, zero-centred or not."
    )


def _set_factor(norm: Any, factor: float) -> None:
    norm.lns_scale, norm.lns_scale_tensor = factor, torch.tensor(factor, dtype=torch.float64)


def _output(norm: Any, own: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The norm's output for random rows, in fp32 on the CPU."""
    width = next(iter(own.values())).shape[-1]
    x = torch.randn(4, width, generator=torch.Generator().manual_seed(0))
    output: torch.Tensor = copy.deepcopy(norm).float().cpu()(x)
    return output


def fold_scaled(model: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Fold the factor of every scaled norm of a model in place; it has no sites afterwards.

    :param dtype: of the parameters that are changed, None: their own.
    :raises LNSConfigError: two norms share a gain, or as :func:`fold_norm`.

    Example: ``fold_scaled(model)``.
    """
    found = {name: module for name, module in model.named_modules() if "lns_scale" in vars(module)}
    gains = [id(parameter) for module in found.values() for parameter in module.parameters(recurse=False)]
    if len(set(gains)) != len(gains):
        raise LNSConfigError(f"{type(model).__name__}: two blocks share a norm's gain, which has room for one factor.")
    for name, module in found.items():
        fold_norm(module, dtype, where=name)
        vars(module).pop("lns_sites", None)


def require_foldable(scheme: Scheme, n_layers: int, source: object, otherwise: str = "") -> None:
    """:param otherwise: a sentence that says what to do instead.

    :raises LNSConfigError: no weights of a Pre-LN model hold the scheme.
    """
    for _, _, plan in scheme.plans(n_layers):
        problem = ""
        if plan.post:
            problem = "its norms sit on the sums, and no weight of a Pre-LN block can undo a norm"
        elif plan.branch:
            problem = "it normalises the branches, which a Pre-LN block does not"
        elif plan.groups != 1:
            problem = "its norms take statistics over groups of channels"
        elif plan.pre_scale != 1.0 or plan.stream_scale != 1.0:
            problem = "it equals Pre-LN only up to the eps of the norms"
        elif not plan.folds_into_pre_ln:
            problem = "it weighs the shortcut, which a Pre-LN block does not"
        if problem:
            title = f"{scheme.definition.title} ({scheme})"
            raise LNSConfigError(f"{source}: {title} cannot be folded into a stock model: {problem}.{otherwise}")


def check_finite(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """:raises LNSConfigError: a value is NaN or infinite; it says how many are."""
    for name, tensor in tensors:
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            bad = int((~torch.isfinite(tensor)).sum())
            raise LNSConfigError(
                f"{name} holds NaN or infinite values ({bad} of {tensor.numel()}). Expected finite weights: those of "
                "an earlier checkpoint, or a dtype that holds them (bf16 or fp32)."
            )
