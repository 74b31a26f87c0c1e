"""The two norms of a block, carrying the factor of their layer.

They are subclasses of OLMo's own norm classes: ``get_param_groups`` recognises norms by class,
and a wrapper module would rename parameters in the state dict.
"""

from __future__ import annotations

import torch
from olmo.model import LayerNorm, LayerNormBase, RMSLayerNorm

from olmo_lns.integrations import norm_sites
from olmo_lns.integrations.norm_sites import Scaled, give
from olmo_lns.norm.dtypes import compute_dtype, output_dtype, rms_output_dtype, without_autocast

__all__ = ["LNSLayerNorm", "LNSRMSLayerNorm", "attach_norm", "scale_norm"]


class LNSRMSLayerNorm(Scaled, RMSLayerNorm):
    """``lns_scale * RMSNorm(x)`` for x of shape (..., d_model); dtypes as OLMo's ``RMSLayerNorm``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.lns_backend.rms_norm(x, self.weight, self.eps, self.lns_factor, bias=self.bias)
        return y


class LNSLayerNorm(Scaled, LayerNorm):
    """``lns_scale * LayerNorm(x)`` for x of shape (..., d_model); dtypes as OLMo's ``LayerNorm``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor
        if not self.low_precision:
            y = self.lns_backend.layer_norm(x, self.weight, self.bias, self.eps, self.lns_factor)
            return y
        x = self._cast_if_autocast_enabled(x)
        weight = self._cast_if_autocast_enabled(self.weight) if self.weight is not None else None
        bias = self._cast_if_autocast_enabled(self.bias) if self.bias is not None else None
        with torch.autocast(enabled=False, device_type=x.device.type):
            y = self.lns_backend.layer_norm(x, weight, bias, self.eps, self.lns_factor)
            return y


class GroupedRMSLayerNorm(Scaled, RMSLayerNorm):
    """RMSNorm over groups of channels, for x of shape (..., d_model)."""

    lns_groups: int

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with without_autocast(x.device.type):
            y = self.lns_backend.rms_norm(_groups_of(x, self.lns_groups), None, self.eps, 1.0).flatten(-2)
            y = _affine(y, self.weight, self.bias)
        return y.to(rms_output_dtype(x, self.weight, self.bias))


class GroupedLayerNorm(Scaled, LayerNorm):
    """LayerNorm over groups of channels, for x of shape (..., d_model)."""

    lns_groups: int

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self._cast_if_autocast_enabled(x) if self.low_precision else x
        with without_autocast(x.device.type):
            y = self.lns_backend.layer_norm(_groups_of(x, self.lns_groups), None, None, self.eps, 1.0).flatten(-2)
            y = _affine(y, self.weight, self.bias)
        return y.to(output_dtype(x.dtype, x.device.type))


def _groups_of(x: torch.Tensor, groups: int) -> torch.Tensor:
    """In fp32 (fp64 for fp64): the result is rounded once, at the end."""
    return x.to(compute_dtype(x.dtype)).unflatten(-1, (groups, -1))


def _affine(y: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    y = y if weight is None else weight * y
    return y if bias is None else y + bias


#: OLMo's class -> ours, without and with groups of channels.
_SCALED: dict[type, tuple[type, type]] = {
    RMSLayerNorm: (LNSRMSLayerNorm, GroupedRMSLayerNorm),
    LayerNorm: (LNSLayerNorm, GroupedLayerNorm),
}


def attach_norm(norm: LayerNormBase, site: norm_sites.Site) -> None:
    """Turn the norm in front of a sub-layer into the norm of its plan, in place.

    :raises TypeError: ``norm`` is not one of OLMo's norms.
    :raises LNSConfigError: it has a site already.
    """
    if not isinstance(norm, Scaled):
        scale_norm(norm, site.plan.norm_scale)
    norm_sites.attach(norm, site)


def scale_norm(norm: LayerNormBase, scale: float, *, groups: int = 1) -> None:
    """Let ``norm`` compute ``scale * Norm(x)``, in place.

    :param groups: statistics over d_model / groups channels; then without a factor.
    :raises TypeError: ``norm`` is not one of OLMo's norms.
    """
    if type(norm) not in _SCALED:
        raise TypeError(f"cannot scale a {type(norm).__name__}; expected OLMo's RMSLayerNorm or LayerNorm")
    give(norm, _SCALED[type(norm)][groups > 1], scale)
    if groups > 1:
        norm.lns_groups = groups
