"""Transformer Engine backend: the factor folded into gamma of TE's fused norm kernels.

The kernels are called through operators of our own, not through TE's modules: those read their
weight again in the backward pass, so a gamma swapped for the forward gives wrong gradients.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from dataclasses import dataclass
from typing import Any

import torch
from packaging.version import InvalidVersion, Version

from olmo_lns.environment import ALLOW_UNVERIFIED, is_set
from olmo_lns.norm import pytorch
from olmo_lns.norm.dtypes import check_shapes, fold, folded_gain, kernel_dtype, output_dtype

__all__ = ["SUPPORTED", "Status", "layer_norm", "rms_norm", "status"]

#: Oldest and first unsupported release: the kernels' signatures were read in 2.1, 2.5, 2.11 and 2.20.
SUPPORTED = (Version("2.1"), Version("2.21"))
#: Device types on which tensors are handed to TE (a test's stand-in adds "cpu").
DEVICE_TYPES = {"cuda"}
_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Status:
    """What importing Transformer Engine gave: its version, and why it cannot be used (None if it can)."""

    version: str | None
    problem: str | None


@functools.cache
def status() -> Status:
    """Import Transformer Engine once and say whether its norm kernels can be called."""
    try:
        version = str(importlib.import_module("transformer_engine").__version__)
    except ModuleNotFoundError as error:
        if error.name == "transformer_engine":
            return Status(None, "Transformer Engine is not installed (No module named 'transformer_engine')")
        return Status(None, _import_failure(error))
    except Exception as error:  # its failures are of many kinds: OSError, RuntimeError, AssertionError, ...
        return Status(None, _import_failure(error))
    if problem := _unsupported(version):
        return Status(version, problem)
    try:
        importlib.import_module("transformer_engine.pytorch")
        tex = importlib.import_module("transformer_engine_torch")
    except Exception as error:  # as above; the reason is kept and shown
        return Status(version, _import_failure(error))
    missing = [
        name for name in ("rmsnorm_fwd", "rmsnorm_bwd", "layernorm_fwd", "layernorm_bwd") if not hasattr(tex, name)
    ]
    if missing:
        return Status(version, f"transformer_engine_torch {version} has no {', '.join(missing)}")
    return Status(version, None)


def _import_failure(error: Exception) -> str:
    return f"importing Transformer Engine failed with {type(error).__name__}: {' '.join(str(error).split())}"


def _unsupported(version: str) -> str | None:
    try:
        found = Version(version)
    except InvalidVersion:
        return f"Transformer Engine reports the version {version!r}, which is not a version number"
    oldest, too_new = SUPPORTED
    if oldest <= found < too_new:
        return None
    if oldest <= found < Version("3") and is_set(ALLOW_UNVERIFIED):
        return None
    return f"Transformer Engine {version} is not supported (verified: 2.1 to 2.20)"


@functools.cache
def _tex() -> Any:
    return importlib.import_module("transformer_engine_torch")


@functools.cache
def _tex_dtype(dtype: torch.dtype) -> Any:
    names = {torch.float32: "kFloat32", torch.float16: "kFloat16", torch.bfloat16: "kBFloat16"}
    return getattr(_tex().DType, names[dtype])


def _on_device(x: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """TE launches on the current device: make it the tensor's."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


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
    if not _has_kernel(x):
        return pytorch.rms_norm(x, weight, eps, scale, bias=bias, zero_centered=zero_centered)
    check_shapes(x, weight, bias)
    out = pytorch.rms_output_dtype(x, weight, bias)
    dtype = kernel_dtype(x, out)
    gain = folded_gain(x, weight, scale, zero_centered=zero_centered, dtype=dtype)
    y, _ = _rms_norm_op(_as_rows(x, dtype), gain, eps, out)
    y = y.view(x.shape)
    if bias is not None:  # no kernel adds one to an RMSNorm
        y = (y + fold(bias, scale, dtype=torch.float32)).to(out)
    return y


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
    if not _has_kernel(x):
        return pytorch.layer_norm(x, weight, bias, eps, scale, zero_centered=zero_centered)
    check_shapes(x, weight, bias)
    out = output_dtype(x.dtype, x.device.type)
    dtype = kernel_dtype(x, out)
    gain = folded_gain(x, weight, scale, zero_centered=zero_centered, dtype=dtype)
    shift = torch.zeros_like(gain) if bias is None else fold(bias, scale, dtype=dtype)
    y, _, _ = _layer_norm_op(_as_rows(x, dtype), gain, shift, eps, out)
    return y.view(x.shape)


def _has_kernel(x: torch.Tensor) -> bool:
    """TE has no kernel for other devices, for fp64, or for no elements at all; functorch cannot transform one."""
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        return False
    return x.device.type in DEVICE_TYPES and x.dtype in _KERNEL_DTYPES and x.dim() > 0 and x.numel() > 0


def _as_rows(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """2-D and contiguous: the forward kernels do not check it and would read the wrong memory."""
    return x.to(dtype).reshape(-1, x.shape[-1]).contiguous()


@torch.library.custom_op("olmo_lns::te_rms_norm", mutates_args=())
def _rms_norm_op(
    x: torch.Tensor, gain: torch.Tensor, eps: float, out_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    with _on_device(x):
        # Positional, as in every supported release: input, weight, eps, ln_out, quantizer, otype, sm_margin,
        # zero_centered_gamma (the +1 is in our gain already, in fp32).
        y, _, rstd = _tex().rmsnorm_fwd(x, gain, eps, None, None, _tex_dtype(out_dtype), 0, False)
    return y, rstd


@torch.library.custom_op("olmo_lns::te_rms_norm_backward", mutates_args=())
def _rms_norm_backward_op(
    dy: torch.Tensor, x: torch.Tensor, rstd: torch.Tensor, gain: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    with _on_device(x):
        dx, dgain = _tex().rmsnorm_bwd(dy.to(gain.dtype).contiguous(), x, rstd, gain, 0, False)
    return dx, dgain


@torch.library.custom_op("olmo_lns::te_layer_norm", mutates_args=())
def _layer_norm_op(
    x: torch.Tensor, gain: torch.Tensor, shift: torch.Tensor, eps: float, out_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    with _on_device(x):
        y, mean, rstd = _tex().layernorm_fwd(x, gain, shift, eps, None, None, _tex_dtype(out_dtype), 0, False)
    return y, mean, rstd


@torch.library.custom_op("olmo_lns::te_layer_norm_backward", mutates_args=())
def _layer_norm_backward_op(
    dy: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, gain: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    with _on_device(x):
        dx, dgain, dshift = _tex().layernorm_bwd(dy.to(gain.dtype).contiguous(), x, mean, rstd, gain, 0, False)
    return dx, dgain, dshift


@_rms_norm_op.register_fake
def _(x: torch.Tensor, gain: torch.Tensor, eps: float, out_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape, dtype=out_dtype), x.new_empty(x.shape[:1], dtype=torch.float32)


@_rms_norm_backward_op.register_fake
def _(dy: torch.Tensor, x: torch.Tensor, rstd: torch.Tensor, gain: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(gain)


@_layer_norm_op.register_fake
def _(
    x: torch.Tensor, gain: torch.Tensor, shift: torch.Tensor, eps: float, out_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    row = x.new_empty(x.shape[:1], dtype=torch.float32)
    return x.new_empty(x.shape, dtype=out_dtype), row, torch.empty_like(row)


@_layer_norm_backward_op.register_fake
def _(
    dy: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, gain: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(gain), torch.empty_like(gain)


def _save_rms(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, gain, _, _ = inputs
    ctx.save_for_backward(x, gain, output[1])
    ctx.set_materialize_grads(False)  # else every backward fills a gradient of rstd with zeros: a launch for nothing


def _rms_backward(ctx: Any, dy: torch.Tensor | None, _rstd: None) -> tuple[torch.Tensor | None, ...]:
    if dy is None:
        return None, None, None, None
    x, gain, rstd = ctx.saved_tensors
    return (*_rms_norm_backward_op(dy, x, rstd, gain), None, None)


def _save_layer(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, gain, _, _, _ = inputs
    ctx.save_for_backward(x, gain, output[1], output[2])
    ctx.set_materialize_grads(False)


def _layer_backward(ctx: Any, dy: torch.Tensor | None, _mean: None, _rstd: None) -> tuple[torch.Tensor | None, ...]:
    if dy is None:
        return None, None, None, None, None
    x, gain, mean, rstd = ctx.saved_tensors
    return (*_layer_norm_backward_op(dy, x, mean, rstd, gain), None, None)


_rms_norm_op.register_autograd(_rms_backward, setup_context=_save_rms)
_layer_norm_op.register_autograd(_layer_backward, setup_context=_save_layer)
