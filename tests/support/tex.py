"""A stand-in for ``transformer_engine_torch`` on CPU: the norm kernels' contract, strictly, in plain PyTorch.

It refuses what the real bindings and kernels refuse, and also what they silently get wrong (a forward on an input
that is not contiguous). Its parameter lists are compared with those parsed from Transformer Engine's sources
(te_signatures.json); the dtypes that it takes are those that the published libraries took when asked. It
proves wiring and gradients; it says nothing about the numerics of the real kernels.
"""

import contextlib
import enum
import sys
import types

import torch

from olmo_lns.norm import backend
from olmo_lns.norm import transformer_engine as te

NAMES = ("rmsnorm_fwd", "rmsnorm_bwd", "layernorm_fwd", "layernorm_bwd")
#: (function, dtype of x, dtype of gamma, zero_centered_gamma) of every call, oldest first.
CALLS = []


class DType(enum.IntEnum):
    """As ``transformer_engine::DType``."""

    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8


_TORCH = {DType.kFloat32: torch.float32, DType.kFloat16: torch.float16, DType.kBFloat16: torch.bfloat16}
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
#: What the libraries of 2.11.0 and of 2.20.2 take, in both norms. Forward: x, gamma, y; backward: dz, x, gamma.
_FORWARD, _BACKWARD = (
    {tuple(_DTYPES[name] for name in case.split()) for case in cases.split(", ")}
    for cases in (
        "fp32 fp32 fp32, fp32 fp32 fp16, fp32 fp32 bf16, fp16 fp16 fp16, bf16 bf16 bf16",
        "fp32 fp32 fp32, fp16 fp32 fp16, fp16 fp16 fp16, bf16 fp32 bf16, bf16 bf16 bf16",
    )
)


def _check_forward(x, gamma, eps, ln_out, quantizer, otype, sm_margin, zero_centered_gamma):
    named = type(otype).__name__ == "DType"  # from 2.20 on TE passes its own IntEnum of that name
    if not named or not isinstance(sm_margin, int) or not isinstance(zero_centered_gamma, bool):
        raise TypeError("incompatible function arguments")  # pybind11's message
    otype = DType(int(otype))
    if not isinstance(eps, float) or ln_out is not None or quantizer is not None:
        raise TypeError("stand-in: only eps: float, ln_out=None, quantizer=None are provided for")
    if x.dim() != 2 or x.numel() == 0:
        raise RuntimeError(f"x must be a 2D tensor with elements, got {tuple(x.shape)}")
    if gamma.shape != x.shape[1:]:
        raise RuntimeError("gamma.data.shape[0] == hidden_size")
    if not (x.is_contiguous() and gamma.is_contiguous()):
        raise RuntimeError("stand-in: the kernel does not check contiguity and would read the wrong memory")
    if (x.dtype, gamma.dtype, _TORCH.get(otype)) not in _FORWARD:
        raise RuntimeError(f"Unavailable kernel for this normalization config: {x.dtype}, {gamma.dtype}, {otype!r}")
    return x.float(), _gain(gamma, zero_centered_gamma), _TORCH[otype]


def _check_backward(dz, x, statistics, gamma, sm_margin, zero_centered_gamma):
    if not isinstance(sm_margin, int) or not isinstance(zero_centered_gamma, bool):
        raise TypeError("incompatible function arguments")
    if x.dim() != 2 or dz.shape != x.shape or gamma.shape != x.shape[1:]:
        raise RuntimeError("dz.data.shape == x.data.shape")
    if (dz.dtype, x.dtype, gamma.dtype) not in _BACKWARD:
        raise RuntimeError(f"Unavailable kernel for this config: {dz.dtype}, {x.dtype}, {gamma.dtype}")
    for s in statistics:
        if s.dtype != torch.float32 or s.shape != x.shape[:1]:
            raise RuntimeError("statistics must be fp32, one a row")
    return dz.float(), x.float(), _gain(gamma, zero_centered_gamma)


def _gain(gamma, zero_centered_gamma):
    return gamma.float() + 1.0 if zero_centered_gamma else gamma.float()


def _record(name, x, gamma, zero_centered_gamma):
    CALLS.append((name, x.dtype, gamma.dtype, zero_centered_gamma))


def rmsnorm_fwd(input, weight, eps, ln_out, quantizer, otype, sm_margin, zero_centered_gamma):
    """-> [y, None, rsigma]"""
    x, gain, out = _check_forward(input, weight, eps, ln_out, quantizer, otype, sm_margin, zero_centered_gamma)
    _record("rmsnorm_fwd", input, weight, zero_centered_gamma)
    rsigma = torch.rsqrt(x.pow(2).mean(-1) + eps)
    return [(x * rsigma[:, None] * gain).to(out), None, rsigma]


def rmsnorm_bwd(dz, x, rsigma, gamma, sm_margin, zero_centered_gamma, /):
    """-> [dx, dgamma]"""
    wide_dz, wide, gain = _check_backward(dz, x, (rsigma,), gamma, sm_margin, zero_centered_gamma)
    _record("rmsnorm_bwd", x, gamma, zero_centered_gamma)
    unit, g = wide * rsigma[:, None], wide_dz * gain
    dx = rsigma[:, None] * (g - unit * (g * unit).mean(-1, keepdim=True))
    return [dx.to(x.dtype), (wide_dz * unit).sum(0).to(gamma.dtype)]


def layernorm_fwd(input, weight, bias, eps, ln_out, quantizer, otype, sm_margin, zero_centered_gamma):
    """-> [y, mu, rsigma]"""
    x, gain, out = _check_forward(input, weight, eps, ln_out, quantizer, otype, sm_margin, zero_centered_gamma)
    if bias is None or bias.dtype != weight.dtype or bias.shape != weight.shape:
        raise RuntimeError("stand-in: beta must be given, in gamma's shape and dtype")
    _record("layernorm_fwd", input, weight, zero_centered_gamma)
    mu = x.mean(-1)
    rsigma = torch.rsqrt(x.var(-1, unbiased=False) + eps)
    return [((x - mu[:, None]) * rsigma[:, None] * gain + bias.float()).to(out), mu, rsigma]


def layernorm_bwd(dz, x, mu, rsigma, gamma, sm_margin, zero_centered_gamma, /):
    """-> [dx, dgamma, dbeta]"""
    wide_dz, wide, gain = _check_backward(dz, x, (mu, rsigma), gamma, sm_margin, zero_centered_gamma)
    _record("layernorm_bwd", x, gamma, zero_centered_gamma)
    unit, g = (wide - mu[:, None]) * rsigma[:, None], wide_dz * gain
    dx = rsigma[:, None] * (g - g.mean(-1, keepdim=True) - unit * (g * unit).mean(-1, keepdim=True))
    return [dx.to(x.dtype), (wide_dz * unit).sum(0).to(gamma.dtype), wide_dz.sum(0).to(gamma.dtype)]


def module():
    """The stand-in as a module object named ``transformer_engine_torch``."""
    fake = types.ModuleType("transformer_engine_torch")
    fake.DType = DType
    for name in NAMES:
        setattr(fake, name, globals()[name])
    return fake


def _clear_caches():
    for cached in (te.availability, backend._decide):
        cached.cache_clear()


@contextlib.contextmanager
def installed(version="2.11.0"):
    """Transformer Engine ``version`` seems installed and takes CPU tensors; everything is as before afterwards."""
    package, framework = types.ModuleType("transformer_engine"), types.ModuleType("transformer_engine.pytorch")
    package.__version__, package.pytorch, package.__path__ = version, framework, []
    modules = {package.__name__: package, framework.__name__: framework, "transformer_engine_torch": module()}
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    devices = set(te.DEVICE_TYPES)
    te.DEVICE_TYPES.add("cpu")
    CALLS.clear()
    _clear_caches()
    try:
        yield modules["transformer_engine_torch"]
    finally:
        te.DEVICE_TYPES.intersection_update(devices)
        for name, old in before.items():
            if old is None:
                del sys.modules[name]
            else:
                sys.modules[name] = old
        _clear_caches()
