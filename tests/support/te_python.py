"""Run Transformer Engine's own Python (LayerNormLinear, its norm ops, Megatron's wrappers) on a CPU.

The wheel ``transformer_engine-2.11.0-py3-none-any.whl`` (TE_VERSION names another) holds all of it; only the C++ module
``transformer_engine_torch`` is missing. Its norm functions come from ``support.tex``, which keeps
their contract strictly; the matrix product is torch's; everything else is an empty name.
This proves wiring and gradients, not the numerics of the kernels.

Call :func:`install` in a fresh process before Megatron is imported.
"""

import enum
import importlib.machinery
import importlib.util
import os
import subprocess
import sys
import tempfile
import types
import zipfile
from pathlib import Path
from unittest import mock

VERSION = os.environ.get("TE_VERSION", "2.11.0")
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "olmo-lns-tests"


class Unavailable(Exception):
    """The wheel can be neither found nor downloaded; the message says why."""


def tree():
    """The unpacked wheel, downloaded once into the cache.

    :raises Unavailable: there is no network, or no such wheel.
    """
    folder = CACHE / f"transformer_engine-{VERSION}"
    if (folder / "transformer_engine" / "pytorch" / "__init__.py").is_file():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as temporary:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:"]
        done = subprocess.run(
            [*command, "-d", temporary, f"transformer_engine=={VERSION}"], capture_output=True, text=True, timeout=120
        )
        wheels = list(Path(temporary).glob("*.whl"))
        if done.returncode or not wheels:
            reason = (done.stderr.strip().splitlines() or ["no wheel"])[-1]
            raise Unavailable(f"transformer_engine {VERSION} cannot be downloaded: {reason}")
        unpacked = Path(temporary) / "unpacked"
        with zipfile.ZipFile(wheels[0]) as archive:
            archive.extractall(unpacked)
        if not folder.exists():
            unpacked.rename(folder)
    return folder


class _Names(type):
    """A class whose every attribute is a distinct integer, like a C++ enumeration."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        value = enum.IntEnum(cls.__name__, {name: len(vars(cls)) + 100})[name]
        setattr(cls, name, value)
        return value

    def __iter__(cls):
        return iter([value for value in vars(cls).values() if isinstance(value, enum.IntEnum)])


def install():
    """Make ``import transformer_engine.pytorch`` work, on CPU tensors."""
    os.environ["NVTE_PROJECT_BUILDING"] = "1"
    folder = tree()
    sys.path.insert(0, str(folder))
    _install_tex()
    _install_package(folder)
    # Names that TE imports for exports, inference and Triton kernels; none of their code runs here.
    # Triton is replaced even where it is installed: without a GPU its autotuner cannot be built.
    names = [name for name in ("onnxscript", "onnx", "einops") if importlib.util.find_spec(name) is None]
    names += ["triton", "triton.language", "triton.language.standard"]
    importlib.import_module("torch._dynamo")  # its first import looks for Triton, and must not find the mock
    present = {name: sys.modules[name] for name in names if name in sys.modules}
    sys.modules.update({name: mock.MagicMock(name=name, __version__="3.5.0") for name in names})
    import transformer_engine.pytorch as te

    for name in names:  # or torch would take the mock for the package
        del sys.modules[name]
    sys.modules.update(present)

    sys.modules["transformer_engine"].pytorch = te
    _take_cpu_tensors()


def _install_tex():
    from support import tex

    module = tex.module()
    if not hasattr(tex.DType, "kFloat4E2M1"):  # only named, as a default argument
        tex.DType.kFloat4E2M1 = 10

    def missing(name):
        if name.startswith("__"):
            raise AttributeError(name)
        value = _Names(name, (), {"__init__": lambda self, *args, **kwargs: None})
        setattr(module, name, value)
        return value

    module.__getattr__ = missing
    module.get_num_cublas_streams = lambda: 1
    sys.modules["transformer_engine_torch"] = module


def _install_package(folder):
    """The package without its ``__init__``, which looks for CUDA libraries."""
    import importlib.metadata as metadata

    version = metadata.version
    metadata.version = lambda name: (
        VERSION if name.replace("_", "-").startswith("transformer-engine") else version(name)
    )
    package = types.ModuleType("transformer_engine")
    package.__path__ = [str(folder / "transformer_engine")]
    package.__version__ = VERSION
    package.__file__ = str(folder / "transformer_engine" / "__init__.py")
    package.__spec__ = importlib.machinery.ModuleSpec("transformer_engine", None, is_package=True)
    sys.modules["transformer_engine"] = package
    import transformer_engine.common as common

    common.load_framework_extension = lambda *args: None
    package.common = common
    import transformer_engine.common.recipe  # noqa: F401


def _take_cpu_tensors():
    import torch

    from olmo_lns.norm import transformer_engine as norm_op

    norm_op.DEVICE_TYPES.add("cpu")
    cuda = torch.cuda
    cuda.is_current_stream_capturing = lambda: False
    cuda.current_stream = cuda.default_stream = lambda *args: mock.MagicMock(cuda_stream=0)
    cuda.get_device_capability = lambda *args: (9, 0)
    cuda.get_device_properties = lambda *args: types.SimpleNamespace(major=9, minor=0, total_memory=1 << 34)
    import transformer_engine.pytorch.cpp_extensions as extensions
    from torch.overrides import TorchFunctionMode
    from transformer_engine.pytorch.cpp_extensions import gemm
    from transformer_engine.pytorch.module import base, layernorm_linear, linear
    from transformer_engine.pytorch.ops.basic import basic_linear

    class SaysCuda(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if getattr(func, "__self__", None) is torch.Tensor.is_cuda:
                return True
            return func(*args, **(kwargs or {}))

    _kept.append(SaysCuda())
    _kept[-1].__enter__()
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    init = base.TransformerEngineBaseModule.__init__

    def built(self, *args, **kwargs):
        with mock.patch.object(torch.cuda, "is_available", lambda: True):  # from 2.20 on it raises without CUDA
            init(self, *args, **kwargs)

    base.TransformerEngineBaseModule.__init__ = built
    for module in (layernorm_linear, linear, basic_linear, extensions, gemm):
        module.general_gemm = _gemm
    for module in (layernorm_linear, linear):
        module.get_dummy_wgrad = lambda shape, dtype, zero=False: torch.zeros(shape, dtype=dtype)


_kept = []


def _gemm(A, B, out_dtype=None, *, accumulate=False, layout="TN", out=None, bias=None, grad=False, **kwargs):
    """TE's ``general_gemm``: B A^T, B A or B^T A, and the bias or its gradient."""
    a, b = A.reshape(-1, A.shape[-1]), B.reshape(-1, B.shape[-1])
    result = b @ a.t() if layout == "TN" else b @ a if layout == "NN" else b.t() @ a
    bias_grad = b.sum(0) if grad and bias is not None else None
    if bias is not None and not grad:
        result = result + bias
    if layout != "NT":
        result = result.view(*B.shape[:-1], result.shape[-1])
    if out is not None:
        out.add_(result.to(out.dtype)) if accumulate else out.copy_(result)
        result = out
    elif out_dtype is not None:
        result = result.to(out_dtype)
    return result, bias_grad, None, None
