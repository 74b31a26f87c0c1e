"""The two norms, and the choice of their implementation, made once and with a reason."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Callable

import torch
from packaging.version import Version

from olmo_lns.environment import NORM_BACKEND, read
from olmo_lns.errors import BackendUnavailableError, LNSConfigError, did_you_mean
from olmo_lns.norm import pytorch
from olmo_lns.norm import transformer_engine as te
from olmo_lns.pip_extras import install_command

#: Values of the setting. "torch" includes PyTorch's fused kernel if there is one.
NAMES = ("auto", "te", "torch")
#: Transformer Engine's kernels are chosen on GPUs of this major compute capability or a later one. Ampere, 8.0, is the
#: first with bf16.
_FIRST_MAJOR = 8


@dataclass(frozen=True)
class Backend:
    """The implementation that was chosen for the norms, and why.

    It is plain data, so it can be pickled, copied and compared. Every backend accepts every tensor.

    :param name: ``te``, ``torch-fused`` or ``torch``. ``te`` is Transformer Engine, which falls back to PyTorch for
        tensors that it has no kernel for. ``torch-fused`` is PyTorch's norms on a CUDA device, and ``torch`` is
        PyTorch's norms elsewhere.
    :param reason: why this implementation was chosen, for the start-up line.
    """

    name: str
    reason: str


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
    :param scale: the layer's factor, a Python float, dimensionless (:func:`olmo_lns.lns_factor`).
    :param bias: (width,) or None.
    :param zero_centered: the gain is ``weight + 1`` (Megatron's ``apply_layernorm_1p``).
    :param backend: a :class:`Backend`, or an argument of :func:`choose_backend`: a name, or None. A module chooses
        once, when it is built, and passes the object.
    :returns: shape of ``x``, dtype of ``x * weight + bias`` as in OLMo's and Llama's RMSNorm, under autocast too.
        Statistics are fp32 (fp64 for fp64).
    :raises LNSConfigError: if a parameter's shape is not (width,), or the backend's name is unknown.
    :raises BackendUnavailableError: if ``te`` was selected and cannot run here.

    Example: ``rms_norm(x, weight, 1e-6, lns_factor(7))`` is the norm of block 7.
    """
    return _norm(backend)(x, weight, bias, eps, scale, subtracts_mean=False, zero_centered=zero_centered)


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

    Parameters, errors and statistics as in :func:`rms_norm`. The dtype is that of ``x``, and fp32 under autocast on a
    GPU, as in ``torch.nn.functional.layer_norm``.

    Example: ``layer_norm(x, weight, bias, 1e-5, lns_factor(7))`` is the norm of block 7.
    """
    return _norm(backend)(x, weight, bias, eps, scale, subtracts_mean=True, zero_centered=zero_centered)


def _norm(backend: Backend | str | None) -> Callable[..., torch.Tensor]:
    return te.norm if (backend.name if isinstance(backend, Backend) else _name(backend)) == "te" else pytorch.norm


def _name(setting: str | None) -> str:
    return choose_backend(setting).name


# The effect of torch.compiler.assume_constant_result, without the 2 s of importing the compiler.
_name._dynamo_marked_constant = True  # type: ignore[attr-defined]


def choose_backend(name: str | None = None) -> Backend:
    """Choose the implementation for this machine, once for each setting.

    :param name: ``auto``, ``te`` or ``torch``; None reads ``OLMO_LNS_NORM_BACKEND``, else ``auto``. ``auto`` selects
        Transformer Engine if it can be imported and the device is CUDA with compute capability 8.0 or more, else
        PyTorch's norms: a fused RMSNorm on CUDA with torch 2.9 or newer.
    :raises LNSConfigError: if ``name`` is unknown.
    :raises BackendUnavailableError: if ``te`` was selected and cannot run. The message has the reason.

    Example: ``choose_backend("torch").reason`` is the reason for ``torch`` or ``torch-fused``.
    """
    origin = "argument"
    if name is None:
        name, origin = read(NORM_BACKEND) or "auto", NORM_BACKEND
    if name not in NAMES:
        hint = did_you_mean(str(name), NAMES)
        raise LNSConfigError(f"{origin} names the unknown norm backend {name!r}{hint}. Use one of {', '.join(NAMES)}.")
    return _decide(name, origin)


@functools.cache  # called for each norm of a model
def _decide(requested: str, origin: str) -> Backend:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if requested == "torch":
        return _torch_backend(device, f"selected by {origin}")
    problem = _device_problem(device)
    if requested == "auto" and problem:  # do not import a Transformer Engine that cannot run
        return _torch_backend(device, problem)
    import_problem = te.availability().problem
    if requested == "te" and (problem or import_problem):
        problems = "; and ".join(dict.fromkeys(filter(None, (problem, import_problem))))
        raise BackendUnavailableError(
            f"The norm backend 'te' was selected by {origin}, but it cannot run here: {problems}. Install a supported "
            f"release ({install_command('te', '--no-build-isolation')}) on a machine with an NVIDIA GPU, or set "
            f"{NORM_BACKEND}=auto."
        )
    if import_problem:
        return _torch_backend(device, import_problem)
    reason = f"selected by {origin}" if requested == "te" else "its fused kernels take the factor in gamma"
    return Backend("te", f"Transformer Engine {te.availability().version}: {reason}")


def _device_problem(device: torch.device) -> str | None:
    """Return the reason why Transformer Engine's kernels cannot run on ``device``, or None if they can."""
    if device.type in te.DEVICE_TYPES - {"cuda"}:
        return None  # what follows is about CUDA devices
    if not torch.cuda.is_available():
        return "no CUDA device is visible"
    if torch.version.hip is not None:
        return "this torch is built for ROCm"
    major, minor = torch.cuda.get_device_capability(device)
    return None if major >= _FIRST_MAJOR else f"compute capability {major}.{minor} is below {_FIRST_MAJOR}.0"


def _torch_backend(device: torch.device, reason: str) -> Backend:
    if device.type != "cuda":
        return Backend("torch", reason)
    version = Version(torch.__version__).public
    if not pytorch.has_fused_rms_norm():
        return Backend("torch", f"{reason}; torch {version} has no fused rms_norm here (2.9 on CUDA has)")
    return Backend("torch-fused", f"{reason}; torch {version} has a fused rms_norm on CUDA")
