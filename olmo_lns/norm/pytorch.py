"""PyTorch backend of ``y = s * Norm(x)``: no kernel of its own, exact on every device.

The hand-written backward keeps only the input and one number a row; automatic differentiation of
the formula keeps at least one more tensor of the size of the input.
"""

from __future__ import annotations

from typing import Any, Iterator, NamedTuple

import torch
import torch.nn.functional as F

from olmo_lns.norm.dtypes import check_shapes, compute_dtype, fold, folded_gain, kernel_dtype, output_dtype

__all__ = ["fused_rms_norm", "in_functorch", "layer_norm", "rms_norm", "rms_output_dtype"]

#: Elements a thread works on at a time: 512 kB of fp32, so that the passes over a block of rows find it in L2.
BLOCK_ELEMENTS = 131_072


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
    out = rms_output_dtype(x, weight, bias)
    settings = _Settings(eps, scale, zero_centered, False, out)
    return _Norm.apply(x, weight, bias, settings) if _eager() else _formula(x, weight, bias, settings)


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
    with torch.autocast(x.device.type, enabled=False):
        gain = folded_gain(x, weight, scale, zero_centered=zero_centered, dtype=dtype)
        y = F.rms_norm(x.to(dtype), x.shape[-1:], gain, eps)
        if bias is not None:
            y = y + fold(bias, scale, dtype=compute_dtype(dtype))
        return y.to(out)


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
    out = output_dtype(x.dtype, x.device.type)
    if x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16) and _eager():
        # torch's CPU kernel sums the parameters' gradients in 16 bits: 7 % off over 8192 rows.
        return _Norm.apply(x, weight, bias, _Settings(eps, scale, zero_centered, True, out))
    dtype = compute_dtype(x.dtype) if x.device.type == "cpu" else x.dtype  # CUDA's kernel takes one dtype only
    with torch.autocast(x.device.type, enabled=False):
        gain = folded_gain(x, weight, scale, zero_centered=zero_centered, dtype=dtype)
        shift = None if bias is None else fold(bias, scale, dtype=dtype)
        return F.layer_norm(x, x.shape[-1:], gain, shift, eps).to(out)


def rms_output_dtype(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.dtype:
    """Dtype of the result: what OLMo's RMSLayerNorm gives, but see :func:`~olmo_lns.norm.dtypes.output_dtype`."""
    base = x.dtype
    for parameter in (weight, bias):
        if parameter is not None:
            base = torch.promote_types(base, parameter.dtype)
    return output_dtype(base, x.device.type)


class _Settings(NamedTuple):
    eps: float
    scale: float
    zero_centered: bool
    subtract_mean: bool  # LayerNorm is RMSNorm of the centred input
    out: torch.dtype


def _eager() -> bool:
    """Inductor fuses the plain formula and functorch transforms it; neither can see into ``_Norm``."""
    return not (torch.compiler.is_compiling() or in_functorch())


def in_functorch() -> bool:
    """Whether ``torch.func``'s jvp, vmap and the like are at work (unknown to Dynamo: not for compiled code)."""
    return torch._C._are_functorch_transforms_active()


def _formula(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, settings: _Settings
) -> torch.Tensor:
    """The definition, for compilers and for higher derivatives."""
    wide = x.to(compute_dtype(x.dtype))
    if settings.subtract_mean:
        wide = wide - wide.mean(-1, keepdim=True)
    # The factor goes into the one number a row, not into a pass over the result.
    y = wide * (torch.rsqrt(wide.square().mean(-1, keepdim=True) + settings.eps) * settings.scale)
    if weight is not None:
        gain = weight.to(wide.dtype)
        y = y * (gain + 1.0 if settings.zero_centered else gain)
    if bias is not None:
        y = y + bias.to(wide.dtype) * settings.scale
    return y.to(settings.out)


def _row_blocks(x: torch.Tensor) -> Iterator[slice]:
    """Slices over the rows of a 2-D ``x``: cache-sized on CPU, everything at once elsewhere."""
    rows, width = x.shape
    step = rows
    if x.device.type == "cpu":
        step = max(1, BLOCK_ELEMENTS * torch.get_num_threads() // max(width, 1))
    for start in range(0, rows, max(step, 1)):
        yield slice(start, start + step)


class _Norm(torch.autograd.Function):
    """The formula, keeping ``x``, the parameters and 1/rms (fp32, one a row) for the backward."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, settings: _Settings
    ) -> torch.Tensor:
        eps, scale, zero_centered, subtract_mean, out = settings
        rows, dtype = x.reshape(-1, x.shape[-1]), compute_dtype(x.dtype)
        y = torch.empty(rows.shape, dtype=out, device=x.device)
        rstd = torch.empty((rows.shape[0], 1), dtype=dtype, device=x.device)
        gain = None if weight is None else folded_gain(x, weight, 1.0, zero_centered=zero_centered, dtype=dtype)
        shift = None if bias is None else fold(bias, scale, dtype=dtype)
        for block in _row_blocks(rows):
            wide = _centred(rows[block].to(dtype), subtract_mean)
            norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
            r = torch.rsqrt(norm.square_().div_(wide.shape[-1]).add_(eps), out=rstd[block])
            target = y[block]
            result = torch.mul(wide, r * scale, out=target if out == dtype else None)
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
        with torch.autocast(x.device.type, enabled=False):
            if torch.is_grad_enabled():  # create_graph: this backward is to be differentiated in its turn
                return (*_formula_grads(x, weight, bias, dy, ctx.settings, ctx.needs_input_grad), None)
            return (*_grads(x, weight, bias, rstd, dy, ctx.settings, ctx.needs_input_grad), None)


def _centred(wide: torch.Tensor, subtract_mean: bool) -> torch.Tensor:
    return wide - wide.mean(-1, keepdim=True) if subtract_mean else wide


def _grads(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    rstd: torch.Tensor,
    dy: torch.Tensor,
    settings: _Settings,
    needed: tuple[bool, ...],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Gradients for input, weight and bias, in the dtype of each (None where not needed).

    With c the input (centred for LayerNorm), r = 1/rms(c), g = scale * weight and width D:
    ``dc = r * (dy*g) - c * r^3 / D * sum(dy*g*c)``, ``dx = dc`` (LayerNorm: minus its mean),
    ``dweight = scale * sum_rows(dy * c * r)``, ``dbias = scale * sum_rows(dy)``.
    """
    _, scale, zero_centered, subtract_mean, _ = settings
    width, dtype = x.shape[-1], rstd.dtype
    rows, grads = x.reshape(-1, width), dy.reshape(-1, width)
    gain = folded_gain(x, weight, scale, zero_centered=zero_centered, dtype=dtype)
    dx = torch.empty(rows.shape, dtype=x.dtype, device=x.device) if needed[0] else None
    dweight = torch.zeros(width, dtype=dtype, device=x.device) if needed[1] else None
    dbias = torch.zeros(width, dtype=dtype, device=x.device) if needed[2] else None
    for block in _row_blocks(rows):
        wide, g, r = _centred(rows[block].to(dtype), subtract_mean), grads[block].to(dtype), rstd[block]
        product = wide * g
        # Sums over rows and over channels are matrix-vector products: one pass each, no temporary. A sum for
        # each block, added up afterwards, also rounds less than one long chain over all rows.
        if dweight is not None:
            dweight += product.t().mv(r.flatten())
        if dbias is not None:
            dbias += g.t().mv(torch.ones_like(r).flatten())
        if dx is not None:
            dot = product.mv(gain).unsqueeze_(-1)
            target = dx[block]
            dc = torch.mul(g, gain, out=target if x.dtype == dtype else None).mul_(r)
            dc.addcmul_(wide, dot.mul_(r.pow(3)), value=-1.0 / width)
            if subtract_mean:
                dc.sub_(dc.mean(-1, keepdim=True))
            if dc is not target:
                target.copy_(dc)
    return (
        None if dx is None else dx.view(x.shape),
        None if dweight is None or weight is None else dweight.mul_(scale).to(weight.dtype),
        None if dbias is None or bias is None else dbias.mul_(scale).to(bias.dtype),
    )


def _formula_grads(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    dy: torch.Tensor,
    settings: _Settings,
    needed: tuple[bool, ...],
) -> list[torch.Tensor | None]:
    """The same gradients by differentiating the formula, with a graph of their own."""
    wanted = [t if need else None for t, need in zip((x, weight, bias), needed, strict=False)]
    inputs = [t for t in wanted if t is not None]
    grads = iter(torch.autograd.grad(_formula(x, weight, bias, settings), inputs, dy, create_graph=True))
    return [None if t is None else next(grads) for t in wanted]
