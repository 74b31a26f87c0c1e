"""OLMo-core's ``rms`` and ``default`` norms with the factor in gain and bias; the outputs of others are multiplied."""

from __future__ import annotations

from typing import Any

import torch
from olmo_core.nn import layer_norm as stock
from torch.distributed.tensor import DTensor

from olmo_lns.norm import layer_norm, rms_norm
from olmo_lns.scaled import Scaled


class _Folded(Scaled):
    """A norm as the stock class computes it: statistics in fp32, the result in the dtype of x, autocast off."""

    def forward(self: Any, x: torch.Tensor) -> Any:
        """Return ``lns_scale * Norm(x)``; x of shape (..., d_model)."""
        if isinstance(x, DTensor):  # tensor parallelism, which OLMo-core's forward supports
            return super().forward(x) * self.lns_factor  # type: ignore[misc]
        with torch.autocast(x.device.type, enabled=False):
            return self._scaled(x).to(x.dtype)


class _LayerNorm(_Folded):
    def _scaled(self: Any, x: torch.Tensor) -> Any:
        return layer_norm(x, self.weight, self.bias, self.eps, self.lns_factor, backend=self.lns_backend)


class _RMSNorm(_Folded):
    def _scaled(self: Any, x: torch.Tensor) -> Any:
        return rms_norm(x, self.weight, self.eps, self.lns_factor, bias=self.bias, backend=self.lns_backend)


def folded(kind: type) -> type | None:
    """Return the mixin for a class of OLMo-core with known arithmetic; None for any other."""
    return {stock.LayerNorm: _LayerNorm, stock.RMSNorm: _RMSNorm}.get(kind)
