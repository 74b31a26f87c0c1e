"""The two norms of a block, carrying the factor of their layer.

They are subclasses of OLMo's own norm classes: ``get_param_groups`` recognises norms by class,
and a wrapper module would rename parameters in the state dict.
"""

from __future__ import annotations

import math
from typing import Any, Callable

import torch
from olmo.model import LayerNorm, LayerNormBase, RMSLayerNorm

from olmo_lns.integrations import norm_sites
from olmo_lns.integrations.scaled import Scaled, give
from olmo_lns.norm import Backend
from olmo_lns.norm.dtypes import cast, compute_dtype, output_dtype, without_autocast
from olmo_lns.norm.pytorch import rms_output_dtype
from olmo_lns.schemes import Plan

__all__ = [
    "LNSLayerNorm",
    "LNSRMSLayerNorm",
    "attach_norm",
    "backend_of",
    "base_norm",
    "groups_of",
    "pre_scale_of",
    "scale_norm",
    "scale_of",
]

_FORMULA = Backend("torch", "torch.compile")


class _Scaled(Scaled):
    """What both scaled norms have."""

    lns_pre_scale: float = 1.0
    lns_groups: int = 1
    lns_eps_tensor: torch.Tensor | None = None
    eps: float
    layer_number: int

    def _backend_and_eps(self) -> tuple[Backend, Any]:
        """How to compute it. A kernel's eps is a constant of a compiled graph, and under a factor of the input each
        block has its own: there it is a tensor, an input of the one graph, for the formula, which compilers fuse."""
        if self.lns_eps_tensor is None or not torch.compiler.is_compiling():
            return self.lns_backend, self.eps
        return _FORMULA, self.lns_eps_tensor

    def lns_plan(self, sub_layer: str) -> Plan:
        """The plan that ``forward`` computes."""
        return Plan(norm_scale=self.lns_scale, pre_scale=self.lns_pre_scale, groups=self.lns_groups)

    def extra_repr(self) -> str:
        found = f"layer_number={self.layer_number}, {super().extra_repr()}"
        found += f", lns_pre_scale={self.lns_pre_scale:.6g}" if self.lns_pre_scale != 1.0 else ""
        return found + (f", lns_groups={self.lns_groups}" if self.lns_groups != 1 else "")


class LNSRMSLayerNorm(_Scaled, RMSLayerNorm):
    """``lns_scale * RMSNorm(x)`` for x of shape (..., d_model); dtypes as OLMo's ``RMSLayerNorm``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        backend, eps = self._backend_and_eps()
        return backend.rms_norm(x, self.weight, eps, self.lns_factor, bias=self.bias)


class LNSLayerNorm(_Scaled, LayerNorm):
    """``lns_scale * LayerNorm(x)`` for x of shape (..., d_model); dtypes as OLMo's ``LayerNorm``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        backend, eps = self._backend_and_eps()
        if not self.low_precision:
            return backend.layer_norm(x, self.weight, self.bias, eps, self.lns_factor)
        x = self._cast_if_autocast_enabled(x)
        weight = self._cast_if_autocast_enabled(self.weight) if self.weight is not None else None
        bias = self._cast_if_autocast_enabled(self.bias) if self.bias is not None else None
        with torch.autocast(enabled=False, device_type=x.device.type):
            return backend.layer_norm(x, weight, bias, eps, self.lns_factor)


class _Grouped(_Scaled):
    """Statistics over groups of channels of one token; gain and bias per channel, as in the norm without groups."""

    weight: torch.Tensor | None
    bias: torch.Tensor | None

    def _grouped(self, x: torch.Tensor, normalised: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """The rest around ``normalised``, in fp32 (fp64 for fp64): whoever calls it rounds the result, once."""
        with without_autocast(x.device.type):
            wide = cast(x, compute_dtype(x.dtype))
            y = normalised(wide.unflatten(-1, (self.lns_groups, -1))).flatten(-2)
            y = y if self.weight is None else self.weight * y
            return y if self.bias is None else y + self.bias


class GroupedRMSLayerNorm(_Grouped, RMSLayerNorm):
    """RMSNorm over groups of channels, for x of shape (..., d_model)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self._grouped(x, lambda wide: self.lns_backend.rms_norm(wide, None, self.eps, 1.0))
        return cast(y, rms_output_dtype(x, self.weight, self.bias))


class GroupedLayerNorm(_Grouped, LayerNorm):
    """LayerNorm over groups of channels, for x of shape (..., d_model)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self._cast_if_autocast_enabled(x) if self.low_precision else x
        y = self._grouped(x, lambda wide: self.lns_backend.layer_norm(wide, None, None, self.eps, 1.0))
        return cast(y, output_dtype(x.dtype, x.device.type))


#: OLMo's class -> ours, without and with groups of channels.
_SCALED: dict[type, tuple[type, type]] = {
    RMSLayerNorm: (LNSRMSLayerNorm, GroupedRMSLayerNorm),
    LayerNorm: (LNSLayerNorm, GroupedLayerNorm),
}


def base_norm(kind: str, config: Any, size: int | None, **kwargs: Any) -> LayerNormBase:
    """OLMo's own norm of type ``rms``, ``default`` or ``low_precision``, without a factor."""
    if kind == "rms":
        return RMSLayerNorm(config, size=size, **kwargs)
    return LayerNorm(config, size=size, low_precision=kind == "low_precision", **kwargs)


def attach_norm(norm: LayerNormBase, site: norm_sites.Site) -> None:
    """Turn the norm in front of a sub-layer into the norm of its plan, in place.

    :raises TypeError: ``norm`` is not one of OLMo's norms.
    :raises LNSConfigError: it has a site already.
    """
    if not isinstance(norm, _Scaled):
        _classes(norm)
    norm_sites.attach(norm, site)
    scale_norm(norm, site.layer_number, site.plan.norm_scale)


def scale_norm(
    norm: LayerNormBase, layer_number: int, scale: float, *, pre_scale: float = 1.0, groups: int = 1
) -> None:
    """Let ``norm`` compute ``scale * Norm(pre_scale * x)``, in place.

    :param groups: statistics over d_model / groups channels; then without factors.
    :raises TypeError: ``norm`` is not one of OLMo's norms.
    """
    give(norm, _classes(norm)[groups > 1], scale)
    norm.layer_number = layer_number
    if groups > 1:
        norm.lns_groups = groups
    if pre_scale != 1.0:
        # N(s x) with eps is N(x) with eps / s^2: no pass over x.
        norm.lns_pre_scale = pre_scale
        norm.eps = norm.eps / pre_scale**2 if pre_scale**2 else math.inf
        norm.lns_eps_tensor = torch.tensor(norm.eps, dtype=torch.float64, device="cpu")


def _classes(norm: Any) -> tuple[type, type]:
    if type(norm) not in _SCALED:
        raise TypeError(f"cannot scale a {type(norm).__name__}; expected OLMo's RMSLayerNorm or LayerNorm")
    return _SCALED[type(norm)]


def backend_of(module: Any) -> Any:
    """Which implementation a norm of ours runs; None for every other module."""
    return module.lns_backend if isinstance(module, _Scaled) else None


def scale_of(norm: Any) -> float:
    """The factor that ``norm`` multiplies by; 1 for a norm of OLMo's own."""
    return norm.lns_scale if isinstance(norm, _Scaled) else 1.0


def pre_scale_of(norm: Any) -> float:
    """The factor of what ``norm`` is given."""
    return norm.lns_pre_scale if isinstance(norm, _Scaled) else 1.0


def groups_of(norm: Any) -> int:
    """Over how many groups of channels ``norm`` takes its statistics."""
    return norm.lns_groups if isinstance(norm, _Grouped) else 1
