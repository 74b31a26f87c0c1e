#!/usr/bin/env python3
"""Transformer Engine's norm kernels from its core library alone, without building its PyTorch extension.

    python scripts/gpu/te_ctypes.py LIBRARY scripts/bench_step.py --device cuda
    python scripts/gpu/te_ctypes.py LIBRARY -m pytest -m gpu tests/norm

Runs a script (or `-m` module) in which `transformer_engine_torch` is this file's class over the C API of
`libtransformer_engine.so` 2.11.0. The kernels are the real ones, their Python binding is not: a failed check in the
library ends the process, and none but the four norm functions exist. For benchmarks and kernel tests only.
"""

from __future__ import annotations

import ctypes
import enum
import glob
import os
import runpy
import site
import sys
import types
from pathlib import Path
from typing import Any, Callable, Sequence

import torch

VERSION = "2.11.0"  # the struct layouts below are of this release


class DType(enum.IntEnum):
    """As `NVTEDType`."""

    kByte = 0
    kInt16 = 1
    kInt32 = 2
    kInt64 = 3
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6


TO_TORCH = {
    DType.kByte: torch.uint8,
    DType.kInt32: torch.int32,
    DType.kFloat32: torch.float32,
    DType.kFloat16: torch.float16,
    DType.kBFloat16: torch.bfloat16,
}
TO_NVTE = {dtype: number for number, dtype in TO_TORCH.items()}


class Shape(ctypes.Structure):
    """`NVTEShape`"""

    _fields_ = [("data", ctypes.c_size_t * 15), ("ndim", ctypes.c_size_t)]


class BasicTensor(ctypes.Structure):
    """`NVTEBasicTensor`"""

    _fields_ = [("data_ptr", ctypes.c_void_p), ("dtype", ctypes.c_int), ("shape", Shape)]


def load(path: Path) -> ctypes.CDLL:
    """The library, after the CUDA libraries that it needs from the nvidia-* wheels, with its functions declared."""
    waiting = [
        found
        for folder in site.getsitepackages() + [p for p in sys.path if p.endswith("site-packages")]
        for pattern in ("nvidia/*/lib/lib*.so.*",)
        for found in glob.glob(os.path.join(folder, pattern))
        if any(name in found for name in ("cudart", "nvrtc", "curand", "cublas", "cudnn", "nccl"))
    ]
    for _ in range(4):  # they depend on each other: load what can be loaded until nothing is left
        waiting = [library for library in waiting if not _loads(library)]
    library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    pointer, number, flag = ctypes.c_void_p, ctypes.c_int, ctypes.c_bool
    library.nvte_create_tensor.restype, library.nvte_create_tensor.argtypes = pointer, [number]
    library.nvte_destroy_tensor.restype, library.nvte_destroy_tensor.argtypes = None, [pointer]
    library.nvte_set_tensor_param.restype = None
    library.nvte_set_tensor_param.argtypes = [ctypes.POINTER(pointer), number, ctypes.POINTER(BasicTensor)]
    library.nvte_tensor_shape.restype, library.nvte_tensor_shape.argtypes = Shape, [pointer]
    library.nvte_tensor_type.restype, library.nvte_tensor_type.argtypes = number, [pointer]
    ending = [pointer, number, flag, pointer]  # workspace, multiprocessors, zero_centered_gamma, stream
    for name, arguments in {
        "nvte_rmsnorm_fwd": [pointer] * 2 + [ctypes.c_float] + [pointer] * 2,
        "nvte_rmsnorm_bwd": [pointer] * 6,
        "nvte_layernorm_fwd": [pointer] * 3 + [ctypes.c_float] + [pointer] * 3,
        "nvte_layernorm_bwd": [pointer] * 8,
    }.items():
        function = getattr(library, name)
        function.restype, function.argtypes = None, arguments + ending
    return library


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return False
    return True


class Handle:
    """An `NVTETensor` over a torch tensor, which it keeps alive."""

    def __init__(self, library: ctypes.CDLL, tensor: torch.Tensor | None = None) -> None:
        self.library = library
        self.pointer = ctypes.c_void_p(library.nvte_create_tensor(0))
        if tensor is not None:
            self.set(tensor)

    def set(self, tensor: torch.Tensor) -> None:
        shape = Shape((ctypes.c_size_t * 15)(*tensor.shape), tensor.dim())
        basic = BasicTensor(tensor.data_ptr(), int(TO_NVTE[tensor.dtype]), shape)
        self.library.nvte_set_tensor_param(ctypes.byref(self.pointer), 0, ctypes.byref(basic))
        self.tensor = tensor

    def __del__(self) -> None:
        self.library.nvte_destroy_tensor(self.pointer)


class Norms:
    """The four functions of `transformer_engine_torch`, with its parameter order and results."""

    def __init__(self, path: Path) -> None:
        self.library = load(path)

    def _device(self) -> tuple[int, ctypes.c_void_p | None]:
        """Multiprocessors and stream of the current device."""
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        return properties.multi_processor_count, ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)

    def _call(self, function: Callable[..., None], arguments: Sequence[Any], sm_margin: int, centred: bool) -> None:
        """Twice, as the C API wants: first for the size of the workspace, then for the result."""
        processors, stream = self._device()
        processors -= sm_margin
        handles = [Handle(self.library, a) if isinstance(a, torch.Tensor) else a for a in arguments]
        values = [h.pointer if isinstance(h, Handle) else h for h in handles]
        workspace = Handle(self.library)
        function(*values, workspace.pointer, processors, centred, stream)
        shape = self.library.nvte_tensor_shape(workspace.pointer)
        dtype = TO_TORCH[DType(self.library.nvte_tensor_type(workspace.pointer))]
        workspace.set(torch.empty(tuple(shape.data[: shape.ndim]), dtype=dtype, device="cuda"))
        function(*values, workspace.pointer, processors, centred, stream)

    def rmsnorm_fwd(self, input, weight, eps, ln_out, quantizer, otype, sm_margin, zero_centered_gamma):
        y = torch.empty_like(input, dtype=TO_TORCH[otype]) if ln_out is None else ln_out
        rsigma = torch.empty(input.shape[0], dtype=torch.float32, device=input.device)
        arguments = [input, weight, eps, y, rsigma]
        self._call(self.library.nvte_rmsnorm_fwd, arguments, sm_margin, zero_centered_gamma)
        return [y, None, rsigma]

    def rmsnorm_bwd(self, dz, x, rsigma, gamma, sm_margin, zero_centered_gamma):
        dx, dgamma = torch.empty_like(x), torch.empty_like(gamma)
        arguments = [dz, x, rsigma, gamma, dx, dgamma]
        self._call(self.library.nvte_rmsnorm_bwd, arguments, sm_margin, zero_centered_gamma)
        return [dx, dgamma]

    def layernorm_fwd(self, input, weight, bias, eps, ln_out, quantizer, otype, sm_margin, zero_centered_gamma):
        y = torch.empty_like(input, dtype=TO_TORCH[otype]) if ln_out is None else ln_out
        mu, rsigma = (torch.empty(input.shape[0], dtype=torch.float32, device=input.device) for _ in range(2))
        arguments = [input, weight, bias, eps, y, mu, rsigma]
        self._call(self.library.nvte_layernorm_fwd, arguments, sm_margin, zero_centered_gamma)
        return [y, mu, rsigma]

    def layernorm_bwd(self, dz, x, mu, rsigma, gamma, sm_margin, zero_centered_gamma):
        dx, dgamma, dbeta = torch.empty_like(x), torch.empty_like(gamma), torch.empty_like(gamma)
        arguments = [dz, x, mu, rsigma, gamma, dx, dgamma, dbeta]
        self._call(self.library.nvte_layernorm_bwd, arguments, sm_margin, zero_centered_gamma)
        return [dx, dgamma, dbeta]


def install(path: Path) -> None:
    """Make `transformer_engine` (version only), `.pytorch` (empty) and `transformer_engine_torch` importable."""
    package, framework = types.ModuleType("transformer_engine"), types.ModuleType("transformer_engine.pytorch")
    package.__dict__.update(__version__=VERSION, __path__=[], pytorch=framework)
    extension, norms = types.ModuleType("transformer_engine_torch"), Norms(path)
    names = ("rmsnorm_fwd", "rmsnorm_bwd", "layernorm_fwd", "layernorm_bwd")
    extension.__dict__.update({name: getattr(norms, name) for name in names}, DType=DType)
    for module in (package, framework, extension):
        sys.modules[module.__name__] = module


def main(argv: Sequence[str]) -> None:
    if len(argv) < 2 or argv[0] in ("-h", "--help"):
        raise SystemExit(__doc__)
    path, rest = Path(argv[0]), list(argv[1:])
    if not path.is_file():
        raise SystemExit(f"{path} is not a file: give the path of libtransformer_engine.so {VERSION}")
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: torch.cuda.is_available() is False here")
    install(path)
    if rest[0] == "-m" and len(rest) > 1:
        sys.argv = rest[1:]
        sys.path.insert(0, "")
        runpy.run_module(rest[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = rest
        sys.path.insert(0, str(Path(rest[0]).resolve().parent))
        runpy.run_path(rest[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
