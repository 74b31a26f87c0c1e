"""The norms by their definition, in fp64, without any code of the package."""

import torch


def norm(kind, x, weight, bias, eps, scale, zero_centered=False):
    """``scale * (u * weight + bias)`` in fp64, differentiable: u is x / rms(x) for "rms", else (x - mean) / std."""
    wide = x.double()
    if kind != "rms":
        wide = wide - wide.mean(-1, keepdim=True)
    unit = wide / torch.sqrt((wide * wide).mean(-1, keepdim=True) + eps)
    if weight is not None:
        unit = unit * (weight.double() + (1.0 if zero_centered else 0.0))
    return (unit if bias is None else unit + bias.double()) * scale


def ours(kind, x, weight, bias, eps, scale, **how):
    """The package's norm, called in the same way."""
    from olmo_lns.norm import layer_norm, rms_norm

    if kind == "rms":
        return rms_norm(x, weight, eps, scale, bias=bias, **how)
    return layer_norm(x, weight, bias, eps, scale, **how)


def tensors(shape, x_dtype, p_dtype, affine="weight+bias", device="cpu"):
    """x, weight and bias, random, the last two None where ``affine`` does not name them."""
    torch.manual_seed(0)
    x = (torch.randn(shape, device=device) * 3 + 0.5).to(x_dtype).requires_grad_()
    weight = (torch.rand(shape[-1], device=device) + 0.5).to(p_dtype).requires_grad_() if "weight" in affine else None
    bias = torch.randn(shape[-1], device=device).to(p_dtype).requires_grad_() if "bias" in affine else None
    return x, weight, bias


def grads(y, inputs, dy):
    """Gradients of ``sum(y * dy)`` for those inputs that are not None, in fp64."""
    present = [t for t in inputs if t is not None]
    return [g.double() for g in torch.autograd.grad(y, present, dy.to(y.dtype), retain_graph=True)]


def compared(kind, inputs, eps, scale, *, zero_centered=False, autocast=False, **how):
    """The package's output and fp64's, and of each input that is not None the relative error of its gradient."""
    with torch.autocast(inputs[0].device.type, dtype=torch.bfloat16, enabled=autocast):
        y = ours(kind, *inputs, eps, scale, zero_centered=zero_centered, **how)
    expected = norm(kind, *inputs, eps, scale, zero_centered)
    dy = torch.randn(y.shape, device=y.device).to(y.dtype)
    present, found, wanted = [t for t in inputs if t is not None], grads(y, inputs, dy), grads(expected, inputs, dy)
    return y, expected, [(t, relative_error(*pair)) for t, *pair in zip(present, found, wanted, strict=True)]


def relative_error(value, expected):
    """Frobenius norm of the difference over that of ``expected``."""
    expected = expected.double()
    return ((value.double() - expected).norm() / expected.norm().clamp_min(1e-300)).item()


def worst_rounding(value, expected):
    """Largest elementwise error in halves of the last place of ``value``'s dtype: 1.0 is one perfect rounding."""
    info = torch.finfo(value.dtype)
    expected = expected.double()
    room = (expected.abs() * (info.eps / 2)).clamp_min(info.smallest_normal)
    return ((value.double() - expected).abs() / room).max().item() if value.numel() else 0.0
