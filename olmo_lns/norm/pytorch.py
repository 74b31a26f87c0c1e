"""PyTorch backend of ``y = s * Norm(x)``: torch's own norms, with the factor folded into gain and bias.

On CUDA they are fused kernels, elsewhere torch's formula, in fp32 for 16-bit input: its LayerNorm on CPU would sum the
parameters' gradients in 16 bits, 7 % off over 8192 rows. Automatic differentiation does the rest.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from packaging.version import Version

from olmo_lns.norm.dtypes import (
    cast,
    check_shapes,
    compute_dtype,
    fold,
    folded_gain,
    kernel_dtype,
    output_dtype,
    without_autocast,
)

__all__ = ["has_fused_rms_norm", "layer_norm", "rms_norm", "rms_output_dtype"]


def has_fused_rms_norm() -> bool:
    """Whether this torch's ``rms_norm`` is one kernel on CUDA, forward and backward."""
    return torch.version.hip is None and Version(torch.__version__) >= Version("2.9")


_FUSED = has_fused_rms_norm()


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float | torch.Tensor,
    scale: float,
    *,
    bias: torch.Tensor | None = None,
    zero_centered: bool = False,
) -> torch.Tensor:
    """``scale * (x / rms(x) * weight + bias)``; see :func:`olmo_lns.norm.rms_norm`."""
    check_shapes(x, weight, bias)
    out = rms_output_dtype(x, weight, bias)
    fused = x.is_cuda and _FUSED and not isinstance(eps, torch.Tensor)
    dtype = kernel_dtype(x, out) if fused else compute_dtype(x.dtype)
    # Autocast would run the kernel in fp32; mixed dtypes would fall back to the formula, which rounds before the gain.
    with without_autocast(x.device.type):
        gain = folded_gain(x, weight, scale, zero_centered=zero_centered, dtype=dtype)
        wide = cast(x, dtype)
        if isinstance(eps, torch.Tensor):
            y = _written_out(wide, gain, eps)
        else:
            y = F.rms_norm(wide, x.shape[-1:], gain, eps)
        if bias is not None:
            y = y + fold(bias, scale, dtype=compute_dtype(dtype))
        return cast(y, out)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float | torch.Tensor,
    scale: float,
    *,
    zero_centered: bool = False,
) -> torch.Tensor:
    """``scale * LayerNorm(x)``; see :func:`olmo_lns.norm.layer_norm`."""
    check_shapes(x, weight, bias)
    out = output_dtype(x.dtype, x.device.type)
    dtype = x.dtype if x.is_cuda and not isinstance(eps, torch.Tensor) else compute_dtype(x.dtype)
    with without_autocast(x.device.type):
        gain = folded_gain(x, weight, scale, zero_centered=zero_centered, dtype=dtype)
        shift = None if bias is None else fold(bias, scale, dtype=dtype)
        wide = cast(x, dtype)
        if isinstance(eps, torch.Tensor):
            y = _written_out(wide - wide.mean(-1, keepdim=True), gain, eps)
            y = y if shift is None else y + shift
        else:
            y = F.layer_norm(wide, x.shape[-1:], gain, shift, eps)
        return cast(y, out)


def rms_output_dtype(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.dtype:
    """Dtype of the result: what OLMo's RMSLayerNorm gives, but see :func:`~olmo_lns.norm.dtypes.output_dtype`."""
    base = x.dtype
    for parameter in (weight, bias):
        if parameter is not None:
            base = torch.promote_types(base, parameter.dtype)
    return output_dtype(base, x.device.type)


def _written_out(wide: torch.Tensor, gain: torch.Tensor, eps: torch.Tensor) -> torch.Tensor:
    """The definition, for compilers and an eps that their graph is not to hold: torch's norms take a number."""
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * gain
