"""The modules of a block that carry a factor: a norm, or the branch after it.

The norms whose arithmetic is known are computed by :mod:`olmo_lns.norm` with the factor inside; any
other norm (Liger's, Apex's) and a branch have their output multiplied. A branch is scaled as a whole,
not at its last projection: an adapter that PEFT puts around that projection is then scaled with it.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from olmo_lns.integrations import norm_sites
from olmo_lns.integrations.scaled import Scaled, ScaledOutput, give
from olmo_lns.schemes import Plan

__all__ = ["attach_module", "how"]


class _Replaceable(Scaled):
    """What transformers, or a library on it, may take the forward of."""

    # `kernelize` would replace the forward by a kernel that knows no factor.
    kernel_layer_name = "LNSScaled"

    def lns_plan(self, sub_layer: str) -> Plan:
        """The plan that ``forward`` computes; without its factor where somebody put another forward in its place."""
        replaced = "forward" in vars(self) and "_old_forward" not in vars(self)  # accelerate's hooks keep the old one
        return self.lns_form if replaced else super().lns_plan(sub_layer)


class _RMSNorm(_Replaceable):
    """RMSNorm with gain, as Llama, Qwen and Mistral have it."""

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.lns_backend.rms_norm(hidden_states, self.weight, self.variance_epsilon, self.lns_factor)


class _RMSNormInputDtype(_Replaceable):
    """RMSNorm with gain whose output has the dtype of its input, as OLMo 2 and 3 have it."""

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        out = self.lns_backend.rms_norm(hidden_states, self.weight, self.variance_epsilon, self.lns_factor)
        return out.to(hidden_states.dtype)


class _LayerNorm(_Replaceable):
    """torch's LayerNorm over the last dimension."""

    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        return self.lns_backend.layer_norm(input, self.weight, self.bias, self.eps, self.lns_factor)


class _PlainLayerNorm(_Replaceable):
    """OLMo's LayerNorm: no gain, no bias, eps 1e-5, computed in fp32, output in the dtype of the input."""

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        out = self.lns_backend.layer_norm(hidden_states, None, None, 1e-5, self.lns_factor)
        return out.to(hidden_states.dtype)


class _ScaledOutput(_Replaceable, ScaledOutput):
    """Any other norm, or a branch."""


#: Norm classes whose arithmetic is known, by the module that defines them.
_EXACT: dict[tuple[str, str], type] = {
    ("torch.nn.modules.normalization", "LayerNorm"): _LayerNorm,
    ("transformers.models.llama.modeling_llama", "LlamaRMSNorm"): _RMSNorm,
    ("transformers.models.qwen2.modeling_qwen2", "Qwen2RMSNorm"): _RMSNorm,
    ("transformers.models.qwen3.modeling_qwen3", "Qwen3RMSNorm"): _RMSNorm,
    ("transformers.models.mistral.modeling_mistral", "MistralRMSNorm"): _RMSNorm,
    ("transformers.models.olmo.modeling_olmo", "OlmoLayerNorm"): _PlainLayerNorm,
    ("transformers.models.olmo2.modeling_olmo2", "Olmo2RMSNorm"): _RMSNormInputDtype,
    ("transformers.models.olmo3.modeling_olmo3", "Olmo3RMSNorm"): _RMSNormInputDtype,
}


def attach_module(module: nn.Module, site: norm_sites.Site, field: str, form: Plan) -> None:
    """Turn a norm or a branch into one with the factor of its plan, in place.

    :param field: of the plan, ``norm_scale`` or ``branch_scale``. :param form: the family's block without a scheme.
    :raises LNSConfigError: it has a scheme already.
    """
    norm_sites.attach(module, site)
    give(module, _class(type(module)), getattr(site.plan, field), form=form, field=field)


def how(module: Any) -> str:
    """How the factor is applied, for the start-up line."""
    if isinstance(module, _ScaledOutput):
        return "outputs multiplied"
    return f"backend {module.lns_backend.name} ({module.lns_backend.reason})"


def _class(stock: type) -> type:
    kind = _EXACT.get((stock.__module__, stock.__name__), _ScaledOutput)
    name = f"LNS{stock.__name__}"
    known = globals().get(name)
    if known is None or known.__bases__[1] is not stock:
        # In this module under its name, so that a model can be pickled.
        known = globals()[name] = type(name, (kind, stock), {"__module__": __name__, "__doc__": kind.__doc__})
    return known


def __getattr__(name: str) -> Any:
    """The class of a scaled norm that another process has pickled."""
    for module, stock in _EXACT:
        if name == f"LNS{stock}":
            return _class(getattr(importlib.import_module(module), stock))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
