"""OLMo-core's norms with a factor, folded in where their arithmetic allows it.

``reset_parameters`` stays OLMo-core's. dtypes are those of the stock class: statistics in fp32, the result in the
dtype of x, autocast off.
"""

from __future__ import annotations

from typing import Any, Callable

import torch
from olmo_core.nn import layer_norm as stock
from torch.distributed.tensor import DTensor, Partial, Replicate

from olmo_lns.errors import LNSConfigError
from olmo_lns.integrations.norm_sites import Scaled, give
from olmo_lns.norm.dtypes import fold
from olmo_lns.schemes import Plan


class _OLMoCoreNorm(Scaled):
    """What every scaled norm of OLMo-core's has."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``lns_scale * Norm(x)``; x of shape (..., d_model), also a DTensor sharded over the sequence."""
        with torch.autocast(x.device.type, enabled=False):
            return _locally(self._scaled, x, self.weight, self.bias)  # type: ignore[attr-defined]

    def _scaled(self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
        raise NotImplementedError


class LNSLayerNorm(_OLMoCoreNorm, stock.LayerNorm):
    def _scaled(self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
        y: torch.Tensor = self.lns_backend.layer_norm(x, weight, bias, self.eps, self.lns_factor)
        return y.to(x.dtype)


class LNSRMSNorm(_OLMoCoreNorm, stock.RMSNorm):
    def _scaled(self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
        y: torch.Tensor = self.lns_backend.rms_norm(x, weight, self.eps, self.lns_factor, bias=bias)
        return y.to(x.dtype)


class _RoundedBeforeGain(_OLMoCoreNorm):
    """Norms that round to the dtype of x before the gain, as some Hugging Face models do."""

    def _scaled(self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
        y: torch.Tensor = self.lns_backend.rms_norm(x, None, self.eps, self.lns_factor)  # type: ignore[attr-defined]
        if weight is not None:
            y = y * weight.type_as(x)
        return y if bias is None else y + fold(bias, self.lns_factor, dtype=x.dtype)


class _InKernel(_OLMoCoreNorm):
    """Norms with a kernel of their own, which gets the factor in gain and bias."""

    _rms_norm_fn: Callable[..., torch.Tensor]

    def _kernel(self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
        gain = torch.ones(x.shape[-1:], device=x.device) if weight is None else weight
        gain = fold(gain, self.lns_factor, dtype=x.dtype)
        shift = None if bias is None else fold(bias, self.lns_factor, dtype=x.dtype)
        return self._rms_norm_fn(x, weight=gain, bias=shift, eps=self.eps)  # type: ignore[attr-defined]


class LNSFusedRMSNorm(_InKernel, stock.FusedRMSNorm):
    def _scaled(self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
        return self._kernel(x.float() if self.full_precision else x, weight, bias).to(x.dtype)


class LNSCuTeRMSNorm(_InKernel, stock.CuTeRMSNorm):
    def _scaled(self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
        return self._kernel(x, weight, bias).to(x.dtype)


class LNSL2Norm(_OLMoCoreNorm, stock.L2Norm):
    def _scaled(self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
        return stock.l2_normalize(x) * self.lns_factor  # nothing to fold into: it has no gain


_SCALED: dict[type, type] = {
    stock.LayerNorm: LNSLayerNorm,
    stock.RMSNorm: LNSRMSNorm,
    stock.FusedRMSNorm: LNSFusedRMSNorm,
    stock.CuTeRMSNorm: LNSCuTeRMSNorm,
    stock.L2Norm: LNSL2Norm,
}
if hasattr(stock, "QwenRMSNorm"):  # since 2.6

    class LNSQwenRMSNorm(_RoundedBeforeGain, stock.QwenRMSNorm): ...

    _SCALED[stock.QwenRMSNorm] = LNSQwenRMSNorm
if hasattr(stock, "NemotronRMSNorm"):  # since 3.0

    class LNSNemotronRMSNorm(_RoundedBeforeGain, stock.NemotronRMSNorm): ...

    _SCALED[stock.NemotronRMSNorm] = LNSNemotronRMSNorm


def scale_norm(norm: Any, scale: float, *, form: Plan, field: str) -> None:
    """Give a norm a factor, in place.

    :param form: the plan of the sub-layer without the factor. :param field: the factor's name in the plan.
    :raises LNSConfigError: a class that this integration does not know, or a norm that has a factor already.
    """
    scaled = _SCALED.get(type(norm))
    if scaled is None:
        raise LNSConfigError(
            f"a block norm of class {type(norm).__name__} cannot get a factor: expected one of OLMo-core's "
            f"{', '.join(kind.__name__ for kind in _SCALED)}"
        )
    give(norm, scaled, scale, form=form, field=field)


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

    def local(parameter: torch.Tensor | None) -> torch.Tensor | None:
        return parameter.to_local(grad_placements=grads) if isinstance(parameter, DTensor) else parameter

    y = function(x.to_local(), local(weight), local(bias))
    return DTensor.from_local(y, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride())
