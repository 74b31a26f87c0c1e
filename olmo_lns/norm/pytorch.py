"""PyTorch backend of ``y = s * Norm(x)``: torch's own norms, with the factor in gain and bias.

CUDA uses fused kernels where torch has them. Elsewhere 16-bit input is computed in fp32, because torch's LayerNorm on a
CPU sums the parameters' gradients in 16 bits (7 % off over 8192 rows). Automatic differentiation does the rest.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from packaging.version import Version

from olmo_lns.norm.dtypes import (
    check_shapes,
    compute_dtype,
    output_dtype,
    scaled_gain,
    scaled_parameter,
    without_autocast,
)


def has_fused_rms_norm() -> bool:
    """Return true if this torch's ``rms_norm`` is one kernel on CUDA, forward and backward."""
    return torch.version.hip is None and Version(torch.__version__) >= Version("2.9")


_FUSED = has_fused_rms_norm()


def norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    scale: float,
    *,
    subtracts_mean: bool,
    zero_centered: bool,
) -> torch.Tensor:
    """Compute :func:`olmo_lns.norm.layer_norm` if ``subtracts_mean``, else :func:`olmo_lns.norm.rms_norm`."""
    check_shapes(x, weight, bias)
    out = output_dtype(x, weight, bias, subtracts_mean=subtracts_mean)
    dtype = torch.promote_types(x.dtype, out) if x.is_cuda and (subtracts_mean or _FUSED) else compute_dtype(x.dtype)
    # Autocast would run the kernel in fp32; mixed dtypes would use the formula, which rounds before the gain.
    with without_autocast(x):
        gain, wide = scaled_gain(x, weight, scale, zero_centered=zero_centered, dtype=dtype), x.to(dtype)
        if subtracts_mean:
            shift = None if bias is None else scaled_parameter(bias, scale, dtype=dtype)
            return F.layer_norm(wide, x.shape[-1:], gain, shift, eps).to(out)
        y = F.rms_norm(wide, x.shape[-1:], gain, eps)
        if bias is not None:
            y = y + scaled_parameter(bias, scale, dtype=compute_dtype(dtype))
        return y.to(out)
