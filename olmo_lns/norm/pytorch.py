"""PyTorch backend of ``y = s * RMSNorm(x)``: no kernel of its own, exact on every device.

Two ways, one picked by the size of the input. The formula, differentiated automatically, is the fewest operations:
small inputs on CPU, and compilers, which fuse it. The hand-written backward works on blocks of rows that stay in the
cache and keeps only the input and one or two numbers a row, where automatic differentiation makes several passes and
keeps at least one more tensor of the size of the input.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

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

__all__ = [
    "Settings",
    "formula_grads",
    "fused_rms_norm",
    "in_functorch",
    "rms_norm",
    "rms_output_dtype",
    "rows_at_a_time",
    "takes_formula",
]

#: Elements a thread works on at a time: 512 kB of fp32, so that the passes over a block of rows find it in L2.
BLOCK_ELEMENTS = 131_072
#: Up to this many elements an input on CPU costs what its operations cost to launch, and the formula has fewer.
SMALL_ELEMENTS = 196_608
#: The same without gradients: nothing is kept, and the tensors of the formula stay in the cache longer.
SMALL_INFERENCE = 1_048_576
#: A factor below this is multiplied, not squared and divided by.
_SMALLEST_INSIDE = 1e-4


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    scale: float,
    *,
    bias: torch.Tensor | None = None,
    zero_centered: bool = False,
) -> torch.Tensor:
    """``scale * (x / rms(x) * weight + bias)``; see :func:`olmo_lns.norm.rms_norm`."""
    check_shapes(x, weight, bias)
    settings = Settings(eps, scale, zero_centered, rms_output_dtype(x, weight, bias))
    if takes_formula(x):
        return _rms_formula(x, weight, bias, settings)
    return _RMSNorm.apply(x, weight, bias, settings)


def fused_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    scale: float,
    *,
    bias: torch.Tensor | None = None,
    zero_centered: bool = False,
) -> torch.Tensor:
    """The same through ``torch.nn.functional.rms_norm``, a fused CUDA kernel since torch 2.9."""
    if not x.is_cuda:
        return rms_norm(x, weight, eps, scale, bias=bias, zero_centered=zero_centered)
    check_shapes(x, weight, bias)
    out = rms_output_dtype(x, weight, bias)
    dtype = kernel_dtype(x, out)
    # Autocast would run the kernel in fp32; mixed dtypes would fall back to the unfused formula.
    with without_autocast(x.device.type):
        gain = folded_gain(x, weight, scale, zero_centered=zero_centered, dtype=dtype)
        y = F.rms_norm(x.to(dtype), x.shape[-1:], gain, eps)
        if bias is not None:
            y = y + fold(bias, scale, dtype=compute_dtype(dtype))
        return y.to(out)


def rms_output_dtype(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.dtype:
    """Dtype of the result: what OLMo's RMSLayerNorm gives, but see :func:`~olmo_lns.norm.dtypes.output_dtype`."""
    base = x.dtype
    if weight is not None and weight.dtype != base:
        base = torch.promote_types(base, weight.dtype)
    if bias is not None and bias.dtype != base:
        base = torch.promote_types(base, bias.dtype)
    return output_dtype(base, x.device.type)


class Settings(NamedTuple):
    """What a norm is besides its tensors; ``out`` is the dtype of the result."""

    eps: float
    scale: float
    zero_centered: bool
    out: torch.dtype


def takes_formula(x: torch.Tensor) -> bool:
    """Whether the formula runs: Inductor fuses it and functorch transforms it, neither can see into our functions."""
    if torch.compiler.is_compiling():  # first, for no graph may depend on the size
        return True
    limit = SMALL_ELEMENTS if torch.is_grad_enabled() else SMALL_INFERENCE
    return (x.is_cpu and x.numel() <= limit) or in_functorch()


def in_functorch() -> bool:
    """Whether ``torch.func``'s jvp, vmap and the like are at work (unknown to Dynamo: not for compiled code)."""
    return torch._C._are_functorch_transforms_active()


def _rms_formula(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, settings: Settings
) -> torch.Tensor:
    """The definition, for small inputs, for compilers and for higher derivatives."""
    wide = cast(x, compute_dtype(x.dtype))
    y = wide * _scaled_inverse_rms(wide, settings.eps, settings.scale)
    if weight is not None:
        # A 16-bit weight is widened inside the product: one operation fewer in each direction than a cast before it.
        y = y * (cast(weight, wide.dtype) + 1.0 if settings.zero_centered else weight)
    if bias is not None:
        y = y + cast(bias, wide.dtype) * settings.scale
    return cast(y, settings.out)


def _scaled_inverse_rms(wide: torch.Tensor, eps: float, scale: float) -> torch.Tensor:
    """``scale / rms``: the factor goes into the one number a row, not into a pass over the result."""
    squares = wide.square()
    if torch.compiler.is_compiling() or scale < _SMALLEST_INSIDE:
        return torch.rsqrt(squares.mean(-1, keepdim=True) + eps) * scale
    # The same with everything inside the root. On a small input an operation with a Python number costs as much as
    # two on tensors, in either direction: here is one where there would be three.
    width, square = max(wide.shape[-1], 1), scale * scale
    start = torch.full((), eps / square, dtype=wide.dtype, device=wide.device)
    return torch.add(start, squares.sum(-1, keepdim=True), alpha=1.0 / (width * square)).rsqrt()


def rows_at_a_time(rows: torch.Tensor) -> int:
    """How many rows of a 2-D tensor to work on at a time: as many as the cache holds on CPU, all elsewhere."""
    count, width = rows.shape
    if rows.device.type == "cpu":
        count = BLOCK_ELEMENTS * torch.get_num_threads() // max(width, 1)
    return max(1, count)


class _RMSNorm(torch.autograd.Function):
    """The formula, keeping ``x``, the parameters and 1/rms (fp32, one a row) for the backward."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, settings: Settings
    ) -> torch.Tensor:
        eps, scale, zero_centered, out = settings
        rows, dtype = x.reshape(-1, x.shape[-1]), compute_dtype(x.dtype)
        y = torch.empty(rows.shape, dtype=out, device=x.device)
        rstd = torch.empty((rows.shape[0], 1), dtype=dtype, device=x.device)
        gain = None if weight is None else fold(weight, scale, zero_centered=zero_centered, dtype=dtype)
        shift = None if bias is None else fold(bias, scale, dtype=dtype)
        start, width = torch.full((), eps, dtype=dtype, device=x.device), max(x.shape[-1], 1)
        step = rows_at_a_time(rows)
        for block, target, r in zip(rows.split(step), y.split(step), rstd.split(step), strict=True):
            wide = cast(block, dtype)
            norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
            torch.addcmul(start, norm, norm, value=1.0 / width, out=r).rsqrt_()
            # Into the result, or, where that is of another dtype, into the copy that the input was widened to.
            result = torch.mul(
                wide,
                r * scale if gain is None else r,
                out=target if out == dtype else wide if wide is not block else None,
            )
            if gain is not None:
                result.mul_(gain)
            if shift is not None:
                result.add_(shift)
            if result is not target:  # another dtype: rounded once, here
                target.copy_(result)
        ctx.save_for_backward(x, weight, bias, rstd)
        ctx.settings = settings
        return y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, bias, rstd = ctx.saved_tensors
        with without_autocast(x.device.type):
            if torch.is_grad_enabled():  # create_graph: this backward is to be differentiated in its turn
                return (*formula_grads(ctx, x, weight, bias, dy, centered=False), None)
            return (*_rms_grads(x, weight, bias, rstd, dy, ctx.settings, ctx.needs_input_grad), None)


def _rms_grads(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    rstd: torch.Tensor,
    dy: torch.Tensor,
    settings: Settings,
    needed: tuple[bool, ...],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Gradients for input, weight and bias, in the dtype of each (None where not needed).

    With r = 1/rms(x), g = scale * weight and width D: ``dx = r * (dy*g) - x * r^3 / D * sum(dy*g*x)``,
    ``dweight = scale * sum_rows(dy * x * r)``, ``dbias = scale * sum_rows(dy)``.
    """
    _, scale, zero_centered, _ = settings
    width, dtype = x.shape[-1], rstd.dtype
    rows, grads = x.reshape(-1, width), dy.reshape(-1, width)
    gain = folded_gain(x, weight, scale, zero_centered=zero_centered, dtype=dtype)
    dx = torch.empty(rows.shape, dtype=x.dtype, device=x.device) if needed[0] else None
    dweight = torch.zeros(width, dtype=dtype, device=x.device) if needed[1] else None
    dbias = torch.zeros(width, dtype=dtype, device=x.device) if needed[2] else None
    step = rows_at_a_time(rows)
    targets = (None,) * len(rows.split(step)) if dx is None else dx.split(step)
    for block, g, r, target in zip(rows.split(step), grads.split(step), rstd.split(step), targets, strict=True):
        wide, g = cast(block, dtype), cast(g, dtype)
        product = wide * g
        # Sums over rows and over channels are matrix-vector products: one pass each, no temporary. A sum for
        # each block, added up afterwards, also rounds less than one long chain over all rows.
        if dweight is not None:
            dweight += product.t().mv(r.flatten())
        if dbias is not None:
            dbias += g.t().mv(torch.ones_like(r).flatten())
        if target is not None:
            dot = product.mv(gain).unsqueeze_(-1)
            result = torch.mul(g, gain, out=target if x.dtype == dtype else None).mul_(r)
            result.addcmul_(wide, dot.mul_(r.pow(3)), value=-1.0 / width)
            if result is not target:
                target.copy_(result)
    return (
        None if dx is None else dx.view(x.shape),
        None if dweight is None or weight is None else dweight.mul_(scale).to(weight.dtype),
        None if dbias is None or bias is None else dbias.mul_(scale).to(bias.dtype),
    )


def formula_grads(
    ctx: Any,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    dy: torch.Tensor,
    *,
    centered: bool,
) -> list[torch.Tensor | None]:
    """The gradients for input, weight and bias out of operations that can be differentiated again.

    Written out: to differentiate the formula here would be to follow what the tensors were made of, too.
    """
    eps, scale, zero_centered, _ = ctx.settings
    dtype = compute_dtype(x.dtype)
    wide, grad = cast(x, dtype), cast(dy, dtype)
    if centered:
        wide = wide - wide.mean(-1, keepdim=True)
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    normed, scaled = wide * rstd, grad * folded_gain(x, weight, scale, zero_centered=zero_centered, dtype=dtype)
    dx = scaled - normed * (scaled * normed).mean(-1, keepdim=True)
    if centered:
        dx = dx - scaled.mean(-1, keepdim=True)
    sums = (each.reshape(-1, x.shape[-1]).sum(0) * scale for each in (grad * normed, grad))
    return [
        cast(gradient, tensor.dtype) if tensor is not None and need else None
        for gradient, tensor, need in zip((dx * rstd, *sums), (x, weight, bias), ctx.needs_input_grad, strict=False)
    ]
