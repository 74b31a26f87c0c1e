"""PyTorch backend of ``y = s * Norm(x)``."""

from __future__ import annotations

import torch
import torch.nn.functional as F

__all__ = ["layer_norm", "rms_norm"]


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    scale: float,
    *,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """``scale * (RMSNorm(x) * weight + bias)``."""
    with torch.autocast(enabled=False, device_type=x.device.type):
        wide = x.float()
        y = (wide * (torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * scale)).to(x.dtype)
    if weight is not None:
        y = weight * y
    if bias is not None:
        y = y + bias * scale
    return y


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    scale: float,
) -> torch.Tensor:
    """``scale * LayerNorm(x)``."""
    return scale * F.layer_norm(x, x.shape[-1:], weight, bias, eps)
