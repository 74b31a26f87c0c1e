"""Compiled backend of ``y = s * Norm(x)`` on CPU: ``cpu.cpp``, built where it is asked for and used where it was built.

PyTorch's operations can carry the factor in no fewer operations than the norm and a product, which is what a small
input costs; one function in C++ needs none. It takes fp32 and bf16, parameters and input of one dtype, in eager mode,
and hands everything else to the PyTorch backend.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch

from olmo_lns.environment import cache
from olmo_lns.errors import BackendUnavailableError
from olmo_lns.norm import pytorch, pytorch_layer

__all__ = ["BUILD", "build", "layer_norm", "library", "load", "problem", "rms_norm"]

#: What builds it, for messages.
BUILD = "olmo-lns doctor --tune cpu"
SOURCE, _ROWS = (Path(__file__).with_name(name) for name in ("cpu.cpp", "cpu_rows.h"))
_MODULE = "olmo_lns_norm"
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, type(None)))  # a subclass may have its own idea of what to do
_norm: Any = None


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    scale: float,
    *,
    bias: torch.Tensor | None = None,
    zero_centered: bool = False,
) -> torch.Tensor:
    """``scale * (x / rms(x) * weight + bias)``; see :func:`olmo_lns.norm.rms_norm`.

    :raises BackendUnavailableError: the library is not there, see :func:`problem`.
    """
    if (  # here and not in a function of its own: that would cost a twentieth of a small norm
        not torch.compiler.is_compiling()
        and x.__class__ in _PLAIN
        and weight.__class__ in _PLAIN
        and bias.__class__ in _PLAIN
    ):
        y = (_norm or load())(x, weight, bias, eps, scale, zero_centered, False)
        if y is not None:
            return y
    return pytorch.rms_norm(x, weight, eps, scale, bias=bias, zero_centered=zero_centered)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    scale: float,
    *,
    zero_centered: bool = False,
) -> torch.Tensor:
    """``scale * LayerNorm(x)``; see :func:`olmo_lns.norm.layer_norm`.

    :raises BackendUnavailableError: the library is not there, see :func:`problem`.
    """
    if (
        not torch.compiler.is_compiling()
        and x.__class__ in _PLAIN
        and weight.__class__ in _PLAIN
        and bias.__class__ in _PLAIN
    ):
        y = (_norm or load())(x, weight, bias, eps, scale, zero_centered, True)
        if y is not None:
            return y
    return pytorch_layer.layer_norm(x, weight, bias, eps, scale, zero_centered=zero_centered)


def library() -> Path:
    """Where the library is, once built: its name holds the source, the Python, the torch and the processor's kind."""
    what = [SOURCE.read_text(), _ROWS.read_text(), sys.implementation.cache_tag, torch.__version__, platform.machine()]
    what += _instructions()
    return cache() / f"norms-{hashlib.sha256(repr(what).encode()).hexdigest()[:16]}.so"


def problem() -> str | None:
    """Why the compiled norms cannot be used here, None if they can."""
    if not os.path.exists(library()):
        return f"the norms are not compiled on this machine for torch {torch.__version__} ({BUILD} does it)"
    try:
        load()
    except BackendUnavailableError as error:
        return str(error)
    return None


def load() -> Any:
    """The compiled function.

    :raises BackendUnavailableError: it was not built, or cannot be loaded.
    """
    global _norm
    if _norm is None:
        path = library()
        if not os.path.exists(path):
            raise BackendUnavailableError(f"the norm backend 'cpp' needs {path}, which is not there: run {BUILD}")
        loader = importlib.machinery.ExtensionFileLoader(_MODULE, str(path))
        try:
            module = importlib.util.module_from_spec(importlib.util.spec_from_loader(_MODULE, loader))  # type: ignore[arg-type]
            loader.exec_module(module)
        except ImportError as error:
            raise BackendUnavailableError(f"{path} cannot be loaded ({error}): delete it and run {BUILD}") from None
        _norm = module.norm
    return _norm


def build() -> Path:
    """Compile the norms for this Python, torch and processor, about half a minute; nothing is done where they are.

    :returns: :func:`library`.
    :raises BackendUnavailableError: there is no compiler, or it fails; the message holds its last words.
    """
    target = library()
    if target.exists():
        return target
    if sys.platform != "linux":
        raise BackendUnavailableError(f"the norms are compiled on Linux only, this is {sys.platform}")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(f".{os.getpid()}.tmp")  # renamed when complete: another process may be loading
    try:
        try:
            done = subprocess.run(_command(partial), capture_output=True, text=True)
        except (OSError, ValueError) as error:  # CXX names nothing that can be run, or has an open quotation mark
            raise BackendUnavailableError(f"the C++ compiler {_compiler()!r} cannot be run: {error}") from None
        if done.returncode:
            lines = done.stderr.strip().splitlines()
            said = next((line for line in lines if "error" in line), lines[-1] if lines else "it said nothing")
            raise BackendUnavailableError(f"{_compiler()} could not compile {SOURCE} (exit {done.returncode}): {said}")
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    load()
    return target


def _command(target: Path) -> list[str]:
    root = Path(torch.__file__).parent
    includes = [root / "include", root / "include/torch/csrc/api/include", sysconfig.get_path("include")]
    abi = int(torch.compiled_with_cxx11_abi())
    return [
        *shlex.split(_compiler()),
        # Not -ffast-math: linked into a library, it makes the whole process flush small numbers to zero.
        *("-std=c++20", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-DAT_PARALLEL_OPENMP=1"),
        *_instructions(),
        *("-shared", "-fPIC", "-w", f"-DTORCH_EXTENSION_NAME={_MODULE}", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"),
        *(f"-I{path}" for path in includes),
        *(str(SOURCE), "-o", str(target)),
        *(f"-L{root / 'lib'}", "-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python"),
    ]


def _compiler() -> str:
    """``$CXX``, or the compiler that is there.

    :raises BackendUnavailableError: there is none.
    """
    found = os.environ.get("CXX", "").strip() or next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if found is None:
        raise BackendUnavailableError("no C++ compiler is on PATH (c++, g++, clang++); install one or set CXX")
    return found


def _instructions() -> list[str]:
    """Of the processor, as torch found it; wider ones than AVX2 gain nothing here."""
    return ["-mavx2", "-mfma"] if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512") else []
