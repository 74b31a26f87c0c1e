"""The modules of a block that carry a factor: a norm, or the branch after it.

The norms whose arithmetic is known are computed by :mod:`olmo_lns.norm` with the factor inside; any
other norm (Liger's, Apex's) and a branch have their output multiplied. A branch is scaled as a whole,
not at its last projection: an adapter that PEFT puts around that projection is then scaled with it.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from olmo_lns.integrations.norm_sites import Scaled, ScaledOutput
from olmo_lns.schemes import Plan

__all__ = ["how", "scaled_class"]


class _Replaceable(Scaled):
    """What transformers, or a library on it, may take the forward of."""

    # `kernelize` would replace the forward by a kernel that knows no factor.
    kernel_layer_name = "LNSScaled"

    def lns_plan(self, sub_layer: str) -> Plan:
        """The plan that ``forward`` computes; without its factor where somebody put another forward in its place."""
        replaced = "forward" in vars(self) and "_old_forward" not in vars(self)  # accelerate's hooks keep the old one
        return self.lns_form if replaced else super().lns_plan(sub_layer)


class _ScaledOutput(_Replaceable, ScaledOutput):
    """Any norm that is not known, or a branch."""


def _rms_norm(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """RMSNorm with gain, as Llama, Qwen and Mistral have it."""
    return self.lns_backend.rms_norm(hidden_states, self.weight, self.variance_epsilon, self.lns_factor)


def _rms_norm_input_dtype(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """As OLMo 2 and 3 have it: the output has the dtype of the input."""
    return _rms_norm(self, hidden_states).to(hidden_states.dtype)


def _layer_norm(self: Any, input: torch.Tensor) -> torch.Tensor:
    """torch's LayerNorm over the last dimension."""
    return self.lns_backend.layer_norm(input, self.weight, self.bias, self.eps, self.lns_factor)


def _plain_layer_norm(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """OLMo's LayerNorm: no gain, no bias, eps 1e-5, computed in fp32, output in the dtype of the input."""
    return self.lns_backend.layer_norm(hidden_states, None, None, 1e-5, self.lns_factor).to(hidden_states.dtype)


#: Norm classes whose arithmetic is known, by the module that defines them.
_FORWARDS: dict[tuple[str, str], Any] = {
    ("torch.nn.modules.normalization", "LayerNorm"): _layer_norm,
    ("transformers.models.llama.modeling_llama", "LlamaRMSNorm"): _rms_norm,
    ("transformers.models.qwen2.modeling_qwen2", "Qwen2RMSNorm"): _rms_norm,
    ("transformers.models.qwen3.modeling_qwen3", "Qwen3RMSNorm"): _rms_norm,
    ("transformers.models.mistral.modeling_mistral", "MistralRMSNorm"): _rms_norm,
    ("transformers.models.olmo.modeling_olmo", "OlmoLayerNorm"): _plain_layer_norm,
    ("transformers.models.olmo2.modeling_olmo2", "Olmo2RMSNorm"): _rms_norm_input_dtype,
    ("transformers.models.olmo3.modeling_olmo3", "Olmo3RMSNorm"): _rms_norm_input_dtype,
}


def scaled_class(stock: type) -> type:
    """The class with a factor for a class of norms or branches; pickle finds it by the path of that class."""
    path = ":".join([*stock.__module__.split("."), stock.__name__])  # pickle would split it at a dot
    known = globals().get(path)
    if known is None or known.__bases__[1] is not stock:
        forward = _FORWARDS.get((stock.__module__, stock.__name__))
        kind, methods = (_ScaledOutput, {}) if forward is None else (_Replaceable, {"forward": forward})
        names = {"__module__": __name__, "__qualname__": path}
        known = globals()[path] = type(f"LNS{stock.__name__}", (kind, stock), {**names, **methods})
    return known


def how(module: Any) -> str:
    """How the factor is applied, for the start-up line."""
    if isinstance(module, _ScaledOutput):
        return "outputs multiplied"
    return f"backend {module.lns_backend.name} ({module.lns_backend.reason})"


def __getattr__(name: str) -> Any:
    """The class that another process has pickled, see :func:`scaled_class`."""
    *module, stock = name.split(":")
    if module:
        return scaled_class(getattr(importlib.import_module(".".join(module)), stock))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
