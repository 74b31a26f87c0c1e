"""Which implementation of the norms runs, decided once, with the reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Mapping

import torch
from packaging.version import Version

from olmo_lns.environment import NORM_BACKEND, read
from olmo_lns.errors import BackendUnavailableError, LNSConfigError, did_you_mean
from olmo_lns.norm import cpp, kernels, pytorch, pytorch_layer, tuning
from olmo_lns.norm import transformer_engine as te

__all__ = ["ENVIRONMENT_VARIABLE", "LAYER_NORMS", "NAMES", "RMS_NORMS", "Backend", "choose_backend", "tune"]

ENVIRONMENT_VARIABLE = NORM_BACKEND
#: What may be asked for. "torch" includes PyTorch's own fused kernel where there is one.
NAMES = ("auto", "te", "cpp", "torch")

RMS_NORMS: Mapping[str, Callable[..., torch.Tensor]] = {
    "te": te.rms_norm,
    "cpp": cpp.rms_norm,
    "torch-fused": pytorch.fused_rms_norm,
    "torch": pytorch.rms_norm,
}
LAYER_NORMS: Mapping[str, Callable[..., torch.Tensor]] = {
    "te": te.layer_norm,
    "cpp": cpp.layer_norm,
    "torch-fused": pytorch_layer.layer_norm,
    "torch": pytorch_layer.layer_norm,
}


@dataclass(frozen=True)
class Backend:
    """A decision: ``name`` (``te``, ``cpp``, ``torch-fused`` or ``torch``) and the ``reason`` for it.

    Plain data: it pickles, copies and compares. Each takes every tensor, and hands those that its kernels are not for
    to ``torch``: ``te`` and ``torch-fused`` what is not on a CUDA device, ``cpp`` what is not on the CPU.
    """

    name: str
    reason: str

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor | None, eps: float, scale: float, **kwargs: Any
    ) -> torch.Tensor:
        """As :func:`olmo_lns.norm.rms_norm`."""
        return RMS_NORMS[self.name](x, weight, eps, scale, **kwargs)

    def layer_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        scale: float,
        **kwargs: Any,
    ) -> torch.Tensor:
        """As :func:`olmo_lns.norm.layer_norm`."""
        return LAYER_NORMS[self.name](x, weight, bias, eps, scale, **kwargs)


def choose_backend(name: str | None = None, *, device: torch.device | str | None = None) -> Backend:
    """Choose the implementation for a model that will run on ``device``.

    :param name: ``auto``, ``te``, ``cpp`` or ``torch``; None reads ``OLMO_LNS_NORM_BACKEND``, else ``auto``. ``auto``
        takes what ``olmo-lns doctor --tune`` found fastest on this machine (on CPU it compiles ``cpp`` first); where
        nothing was measured, Transformer Engine if it can be imported and the device is CUDA with compute capability
        8.0 or more, else PyTorch's fused kernel (CUDA, torch 2.9 or newer), else PyTorch operations.
    :param device: where the model will run; None means CUDA if this machine has it.
    :raises LNSConfigError: ``name`` is unknown.
    :raises BackendUnavailableError: ``te`` or ``cpp`` was asked for and cannot run; the message says why.
    """
    asked, origin = _asked(name)
    target = (
        torch.device(device) if device is not None else torch.device("cuda" if torch.cuda.is_available() else "cpu")
    )
    if asked == "torch":
        return _torch_backend(target, f"asked for by {origin}")
    if asked == "cpp":
        return _cpp_backend(target, f"asked for by {origin}")
    device_problem = _device_problem(target)
    if asked == "auto" and device_problem:  # no import of TE where it could not run
        measured, why = _measured(target) if target.type == "cpu" else (None, "")
        return measured or _torch_backend(target, f"{device_problem}; {why}" if why else device_problem)
    problem = device_problem or te.status().problem
    if asked == "te" and problem:
        raise BackendUnavailableError(
            f"the norm backend 'te' was asked for by {origin} and cannot run: {_all_problems(problem)}. Install a "
            f"supported release (pip install --no-build-isolation 'olmo-lns[te]') on a machine with an NVIDIA GPU, "
            f"or set {NORM_BACKEND}=auto."
        )
    if asked == "te":
        return _te_backend(f"asked for by {origin}")
    measured, why = _measured(target)
    if measured is not None:
        return measured
    if problem is None:
        return _te_backend(f"its fused kernels take the factor in gamma; {why}")
    return _torch_backend(target, f"{problem}; {why}")


def tune(device: torch.device | str | None = None) -> Mapping[str, Any]:
    """Measure the backends that can run on ``device`` and write the table that ``auto`` reads.

    :param device: None means CUDA if this machine has it, otherwise the CPU, for which the norms are compiled first.
    :returns: the entry: ``backend``, ``measured`` (date) and ``milliseconds`` (case -> backend -> time).
    :raises LNSConfigError: there is no such device, or the table that is there cannot be read.
    :raises BackendUnavailableError: the norms cannot be compiled.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise LNSConfigError("no CUDA device is visible")
    names = ["torch", _torch_backend(device, "").name]
    if device.type == "cpu":
        cpp.build()
        names.append("cpp")
    elif _device_problem(device) is None and te.status().problem is None:
        names.append("te")
    return tuning.write(tuning.key(device), tuning.measure({name: RMS_NORMS[name] for name in names}, device))


def _measured(device: torch.device) -> tuple[Backend | None, str]:
    """The fastest backend in this machine's table, if there is one; otherwise why there is none."""
    try:
        entry = tuning.read(tuning.key(device))
    except LNSConfigError as error:
        return None, str(error)
    if entry is None:
        return None, f"which is fastest here was not measured ({tuning.COMMAND})"
    reason = f"fastest here, measured {entry['measured']} ({tuning.path()})"
    if entry["backend"] == "te":
        return _te_backend(reason), ""
    if entry["backend"] == "cpp":
        problem = cpp.problem()
        return (None, problem) if problem else (_cpp_backend(device, reason), "")
    return Backend(entry["backend"], _with_kernel(reason, entry["backend"], device)), ""


def _te_backend(why: str) -> Backend:
    return Backend("te", f"Transformer Engine {te.status().version}: {why}")


def _cpp_backend(device: torch.device, why: str) -> Backend:
    if device.type != "cpu":
        raise BackendUnavailableError(
            f"the norm backend 'cpp' was {why} and runs on the CPU; this is for {device.type}"
        )
    if problem := cpp.problem():
        raise BackendUnavailableError(f"the norm backend 'cpp' was {why} and cannot run: {problem}")
    return Backend("cpp", f"compiled for this machine's CPU: {why}")


def _with_kernel(reason: str, name: str, device: torch.device) -> str:
    kernel = kernels.running_kernel(name, device)
    return f"{reason}; kernel: {kernel.name} ({kernel.why})"


def _asked(name: str | None) -> tuple[str, str]:
    """The setting and where it came from."""
    origin = "argument"
    if name is None:
        name, origin = read(NORM_BACKEND) or "auto", NORM_BACKEND
    if name not in NAMES:
        hint = did_you_mean(str(name), NAMES)
        raise LNSConfigError(f"unknown norm backend {name!r}{hint} (from {origin}); allowed: {', '.join(NAMES)}")
    return name, origin


def _all_problems(first: str) -> str:
    """The device's problem and the import's: whoever asked for TE by name wants to know both."""
    imported = te.status().problem
    return first if imported is None or imported == first else f"{first}; and {imported}"


def _device_problem(device: torch.device) -> str | None:
    """Why TE's kernels cannot run on ``device``, None if they can."""
    if device.type not in te.DEVICE_TYPES:
        return "no CUDA device is visible" if not torch.cuda.is_available() else f"the model's device is {device.type}"
    if device.type != "cuda":
        return None
    if not torch.cuda.is_available():
        return "no CUDA device is visible"
    if torch.version.hip is not None:
        return "this torch is built for ROCm"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"compute capability {major}.{minor} is below 8.0"
    return None


def _torch_backend(device: torch.device, because: str) -> Backend:
    version = Version(torch.__version__)
    if device.type == "cuda" and torch.version.hip is None and version >= kernels.FUSED_SINCE:
        reason = f"{because}; torch {version.public} has a fused rms_norm on CUDA"
        return Backend("torch-fused", _with_kernel(reason, "torch-fused", device))
    if device.type == "cuda":
        return Backend("torch", f"{because}; torch {version.public} has no fused rms_norm here (2.9 on CUDA has)")
    return Backend("torch", because)
