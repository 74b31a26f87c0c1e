"""The norms by their definition, in fp64, by a route that shares nothing with the package."""

from __future__ import annotations

import torch


def rms_norm(x, weight, eps, scale, bias=None, zero_centered=False):
    """``scale * (x / sqrt(mean(x^2) + eps) * weight + bias)`` in fp64, differentiable."""
    wide = x.double()
    return _affine(wide / torch.sqrt((wide * wide).mean(-1, keepdim=True) + eps), weight, bias, zero_centered) * scale


def layer_norm(x, weight, bias, eps, scale, zero_centered=False):
    """``scale * ((x - mean) / sqrt(var + eps) * weight + bias)`` in fp64, differentiable."""
    wide = x.double()
    centred = wide - wide.mean(-1, keepdim=True)
    unit = centred / torch.sqrt((centred * centred).mean(-1, keepdim=True) + eps)
    return _affine(unit, weight, bias, zero_centered) * scale


def _affine(unit, weight, bias, zero_centered):
    if weight is not None:
        unit = unit * (weight.double() + (1.0 if zero_centered else 0.0))
    return unit if bias is None else unit + bias.double()


def grads(y, inputs, dy):
    """Gradients of ``sum(y * dy)`` for those inputs that are not None, in fp64."""
    present = [t for t in inputs if t is not None]
    return [g.double() for g in torch.autograd.grad(y, present, dy.to(y.dtype), retain_graph=True)]


def relative_error(value, expected):
    """Frobenius norm of the difference over that of ``expected``."""
    expected = expected.double()
    return ((value.double() - expected).norm() / expected.norm().clamp_min(1e-300)).item()


def worst_rounding(value, expected):
    """Largest elementwise error in units of the last place's half of ``value``'s dtype: 1.0 is one perfect rounding."""
    info = torch.finfo(value.dtype)
    expected = expected.double()
    room = (expected.abs() * (info.eps / 2)).clamp_min(info.smallest_normal)
    return ((value.double() - expected).abs() / room).max().item() if value.numel() else 0.0
