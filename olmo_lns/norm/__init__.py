"""``y = s * Norm(x)`` with the factor folded into the norm, not multiplied afterwards.

Two functions and one choice. The functions give the same values and gradients as multiplying the
norm's output by ``scale``, to the precision of the dtype, for the price of the norm alone.
"""

from __future__ import annotations

import torch

from olmo_lns.norm.backend import Backend, choose_backend

__all__ = ["Backend", "choose_backend", "layer_norm", "rms_norm"]


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    scale: float,
    *,
    bias: torch.Tensor | None = None,
    zero_centered: bool = False,
    backend: Backend | str | None = None,
) -> torch.Tensor:
    """``scale * (x / sqrt(mean(x^2) + eps) * weight + bias)``.

    :param x: (..., width), fp64, fp32, bf16 or fp16; need not be contiguous, may be empty.
    :param weight: (width,) or None for a norm without gain.
    :param scale: the layer's factor, a Python float, dimensionless (:func:`olmo_lns.lns_scale`).
    :param bias: (width,) or None.
    :param zero_centered: the gain is ``weight + 1`` (Megatron's ``apply_layernorm_1p``).
    :param backend: a :class:`Backend`, or what :func:`choose_backend` takes: a name, or None. A module chooses once,
        when it is built, and passes the object.
    :returns: shape of ``x``. Statistics are fp32 (fp64 for fp64). dtype: that of ``x * weight + bias`` as in OLMo's
        RMSLayerNorm; under autocast the autocast dtype instead of fp32, rounded once, so that the linear layer that
        follows sees the values it would have made itself.
    :raises LNSConfigError: a parameter's shape is not (width,), or the backend's name is unknown.
    :raises BackendUnavailableError: ``te`` was asked for and cannot run here.
    """
    return _object(backend).rms_norm(x, weight, eps, scale, bias=bias, zero_centered=zero_centered)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    scale: float,
    *,
    zero_centered: bool = False,
    backend: Backend | str | None = None,
) -> torch.Tensor:
    """``scale * ((x - mean(x)) / sqrt(var(x) + eps) * weight + bias)``.

    Parameters, errors and statistics as in :func:`rms_norm`. The dtype is that of ``x`` as in
    ``torch.nn.functional.layer_norm``, under autocast the autocast dtype instead of fp32.
    """
    return _object(backend).layer_norm(x, weight, bias, eps, scale, zero_centered=zero_centered)


def _object(backend: Backend | str | None) -> Backend:
    return backend if isinstance(backend, Backend) else Backend(_name(backend), "")


def _name(setting: str | None) -> str:
    return choose_backend(setting).name


# All that torch.compiler.assume_constant_result does, without the 2 s of CPU that importing the compiler takes.
_name._dynamo_marked_constant = True  # type: ignore[attr-defined]
