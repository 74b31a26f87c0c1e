"""Which kernel really runs behind a backend's name, and why.

``torch.nn.functional.rms_norm`` on CUDA is one of two kernels: torch's own, or Quack's, which torch vendors since 2.13
(``torch/_native/ops/norm/rmsnorm_impl.py``) and puts in its place where two optional packages are installed. Nothing
of torch says which one it is: this module asks torch's own conditions, not a copy of them.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from packaging.version import Version

from olmo_lns.norm import cpp
from olmo_lns.norm import transformer_engine as te

__all__ = ["FUSED_SINCE", "Kernel", "quack_problem", "running_kernel"]

#: First torch whose rms_norm is a fused kernel on CUDA, forward and backward.
FUSED_SINCE = Version("2.9")


@dataclass(frozen=True)
class Kernel:
    """``name``: Transformer Engine, Quack, torch fused, C++ or composite; ``why`` it is this one."""

    name: str
    why: str


def running_kernel(
    backend: str,
    device: torch.device | str,
    *,
    width: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    compiled: bool = False,
) -> Kernel:
    """The kernel that an RMSNorm of this backend runs.

    :param backend: ``te``, ``cpp``, ``torch-fused`` or ``torch`` (``Backend.name``).
    :param width: of the norm; None leaves conditions on the width out.
    :param dtype: in which the kernel reads its input and its gain, which are of one dtype.
    :param compiled: the norm is part of a ``torch.compile``d graph.
    """
    device = torch.device(device)
    if backend == "te" and device.type in te.DEVICE_TYPES:
        return Kernel("Transformer Engine", f"release {te.status().version}")
    if backend == "cpp" and device.type == "cpu" and not compiled and dtype in (torch.float32, torch.bfloat16):
        return Kernel("C++", f"olmo_lns/norm/cpu.cpp, compiled: {cpp.library()}")
    if backend != "torch-fused" or device.type != "cuda":
        return Kernel("composite", f"PyTorch operations on {device.type}")
    if compiled:  # the override is not in Inductor's table of decompositions (torch/_native/registry.py)
        return Kernel("composite", "torch.compile fuses the formula itself, with neighbouring operations")
    problem = quack_problem(device, width=width, dtype=dtype)
    if problem is None:
        version = _cutedsl().runtime_version()
        return Kernel("Quack", f"vendored in torch {torch.__version__}, with nvidia-cutlass-dsl {version}")
    return Kernel("torch fused", f"not Quack: {problem}")


def quack_problem(
    device: torch.device | str = "cuda", *, width: int | None = None, dtype: torch.dtype = torch.bfloat16
) -> str | None:
    """Why torch does not run Quack's kernel for its fused ``rms_norm``, None if it does."""
    try:
        conditions = importlib.import_module("torch._native.ops.norm.rmsnorm_impl")
        registry = importlib.import_module("torch._native.registry")
    except ModuleNotFoundError:
        return f"torch {torch.__version__} does not vendor it (2.13 does)"
    try:
        nodes = registry._graphs.get(("_fused_rms_norm", "CUDA"), [])
        if not any(node.active for node in nodes):
            return _why_not_registered(nodes)
        # torch's condition looks at these two of a tensor; there is no need to make one.
        if not conditions._is_supported(SimpleNamespace(device=torch.device(device), dtype=dtype)):
            major, minor = torch.cuda.get_device_capability(torch.device(device))
            return f"not for {dtype} on compute capability {major}.{minor} (9.x and 10.x have it)"
        if width is not None and not conditions._n_yields_valid_cp_size(width, dtype):
            return f"not for rows of {width} numbers of {dtype}"
    except AttributeError as error:  # private to torch: another release may have renamed it
        return f"torch {torch.__version__} cannot be asked ({error})"
    return None


def _cutedsl() -> Any:
    return importlib.import_module("torch._native.cutedsl_utils")


def _why_not_registered(nodes: list[Any]) -> str:
    """The conditions of torch's ``register_op_override``, in its order."""
    utils = _cutedsl()
    if nodes:
        return "its override was switched off in this process"
    if not torch.backends.cuda.is_built():
        return "this torch is built without CUDA"
    if torch.version.hip is not None:
        return "this torch is built for ROCm"
    missing = utils._unavailable_reason([("nvidia_cutlass_dsl", "cutlass"), ("apache_tvm_ffi", "tvm_ffi")])
    if missing:
        return f"it needs nvidia-cutlass-dsl and apache-tvm-ffi ({missing})"
    if utils.check_native_jit_disabled():
        return "TORCH_DISABLE_NATIVE_JIT=1 is set"
    if not utils._version_is_ok():
        known = ", ".join(map(str, sorted(utils._CUTEDSL_REQUIRED_VERSIONS)))
        return f"nvidia-cutlass-dsl {utils.runtime_version()} is not one that torch takes ({known})"
    return "torch did not register its override"
