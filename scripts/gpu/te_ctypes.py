#!/usr/bin/env python3
"""Transformer Engine's norm kernels from its core library alone, without building its PyTorch extension.

    python scripts/gpu/te_ctypes.py LIBRARY scripts/bench.py --device cuda
    python scripts/gpu/te_ctypes.py LIBRARY -m pytest -m gpu tests/norm

Runs a script (or `-m` module) in which `transformer_engine_torch` is this file's functions over the C API of
`libtransformer_engine.so` 2.11.0. The kernels are the real ones, the extension's Python layer is not: a check that
fails in the library ends the process, and only the four norm functions exist.
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
from typing import Any, Sequence

import torch

VERSION = "2.11.0"  # the struct layouts below are of this release


class DType(enum.IntEnum):
    """As `NVTEDType`."""

    kByte = 0
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6


TO_TORCH = {
    DType.kByte: torch.uint8,
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
    """The library, after the CUDA libraries that it needs from the nvidia-* wheels."""
    folders = [*site.getsitepackages(), *(place for place in sys.path if place.endswith("site-packages"))]
    needed = [found for folder in folders for found in glob.glob(os.path.join(folder, "nvidia/*/lib/lib*.so.*"))]
    names = ("cudart", "nvrtc", "curand", "cublas", "cudnn", "nccl")
    needed = [found for found in needed if any(name in found for name in names)]
    for _ in range(4):  # they depend on each other: load what can be loaded until nothing is left
        needed = [library for library in needed if not _loads(library)]
    library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    pointer, number = ctypes.c_void_p, ctypes.c_int
    library.nvte_create_tensor.restype = pointer
    library.nvte_destroy_tensor.argtypes = [pointer]
    library.nvte_set_tensor_param.argtypes = [ctypes.POINTER(pointer), number, ctypes.POINTER(BasicTensor)]
    library.nvte_tensor_shape.restype, library.nvte_tensor_shape.argtypes = Shape, [pointer]
    library.nvte_tensor_type.argtypes = [pointer]
    ending = [pointer, number, ctypes.c_bool, pointer]  # workspace, multiprocessors, zero_centered_gamma, stream
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
        self.library, self.pointer = library, ctypes.c_void_p(library.nvte_create_tensor(0))
        if tensor is not None:
            self.set(tensor)

    def set(self, tensor: torch.Tensor) -> None:
        shape = Shape((ctypes.c_size_t * 15)(*tensor.shape), tensor.dim())
        basic = BasicTensor(tensor.data_ptr(), int(TO_NVTE[tensor.dtype]), shape)
        self.library.nvte_set_tensor_param(ctypes.byref(self.pointer), 0, ctypes.byref(basic))
        self.tensor = tensor

    def __del__(self) -> None:
        self.library.nvte_destroy_tensor(self.pointer)


def extension(library: ctypes.CDLL) -> types.ModuleType:
    """`transformer_engine_torch` with the four functions, their parameter order and their results."""

    def call(name: str, arguments: Sequence[Any], margin: int, centred: bool) -> None:
        """Twice, as the C API wants: first for the size of the workspace, then for the result."""
        function = getattr(library, f"nvte_{name}")
        processors = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count - margin
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        handles = [Handle(library, each) if isinstance(each, torch.Tensor) else each for each in arguments]
        values = [each.pointer if isinstance(each, Handle) else each for each in handles]
        workspace = Handle(library)
        function(*values, workspace.pointer, processors, centred, stream)
        shape = library.nvte_tensor_shape(workspace.pointer)
        dtype = TO_TORCH[DType(library.nvte_tensor_type(workspace.pointer))]
        workspace.set(torch.empty(tuple(shape.data[: shape.ndim]), dtype=dtype, device="cuda"))
        function(*values, workspace.pointer, processors, centred, stream)

    def outputs(x: torch.Tensor, given: torch.Tensor | None, otype: DType, rows: int) -> list[torch.Tensor]:
        y = torch.empty_like(x, dtype=TO_TORCH[otype]) if given is None else given
        return [y, *(torch.empty(x.shape[0], dtype=torch.float32, device=x.device) for _ in range(rows))]

    def rmsnorm_fwd(x, weight, eps, ln_out, quantizer, otype, sm_margin, zero_centered_gamma):
        y, rsigma = outputs(x, ln_out, otype, 1)
        call("rmsnorm_fwd", [x, weight, eps, y, rsigma], sm_margin, zero_centered_gamma)
        return [y, None, rsigma]

    def rmsnorm_bwd(dz, x, rsigma, gamma, sm_margin, zero_centered_gamma):
        results = [torch.empty_like(x), torch.empty_like(gamma)]
        call("rmsnorm_bwd", [dz, x, rsigma, gamma, *results], sm_margin, zero_centered_gamma)
        return results

    def layernorm_fwd(x, weight, bias, eps, ln_out, quantizer, otype, sm_margin, zero_centered_gamma):
        y, mu, rsigma = outputs(x, ln_out, otype, 2)
        call("layernorm_fwd", [x, weight, bias, eps, y, mu, rsigma], sm_margin, zero_centered_gamma)
        return [y, mu, rsigma]

    def layernorm_bwd(dz, x, mu, rsigma, gamma, sm_margin, zero_centered_gamma):
        results = [torch.empty_like(x), torch.empty_like(gamma), torch.empty_like(gamma)]
        call("layernorm_bwd", [dz, x, mu, rsigma, gamma, *results], sm_margin, zero_centered_gamma)
        return results

    module = types.ModuleType("transformer_engine_torch")
    functions = (rmsnorm_fwd, rmsnorm_bwd, layernorm_fwd, layernorm_bwd)
    module.__dict__.update({function.__name__: function for function in functions}, DType=DType)
    return module


def main(argv: Sequence[str]) -> None:
    if len(argv) < 2 or argv[0] in ("-h", "--help"):
        raise SystemExit(__doc__)
    path, rest = Path(argv[0]), list(argv[1:])
    if not path.is_file():
        raise SystemExit(f"{path} is not a file: give the path of libtransformer_engine.so {VERSION}")
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: torch.cuda.is_available() is False here")
    package, framework = types.ModuleType("transformer_engine"), types.ModuleType("transformer_engine.pytorch")
    package.__dict__.update(__version__=VERSION, __path__=[], pytorch=framework)
    sys.modules |= {module.__name__: module for module in (package, framework, extension(load(path)))}
    module = rest[0] == "-m" and len(rest) > 1
    sys.argv = rest[1:] if module else rest
    sys.path.insert(0, "" if module else str(Path(rest[0]).resolve().parent))
    if module:
        runpy.run_module(rest[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(rest[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
