"""Dtypes of a norm's input and output, and the multiplication of the factor into the weight."""

from __future__ import annotations

import contextlib

import torch

from olmo_lns.arguments import DTYPES as NAMES
from olmo_lns.errors import LNSConfigError

#: Dtypes of weights, by their names on a command line.
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, full) for name, full in NAMES.items()}
#: Read once, at import: before torch 2.8 Dynamo cannot trace the call.
_AUTOCAST_DEVICES = frozenset(
    device for device in ("cpu", "cuda", "mps", "xpu", "hpu", "xla") if torch.amp.is_autocast_available(device)
)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of statistics and products: fp64 for fp64 input, otherwise fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _under_autocast(x: torch.Tensor) -> bool:
    return x.device.type in _AUTOCAST_DEVICES and torch.is_autocast_enabled(x.device.type)


def autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    """Return the dtype of autocast on the device of ``x``, or None if autocast is off."""
    return torch.get_autocast_dtype(x.device.type) if _under_autocast(x) else None


def without_autocast(x: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """Switch autocast off if it is on. A needless ``torch.autocast`` costs more than a small norm."""
    return torch.autocast(x.device.type, enabled=False) if _under_autocast(x) else contextlib.nullcontext()


def output_dtype(x: torch.Tensor, *parameters: torch.Tensor | None, subtracts_mean: bool) -> torch.dtype:
    """Return the dtype of the upstream norm's result.

    torch's LayerNorm returns the dtype of ``x``, and fp32 under autocast except on a CPU. OLMo's and Llama's RMSNorm
    multiply by the parameters and promote to their dtype.
    """
    if subtracts_mean:
        wide = x.device.type != "cpu" and x.dtype != torch.float64 and _under_autocast(x)
        return torch.float32 if wide else x.dtype
    base = x.dtype
    for parameter in parameters:
        if parameter is not None:
            base = torch.promote_types(base, parameter.dtype)
    return base


def scaled_parameter(
    parameter: torch.Tensor, scale: float, *, dtype: torch.dtype, zero_centered: bool = False
) -> torch.Tensor:
    """Return ``scale * parameter`` (zero-centered: ``scale * (parameter + 1)``), computed in fp32, cast to ``dtype``.

    The result is not cached: the optimizer changes ``parameter`` in place.
    """
    if parameter.dtype == dtype and not zero_centered and not torch.compiler.is_compiling():
        return parameter * scale  # a Python float times 16-bit numbers is computed in fp32 and rounded once
    wide = parameter.to(compute_dtype(dtype))
    return ((wide + 1.0 if zero_centered else wide) * scale).to(dtype)


def scaled_gain(
    x: torch.Tensor, weight: torch.Tensor | None, scale: float, *, zero_centered: bool, dtype: torch.dtype
) -> torch.Tensor:
    """Return :func:`scaled_parameter` of ``weight``; for None, a vector of ``scale`` as wide as ``x``."""
    if weight is not None:
        return scaled_parameter(weight, scale, dtype=dtype, zero_centered=zero_centered)
    if torch.compiler.is_compiling():  # the factor may be a tensor, which full does not accept
        return (torch.ones(x.shape[-1], dtype=compute_dtype(dtype), device=x.device) * scale).to(dtype)
    return torch.full(x.shape[-1:], scale, dtype=dtype, device=x.device)


def check_shapes(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> None:
    """Refuse shapes that broadcasting would accept silently.

    :raises LNSConfigError: if ``x`` has no last dimension or is not floating point, or a parameter does not have one
        number for each channel.
    """
    shape = x.shape[-1:]
    if not shape or not x.is_floating_point():
        raise LNSConfigError(
            f"The input of a norm has shape {tuple(x.shape)} and dtype {x.dtype}. Expected a floating dtype and the "
            "shape (..., width). Pass hidden states, not token ids."
        )
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and parameter.shape != shape:
            raise LNSConfigError(
                f"The {name} of a norm has shape {tuple(parameter.shape)}, but its input has shape {tuple(x.shape)}. "
                f"Expected a {name} of shape ({x.shape[-1]},). Build the norm with the width of its input."
            )
