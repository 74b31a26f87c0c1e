"""The norms that ``bench_norms.py`` times: stock, stock then multiplied by the factor, and with the factor folded in.

``X`` is a plain norm, ``X x s`` multiplies afterwards, ``ours (X)`` folds the factor into it. Stock and ours are both
modules, built once for a weight, as a model holds them: neither pays for something that the other does not.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Callable, Iterator

import torch
import torch.nn.functional as F

from olmo_lns import lns_scale
from olmo_lns.norm import Backend, cpp, transformer_engine
from olmo_lns.norm.kernels import quack_problem

EPS = 1e-6
SCALE = lns_scale(7)
KINDS = ("rms", "layer")
Norm = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Contender:
    """``build`` makes the norm for a weight; ``around`` is entered while its calls are made (or captured)."""

    build: Callable[[torch.nn.Parameter], Norm]
    around: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext


def contenders(kind: str, device: torch.device, *, compiled: bool, graphs: bool) -> dict[str, Contender]:
    """Name -> contender; the stock norm's name is ``olmo``.

    :param compiled: with the formula compiled by Inductor.
    :param graphs: calls are captured in CUDA graphs, so what is switched on or off while capturing stays so.
    """

    def functional(norm: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Contender:
        return Contender(lambda weight: lambda x: norm(x, weight))

    found = {"olmo": Contender(lambda weight: _stock(kind, weight)), "olmo x s": Contender(lambda w: _scaled(kind, w))}
    if kind == "rms":
        found["torch"] = functional(lambda x, w: F.rms_norm(x, w.shape, w, EPS))
        found["torch x s"] = functional(lambda x, w: F.rms_norm(x, w.shape, w, EPS) * SCALE)
    found["ours (torch)"] = Contender(lambda weight: _ours(kind, "torch", weight))
    if device.type == "cpu":
        if problem := cpp.problem():
            print(f"without ours (cpp): {problem}")
        else:
            found["ours (cpp)"] = Contender(lambda weight: _ours(kind, "cpp", weight))
    if compiled:
        found["formula compiled"] = Contender(lambda weight: torch.compile(_ours(kind, "torch", weight), dynamic=False))
    if device.type == "cuda":
        found |= _on_cuda(kind, device, functional, graphs)
    return found


def _on_cuda(
    kind: str, device: torch.device, functional: Callable[..., Contender], graphs: bool
) -> dict[str, Contender]:
    found = {}
    if kind == "rms":
        found["ours (torch fused)"] = Contender(lambda weight: _ours(kind, "torch-fused", weight))
        if graphs and quack_problem(device) is None:
            plain = functional(lambda x, w: F.rms_norm(x, w.shape, w, EPS))
            found["torch without quack"] = Contender(plain.build, _without_quack)
            found["ours (torch fused without quack)"] = Contender(
                lambda weight: _ours(kind, "torch-fused", weight), _without_quack
            )
    if problem := transformer_engine.status().problem:
        print(f"without Transformer Engine: {problem}")
        return found
    if kind == "rms":
        found["te"] = functional(lambda x, w: transformer_engine._rms_norm_op(x, w, EPS, x.dtype)[0])
        found["te x s"] = functional(lambda x, w: transformer_engine._rms_norm_op(x, w, EPS, x.dtype)[0] * SCALE)
    found["ours (te)"] = Contender(lambda weight: _ours(kind, "te", weight))
    return found


class Ours(torch.nn.Module):
    """Our RMSNorm as a model's block holds it."""

    def __init__(self, backend: str, weight: torch.nn.Parameter):
        super().__init__()
        self.weight, self.eps, self.scale = weight, EPS, SCALE
        self.backend = Backend(backend, "benchmark")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.backend.rms_norm(x, self.weight, self.eps, self.scale)


class OursLayer(Ours):
    """Our LayerNorm."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.backend.layer_norm(x, self.weight, None, self.eps, self.scale)


def _ours(kind: str, backend: str, weight: torch.nn.Parameter) -> Ours:
    return {"rms": Ours, "layer": OursLayer}[kind](backend, weight)


def _stock(kind: str, weight: torch.nn.Parameter) -> torch.nn.Module:
    """OLMo's own norm with this weight."""
    try:
        from olmo.config import ModelConfig
        from olmo.model import LayerNorm, RMSLayerNorm
    except ImportError as error:
        raise SystemExit(f"OLMo cannot be imported ({error}): pip install 'olmo-lns[olmo]'") from None
    config = ModelConfig(d_model=len(weight), layer_norm_eps=EPS, init_device="cpu", include_bias=False)
    module: torch.nn.Module = {"rms": RMSLayerNorm, "layer": LayerNorm}[kind](config, elementwise_affine=True)
    module.weight = weight
    return module


def _scaled(kind: str, weight: torch.nn.Parameter) -> Norm:
    stock = _stock(kind, weight)
    return lambda x: stock(x) * SCALE


@contextlib.contextmanager
def _without_quack() -> Iterator[None]:
    """torch's own fused kernel, the vendored Quack switched off."""
    from torch._native import registry

    symbols = ["_fused_rms_norm", "_fused_rms_norm_backward"]
    registry.deregister_op_overrides(disable_op_symbols=symbols)
    try:
        yield
    finally:
        registry.reenable_op_overrides(enable_op_symbols=symbols)


def kept_bytes(norm: Norm, x: torch.Tensor, weight: torch.Tensor) -> int:
    """Bytes that autograd keeps from the forward for the backward, besides the input and the weight."""
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        y = norm(x)
    for own in (x, weight):
        kept.pop(own.untyped_storage().data_ptr(), None)
    del y
    return sum(kept.values())
