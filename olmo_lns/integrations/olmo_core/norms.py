"""OLMo-core's norms with a factor, folded in where their arithmetic allows it.

dtypes are those of the stock class: statistics in fp32, the result in the dtype of x, autocast off. A norm that is
not listed has its output multiplied.
"""

from __future__ import annotations

from typing import Any, Callable

import torch
from olmo_core.nn import layer_norm as stock
from torch.distributed.tensor import DTensor, Partial, Replicate

from olmo_lns.errors import LNSConfigError
from olmo_lns.norm.dtypes import fold
from olmo_lns.sites import Scaled


class _OLMoCoreNorm(Scaled):
    """Mixin of every norm whose arithmetic is known."""

    weight: torch.Tensor | None
    bias: torch.Tensor | None
    eps: float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``lns_scale * Norm(x)``; x of shape (..., d_model), also a DTensor sharded over the sequence."""
        with torch.autocast(x.device.type, enabled=False):
            return _locally(self._scaled, x, self.weight, self.bias)

    def _scaled(self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
        raise NotImplementedError


class _LayerNorm(_OLMoCoreNorm):
    def _scaled(self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
        y: torch.Tensor = self.lns_backend.layer_norm(x, weight, bias, self.eps, self.lns_factor)
        return y.to(x.dtype)


class _RMSNorm(_OLMoCoreNorm):
    def _scaled(self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
        y: torch.Tensor = self.lns_backend.rms_norm(x, weight, self.eps, self.lns_factor, bias=bias)
        return y.to(x.dtype)


class _RoundedBeforeGain(_OLMoCoreNorm):
    """Norms that round to the dtype of x before the gain, as some Hugging Face models do."""

    def _scaled(self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
        y: torch.Tensor = self.lns_backend.rms_norm(x, None, self.eps, self.lns_factor)
        if weight is not None:
            y = y * weight.type_as(x)
        return y if bias is None else y + fold(bias, self.lns_factor, dtype=x.dtype)


class _InKernel(_OLMoCoreNorm):
    """Norms with a kernel of their own, which gets the factor in gain and bias."""

    _rms_norm_fn: Callable[..., torch.Tensor]
    full_precision: bool

    def _scaled(self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
        wide = x.float() if isinstance(self, stock.FusedRMSNorm) and self.full_precision else x
        gain = torch.ones(x.shape[-1:], device=x.device) if weight is None else weight
        gain = fold(gain, self.lns_factor, dtype=wide.dtype)
        shift = None if bias is None else fold(bias, self.lns_factor, dtype=wide.dtype)
        return self._rms_norm_fn(wide, weight=gain, bias=shift, eps=self.eps).to(x.dtype)


#: Name of OLMo-core's class -> the mixin that knows its arithmetic.
FOLDED: dict[str, type] = {
    "LayerNorm": _LayerNorm,
    "RMSNorm": _RMSNorm,
    "FusedRMSNorm": _InKernel,
    "CuTeRMSNorm": _InKernel,
    "QwenRMSNorm": _RoundedBeforeGain,
    "NemotronRMSNorm": _RoundedBeforeGain,
}


def folded(kind: type) -> type | None:
    """The mixin for one of OLMo-core's own classes of norms; None for any other class."""
    return FOLDED.get(kind.__name__) if kind.__module__ == stock.__name__ else None


def _locally(
    function: Callable[..., torch.Tensor], x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    """``function`` on the part of the sequence that a tensor-parallel rank holds."""
    if not isinstance(x, DTensor):
        return function(x, weight, bias)
    if any(placement.is_shard(x.dim() - 1) or placement.is_partial() for placement in x.placements):
        raise LNSConfigError(f"a norm needs whole channels; its input is placed {x.placements}")
    # Each rank sees some of the tokens only: what it knows of a parameter's gradient is a summand.
    grads = [Partial() if placement.is_shard() else Replicate() for placement in x.placements]

    def local(parameter: torch.Tensor | None) -> Any:
        return parameter.to_local(grad_placements=grads) if isinstance(parameter, DTensor) else parameter

    y = function(x.to_local(), local(weight), local(bias))
    return DTensor.from_local(y, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride())
