"""The two norms of a block, carrying the factor of their layer.

They are subclasses of OLMo's own norm classes: ``get_param_groups`` recognises norms by class,
and a wrapper module would rename parameters in the state dict.
"""

from __future__ import annotations

from typing import Any

import torch
from olmo.model import LayerNorm, LayerNormBase, RMSLayerNorm

from olmo_lns.norm import choose_backend
from olmo_lns.scale import lns_scale

__all__ = ["LNSLayerNorm", "LNSRMSLayerNorm", "base_norm", "bind", "is_bound"]


class LNSRMSLayerNorm(RMSLayerNorm):
    """``lns_scale * RMSNorm(x)`` for x of shape (..., d_model); dtypes as OLMo's ``RMSLayerNorm``."""

    # A plain float: a tensor buffer would be lost on meta device, and a None would be a branch
    # in ``forward`` for which torch.compile builds one graph per layer.
    lns_scale: float
    layer_number: int
    lns_backend: Any

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lns_backend.rms_norm(x, self.weight, self.eps, _factor(self), bias=self.bias)

    def extra_repr(self) -> str:
        return f"layer_number={self.layer_number}, lns_scale={self.lns_scale:.6g}"


class LNSLayerNorm(LayerNorm):
    """``lns_scale * LayerNorm(x)`` for x of shape (..., d_model); dtypes as OLMo's ``LayerNorm``."""

    lns_scale: float
    layer_number: int
    lns_backend: Any

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.low_precision:
            return self.lns_backend.layer_norm(x, self.weight, self.bias, self.eps, _factor(self))
        x = self._cast_if_autocast_enabled(x)
        weight = self._cast_if_autocast_enabled(self.weight) if self.weight is not None else None
        bias = self._cast_if_autocast_enabled(self.bias) if self.bias is not None else None
        with torch.autocast(enabled=False, device_type=x.device.type):
            return self.lns_backend.layer_norm(x, weight, bias, self.eps, _factor(self))

    extra_repr = LNSRMSLayerNorm.extra_repr


def _factor(norm: Any) -> Any:
    """The factor as the backend takes it: the float, or for torch.compile an equal 0-d CPU tensor.

    Dynamo burns the first block's float into its graph and makes the second block's an input. The
    recomputation of a checkpointed first block then runs the other graph, which saves other
    tensors, and torch stops with a CheckpointError. A tensor is an input from the start: one
    graph for all blocks. It is no buffer, so state dicts, meta device and FSDP do not know it.
    """
    if torch.compiler.is_compiling():
        return norm.lns_scale_tensor
    return norm.lns_scale


_SCALED: dict[type, type] = {RMSLayerNorm: LNSRMSLayerNorm, LayerNorm: LNSLayerNorm}


def base_norm(kind: str, config: Any, size: int | None, **kwargs: Any) -> LayerNormBase:
    """OLMo's own norm of type ``rms``, ``default`` or ``low_precision``, without a factor."""
    if kind == "rms":
        return RMSLayerNorm(config, size=size, **kwargs)
    return LayerNorm(config, size=size, low_precision=kind == "low_precision", **kwargs)


def bind(norm: LayerNormBase, layer_number: int, exponent: float) -> None:
    """Turn a block's norm into the scaled norm of block ``layer_number`` (1-based), in place.

    Only the class changes: parameters, their order and every hook stay as upstream made them.

    :raises TypeError: ``norm`` is not one of OLMo's norms, or is bound already.
    """
    scaled = _SCALED.get(type(norm))
    if scaled is None:
        raise TypeError(f"cannot scale a {type(norm).__name__}; expected OLMo's RMSLayerNorm or LayerNorm")
    norm.__class__ = scaled
    norm.lns_scale = lns_scale(layer_number, exponent=exponent)
    norm.lns_scale_tensor = torch.tensor(norm.lns_scale, dtype=torch.float64, device="cpu")
    norm.layer_number = layer_number
    norm.lns_backend = choose_backend()


def is_bound(module: Any) -> bool:
    """Whether ``module`` is a norm that carries the factor."""
    return isinstance(module, (LNSRMSLayerNorm, LNSLayerNorm))
