"""Transformer Engine backend: the factor in gamma of TE's fused norm kernels.

The kernels are called through custom operators, and not through TE's modules. TE's modules read their weight again in
the backward pass. If a gamma were swapped for the forward only, the gradients would be wrong.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from dataclasses import dataclass
from typing import Any, Iterator, Optional

import torch
from packaging.version import InvalidVersion, Version

from olmo_lns.norm import pytorch
from olmo_lns.norm.dtypes import check_shapes, output_dtype, scaled_gain, scaled_parameter

#: Oldest supported and first unsupported release: the kernels' signatures are the same in 2.1, 2.5, 2.11 and 2.20.
SUPPORTED = (Version("2.1"), Version("3"))
#: Types of the devices whose tensors the kernels take.
DEVICE_TYPES = {"cuda"}
_KERNEL_DTYPES = {torch.float32: "kFloat32", torch.bfloat16: "kBFloat16", torch.float16: "kFloat16"}


@dataclass(frozen=True)
class Availability:
    """The outcome of importing Transformer Engine: its version, and the reason against its use (None if usable)."""

    version: str | None
    problem: str | None


@functools.cache
def availability() -> Availability:
    """Import Transformer Engine once and report if its norm kernels can be called."""
    version = None
    try:
        version = str(importlib.import_module("transformer_engine").__version__)
        if problem := _unsupported(version):
            return Availability(version, problem)
        importlib.import_module("transformer_engine.pytorch")
        tex = importlib.import_module("transformer_engine_torch")
    except Exception as error:  # OSError, RuntimeError, AssertionError, ...
        if isinstance(error, ModuleNotFoundError) and error.name == "transformer_engine":
            return Availability(None, "Transformer Engine is not installed (No module named 'transformer_engine')")
        failure = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return Availability(version, f"importing Transformer Engine failed with {failure}")
    needed = ("rmsnorm_fwd", "rmsnorm_bwd", "layernorm_fwd", "layernorm_bwd")
    missing = ", ".join(name for name in needed if not hasattr(tex, name))
    return Availability(version, f"transformer_engine_torch {version} has no {missing}" if missing else None)


def _unsupported(version: str) -> str | None:
    try:
        parsed = Version(version)
    except InvalidVersion:
        return f"Transformer Engine reports the version {version!r}, which is not a version number"
    oldest, too_new = SUPPORTED
    if oldest <= parsed < too_new:
        return None
    return f"Transformer Engine {version} is not supported, expected at least {oldest} and below {too_new}"


@contextlib.contextmanager
def _kernels(x: torch.Tensor) -> Iterator[Any]:
    """Yield TE's extension, with the tensor's device as the current one, on which TE launches."""
    with torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext():
        yield importlib.import_module("transformer_engine_torch")


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
    if not _has_kernel(x):
        return pytorch.norm(x, weight, bias, eps, scale, subtracts_mean=subtracts_mean, zero_centered=zero_centered)
    check_shapes(x, weight, bias)
    out = output_dtype(x, weight, bias, subtracts_mean=subtracts_mean)
    dtype = torch.promote_types(x.dtype, out)
    gain, shift = scaled_gain(x, weight, scale, zero_centered=zero_centered, dtype=dtype), None
    if subtracts_mean:
        shift = torch.zeros_like(gain) if bias is None else scaled_parameter(bias, scale, dtype=dtype)
    # 2-D and contiguous: the forward kernels do not check the layout and would read the wrong memory.
    rows = x.to(dtype).reshape(-1, x.shape[-1]).contiguous()
    y = _norm_op(rows, gain, shift, eps, out)[0].view(x.shape)
    # No kernel adds a bias to an RMSNorm.
    return y if subtracts_mean or bias is None else (y + scaled_parameter(bias, scale, dtype=torch.float32)).to(out)


def _has_kernel(x: torch.Tensor) -> bool:
    """Return false for other devices, fp64, empty tensors and functorch, for which TE has no kernel."""
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        return False
    return x.device.type in DEVICE_TYPES and x.dtype in _KERNEL_DTYPES and x.dim() > 0 and x.numel() > 0


@torch.library.custom_op("olmo_lns::te_norm", mutates_args=())
def _norm_op(
    x: torch.Tensor,
    gain: torch.Tensor,
    shift: Optional[torch.Tensor],  # noqa: UP045 (torch before 2.7 reads no other form)
    eps: float,
    out_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run LayerNorm, or RMSNorm without ``shift``: return y, means (empty for RMSNorm) and 1 / standard deviations."""
    # Positional, as in every supported release: input, weight, (bias,) eps, ln_out, quantizer, otype, sm_margin,
    # zero_centered_gamma (the +1 is in this gain already, in fp32).
    with _kernels(x) as tex:
        ending = (eps, None, None, getattr(tex.DType, _KERNEL_DTYPES[out_dtype]), 0, False)
        if shift is None:
            y, _, rstd = tex.rmsnorm_fwd(x, gain, *ending)
            return y, rstd.new_empty(0), rstd
        y, mean, rstd = tex.layernorm_fwd(x, gain, shift, *ending)
        return y, mean, rstd


@torch.library.custom_op("olmo_lns::te_norm_backward", mutates_args=())
def _norm_backward_op(
    dy: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, gain: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dy = dy.to(gain.dtype).contiguous()
    with _kernels(x) as tex:
        if not mean.numel():
            dx, dgain = tex.rmsnorm_bwd(dy, x, rstd, gain, 0, False)
            return dx, dgain, gain.new_empty(0)
        dx, dgain, dshift = tex.layernorm_bwd(dy, x, mean, rstd, gain, 0, False)
        return dx, dgain, dshift


_Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@_norm_op.register_fake
def _(x: torch.Tensor, gain: torch.Tensor, shift: torch.Tensor | None, eps: float, out_dtype: torch.dtype) -> _Three:
    row = x.new_empty(x.shape[:1], dtype=torch.float32)
    return x.new_empty(x.shape, dtype=out_dtype), row.new_empty(0) if shift is None else torch.empty_like(row), row


@_norm_backward_op.register_fake
def _(dy: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, gain: torch.Tensor) -> _Three:
    dshift = torch.empty_like(gain) if mean.numel() else gain.new_empty(0)
    return torch.empty_like(x), torch.empty_like(gain), dshift


def _save(ctx: Any, inputs: tuple[Any, ...], output: _Three) -> None:
    ctx.save_for_backward(inputs[0], *output[1:], inputs[1])
    ctx.subtracts_mean = inputs[2] is not None
    ctx.set_materialize_grads(False)  # else every backward would fill unused gradients of the statistics with zeros


def _backward(ctx: Any, dy: torch.Tensor | None, *_: None) -> tuple[torch.Tensor | None, ...]:
    if dy is None:
        return None, None, None, None, None
    dx, dgain, dshift = _norm_backward_op(dy, *ctx.saved_tensors)
    return dx, dgain, dshift if ctx.subtracts_mean else None, None, None


_norm_op.register_autograd(_backward, setup_context=_save)
