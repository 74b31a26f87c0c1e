"""PyTorch backend of ``y = s * LayerNorm(x)``: torch's own kernel with the factor folded into its parameters."""

from __future__ import annotations

from typing import Any

import torch

from olmo_lns.norm.dtypes import (
    autocast_dtype,
    cast,
    check_shapes,
    compute_dtype,
    fold,
    folded_gain,
    output_dtype,
    without_autocast,
)
from olmo_lns.norm.pytorch import Settings, formula_grads, rows_at_a_time, takes_formula

__all__ = ["layer_norm"]

#: Up to this many elements, a product over LayerNorm's result is cheaper than one over each of its parameters.
_SMALL_PRODUCT = 65_536
_SIXTEEN_BITS = (torch.bfloat16, torch.float16)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    scale: float,
    *,
    zero_centered: bool = False,
) -> torch.Tensor:
    """``scale * LayerNorm(x)``; see :func:`olmo_lns.norm.layer_norm`."""
    check_shapes(x, weight, bias)
    if not zero_centered and _is_plain(x, weight, bias):
        return _plain(x, weight, bias, eps, scale)
    settings = Settings(eps, scale, zero_centered, output_dtype(x.dtype, x.device.type))
    if x.dtype in _SIXTEEN_BITS and x.is_cpu and torch.is_grad_enabled():
        # torch's CPU kernel sums the parameters' gradients in 16 bits: 7 % off over 8192 rows.
        if not takes_formula(x):
            return _SixteenBitLayerNorm.apply(x, weight, bias, settings)
        x = x.float()
    return _layer_formula(x, weight, bias, settings)


def _is_plain(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> bool:
    """fp32 on CPU from beginning to end, not compiled: nothing to cast."""
    return (
        x.is_cpu
        and x.dtype == torch.float32
        and (weight is None or weight.dtype == torch.float32)
        and (bias is None or bias.dtype == torch.float32)
        and not torch.compiler.is_compiling()
        and autocast_dtype("cpu") is None
    )


def _plain(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, scale: float
) -> torch.Tensor:
    """The fewest operations that can carry the factor: one product, or one for each parameter."""
    # On a small tensor a product with a Python number costs twice what one with a tensor does.
    factor = torch.full((), scale, dtype=torch.float32, device=x.device)
    if weight is None or (bias is not None and x.numel() <= _SMALL_PRODUCT):
        return torch.layer_norm(x, x.shape[-1:], weight, bias, eps) * factor
    return torch.layer_norm(x, x.shape[-1:], weight * factor, None if bias is None else bias * factor, eps)


def _layer_formula(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, settings: Settings
) -> torch.Tensor:
    """torch's kernel with the factor folded into its parameters."""
    eps, scale, zero_centered, out = settings
    dtype = compute_dtype(x.dtype) if x.device.type == "cpu" else x.dtype  # CUDA's kernel takes one dtype only
    with without_autocast(x.device.type):
        gain = folded_gain(x, weight, scale, zero_centered=zero_centered, dtype=dtype)
        shift = None if bias is None else fold(bias, scale, dtype=dtype)
        if isinstance(eps, torch.Tensor):
            return cast(_written_out(x, gain, shift, eps), out)
        return cast(torch.layer_norm(x, x.shape[-1:], gain, shift, eps), out)


def _written_out(x: torch.Tensor, gain: torch.Tensor, shift: torch.Tensor | None, eps: torch.Tensor) -> torch.Tensor:
    """The definition, for compilers and an eps that their graph is not to hold: torch's kernel takes a number."""
    wide = cast(x, compute_dtype(x.dtype))
    wide = wide - wide.mean(-1, keepdim=True)
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * gain
    return y if shift is None else y + shift


class _SixteenBitLayerNorm(torch.autograd.Function):
    """LayerNorm of 16-bit numbers on CPU: torch's kernels, the backward over blocks of rows in fp32."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, settings: Settings
    ) -> torch.Tensor:
        eps, scale, zero_centered, out = settings
        gain = folded_gain(x, weight, scale, zero_centered=zero_centered, dtype=torch.float32)
        shift = None if bias is None else fold(bias, scale, dtype=torch.float32)
        y, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], gain, shift, eps)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.settings = settings
        return y.to(out)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, bias, mean, rstd = ctx.saved_tensors
        _, scale, zero_centered, _ = ctx.settings
        with without_autocast(x.device.type):
            if torch.is_grad_enabled():
                return (*formula_grads(ctx, x, weight, bias, dy, centered=True), None)
            shape, gain = x.shape[-1:], folded_gain(x, weight, scale, zero_centered=zero_centered, dtype=torch.float32)
            rows, dx = x.reshape(-1, *shape), torch.empty(x.shape, dtype=x.dtype)
            tensors = (rows, dy.reshape(-1, *shape), mean.view(-1, 1), rstd.view(-1, 1), dx.view(-1, *shape))
            sums: list[Any] = [None, None]
            for block, g, m, r, target in zip(*(t.split(rows_at_a_time(rows)) for t in tensors), strict=True):
                d, *parts = torch.ops.aten.native_layer_norm_backward(
                    g.float(), block.float(), shape, m, r, gain, gain, [True, *ctx.needs_input_grad[1:3]]
                )
                target.copy_(d)
                sums = [part if total is None else total.add_(part) for total, part in zip(sums, parts, strict=True)]
        dweight, dbias = (
            total.mul_(scale).to(parameter.dtype) if need else None
            for total, parameter, need in zip(sums, (weight, bias), ctx.needs_input_grad[1:3], strict=True)
        )
        return dx if ctx.needs_input_grad[0] else None, dweight, dbias, None
