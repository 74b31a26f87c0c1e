"""Give one norm module of a Megatron layer the factor, whatever class it is.

The module becomes an instance of a subclass that is made here and keeps its base's name, because Megatron-FSDP and the
quantization recipes go by class names. Three ways, each exact in the output and in all gradients:

- ``FoldedParameters``: while ``forward`` runs, instance attributes hide gain and bias behind ``s*gain`` and ``s*bias``.
  Right only for a forward that reads them once and whose backward uses what was saved: TE's LayerNormLinear and Apex's
  norms. TE's standalone norms read ``self.weight`` again in backward: dx and dgain would be off by s.
- ``FoldedOp``: torch's and TE's standalone norms run ``olmo_lns.norm`` on their parameters.
- ``MultipliedOutput``: any other norm, its output times s.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import nn

from olmo_lns.errors import LNSConfigError
from olmo_lns.integrations.megatron.upstream import target
from olmo_lns.integrations.norm_sites import Scaled, ScaledOutput, Site, attach, give
from olmo_lns.integrations.patching import verify
from olmo_lns.norm import layer_norm, rms_norm
from olmo_lns.norm.dtypes import fold

_classes: dict[tuple[type, type], type[nn.Module]] = {}


class _MegatronNorm(Scaled):
    """What every scaled norm of Megatron's has."""

    lns_method: str

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle by mixin and base: the class itself goes by its base's name, under which pickle finds the base."""
        reduced = super().__reduce_ex__(protocol)
        kind = type(self)
        if kind not in _classes.values():
            return reduced  # somebody, FSDP for one, made a class of its own of it
        return (_unpickled, kind.__bases__, *reduced[2:])


class FoldedParameters(_MegatronNorm):
    """The module's own forward, over scaled parameters."""

    lns_method = "folded into the fused kernel's gain"
    _gain, _bias = "layer_norm_weight", "layer_norm_bias"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        shadow = self.__dict__
        gain, bias = getattr(self, self._gain), getattr(self, self._bias, None)
        centered = bool(getattr(self, "zero_centered_gamma", False))
        previous = {name: shadow[name] for name in (self._gain, self._bias) if name in shadow}
        shadow[self._gain] = fold(gain, self.lns_scale, dtype=gain.dtype, zero_centered=centered)
        if bias is not None:
            shadow[self._bias] = fold(bias, self.lns_scale, dtype=bias.dtype)
        if centered:  # 1 + gain was folded as it is, since s(1+gain)-1 would cancel
            self.zero_centered_gamma = False
        try:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            for name in (self._gain, self._bias):
                shadow.pop(name, None)
            shadow.update(previous)
            if centered:
                self.zero_centered_gamma = True


class FoldedStandalone(FoldedParameters):
    """The same for a norm of its own, such as Megatron's wrapper of Apex."""

    lns_method = "folded into the norm's gain"
    _gain, _bias = "weight", "bias"


class FoldedOp(_MegatronNorm):
    """A standalone norm of torch or TE, computed by ``olmo_lns.norm`` from its parameters."""

    # Set by _scaled_class; TE's RMSNorm may hand the residual on (fused_residual_rmsnorm).
    _is_te_norm: bool
    _is_rms_norm: bool
    _returns_residual: bool

    @property
    def lns_method(self) -> str:  # type: ignore[override]
        return f"olmo_lns.norm ({self.lns_backend.name})"

    def forward(self, x: torch.Tensor) -> Any:
        weight, bias = getattr(self, "weight", None), getattr(self, "bias", None)
        y = x
        if self._is_te_norm and weight is not None:
            # TE computes in the dtype of the parameters, or of autocast.
            device = x.device.type
            y = x.to(torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype)
        dtype, eps = y.dtype, getattr(self, "eps", None)
        eps = torch.finfo(dtype).eps if eps is None else float(eps)
        centered = bool(getattr(self, "zero_centered_gamma", False))
        how: dict[str, Any] = {"zero_centered": centered, "backend": self.lns_backend}
        if self._is_rms_norm:
            y = rms_norm(y, weight, eps, self.lns_scale, **how)
        else:
            y = layer_norm(y, weight, bias, eps, self.lns_scale, **how)
        return (y.to(dtype), x) if self._returns_residual else y.to(dtype)


class MultipliedOutput(_MegatronNorm, ScaledOutput):
    """Any other norm: one multiplication after it."""

    lns_method = "output multiplied"


def attach_norm(module: Any, site: Site) -> None:
    """Multiply the output of ``module`` by its plan's factor, exactly and for good.

    :param module: a norm (y = Norm(x)), or TE's LayerNormLinear (y = Linear(Norm(x))).
    :raises LNSConfigError: the module carries a factor already, or fuses a norm in a way that was not read.
    """
    attach(module, site)
    scale_norm(module, site.plan.norm_scale)


def scale_norm(module: Any, factor: float) -> None:
    """Give ``module`` the factor alone; the site is on a module around it."""
    give(module, _scaled_class(_mixin_for(module), type(module)), factor)


def is_fused_linear(module: object) -> bool:
    """Whether ``module`` is a norm fused with the linear layer after it (TE's LayerNormLinear)."""
    return getattr(module, "layer_norm_weight", None) is not None


def _mixin_for(module: nn.Module) -> type[_MegatronNorm]:
    kind = type(module)
    names = {base.__name__ for base in kind.__mro__}
    if is_fused_linear(module):
        _verify_fused(kind)
        return FoldedParameters
    if kind in (nn.LayerNorm, nn.RMSNorm) or "TEFusedResidualRMSNorm" in names:
        return FoldedOp
    if _is_te(kind) and names & {"LayerNorm", "RMSNorm"}:
        return FoldedOp
    if any(base.__module__ == "megatron.core.fusions.fused_layer_norm" for base in kind.__mro__):
        return FoldedStandalone
    return MultipliedOutput


def _scaled_class(mixin: type[_MegatronNorm], base: type[nn.Module]) -> type[nn.Module]:
    if (mixin, base) not in _classes:
        # What users and Megatron's class-name rules look at is the base's: name, module, docstring.
        body: dict[str, Any] = {"__module__": base.__module__, "__qualname__": base.__qualname__}
        body["__doc__"] = base.__doc__
        if issubclass(mixin, FoldedOp):
            names = {each.__name__ for each in base.__mro__}
            body |= {"_is_te_norm": _is_te(base), "_is_rms_norm": "RMSNorm" in names}
            body["_returns_residual"] = "TEFusedResidualRMSNorm" in names
        _classes[mixin, base] = types.new_class(
            base.__name__, (mixin, base), exec_body=lambda space: space.update(body)
        )
    return _classes[mixin, base]


def _unpickled(mixin: type[_MegatronNorm], base: type[nn.Module]) -> nn.Module:
    """A module without its state, for pickle and copy."""
    kind = _scaled_class(mixin, base)
    return kind.__new__(kind)


def _verify_fused(kind: type) -> None:
    """Hiding the gain is right only for those forwards of Megatron's that were verified.

    :raises LNSConfigError: another forward. :raises UpstreamChangedError: Megatron's, but none that was verified.
    """
    name = "TELayerNormColumnParallelLinear"
    wrapper = next((base for base in kind.__mro__ if base.__name__ == name), None)
    if wrapper is None:
        raise LNSConfigError(
            f"{kind.__module__}.{kind.__name__} fuses a norm with a linear layer, but is not Megatron's {name}: "
            "LayerNorm Scaling does not know how it uses its gain. Use the TE or the local spec."
        )
    if (owner := next(base for base in kind.__mro__ if "forward" in vars(base))) is not wrapper:
        raise LNSConfigError(
            f"{owner.__module__}.{owner.__name__} overrides the forward of Megatron's {name}: LayerNorm Scaling does "
            "not know how that one uses its gain. Use Megatron's own."
        )
    verify(target(f"{name}.forward"), vars(wrapper)["forward"])


def _is_te(kind: type) -> bool:
    return any(base.__module__.split(".")[0] == "transformer_engine" for base in kind.__mro__)
