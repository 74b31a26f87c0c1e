"""The residual addition of a Megatron layer under a scheme: what stands in its two bias-dropout-add slots.

``x + c * g * Branch(h)`` instead of ``x + h``: c a constant, g a learned gate, Branch a norm. Constants and gates go
into the addition and cost no pass over the activations; only a second norm is extra work. The slot is the one place
that every layer and every version has, dense, MoE and MLA, TE and local.

Keys in a checkpoint: ``self_attn_bda.gate``, ``self_attn_bda.norm.weight``, and the same of ``mlp_bda``.
"""

from __future__ import annotations

import functools
from functools import lru_cache
from typing import Any, Callable

import torch
from torch import nn

from olmo_lns.errors import LNSConfigError
from olmo_lns.integrations.megatron import upstream
from olmo_lns.integrations.megatron.norms import scale_norm
from olmo_lns.integrations.norm_sites import Site, attach
from olmo_lns.schemes import Learned, Plan

__all__ = ["SLOTS", "SchemeAddition", "attach_addition", "unsupported"]

#: Sub-layer -> the layer's attribute that adds its output to the stream.
SLOTS = {"attn": "self_attn_bda", "ff": "mlp_bda"}


def unsupported(plan: Plan) -> str:
    """Why Megatron's slots cannot do ``plan``; ``""`` if they can."""
    if plan.post:
        return "it normalises the sum, and no slot of Megatron's layer stands behind the residual addition"
    if not plan.pre:
        return "it has no norm in front of the sub-layers, where Transformer Engine's layers have theirs fused in"
    if plan.groups != 1:
        return "its norms take statistics over groups of channels, which no norm of Megatron does"
    if plan.pre_scale != 1.0:
        return "its factor stands in front of a norm that Transformer Engine fuses into the linear layer behind it"
    if plan.stream_scale != 1.0 or plan.alpha != 1.0 or plan.omega is not None:
        return "it multiplies the residual stream, which Megatron's recompute, fusions and exports take as it is"
    if plan.gains:
        return "it draws the v rows of linear_qkv, which lie between those of q and k, with another gain"
    return ""


class SchemeAddition(nn.Module):
    """``residual + factor * gate * dropout(norm(h + bias))``, called like Megatron's ``get_bias_dropout_add``.

    :param gate: the learned factor, (hidden_size,) or (1,), or None. :param norm: the branch's, or None.
    :param like: a parameter of the layer, for the device; ``config`` says the dtype.
    """

    lns_method = "in the residual addition"

    def __init__(self, config: Any, plan: Plan, norm: nn.Module | None, like: torch.Tensor) -> None:
        super().__init__()
        self.norm = norm
        self.factor = 1.0 if plan.branch else plan.branch_scale
        self.learned: Learned | None = plan.gate
        self.register_parameter("gate", None)
        if plan.gate is not None:
            size = plan.gate.elements(config.hidden_size)
            self.gate = nn.Parameter(torch.empty(size, device=like.device, dtype=config.params_dtype))
            # Its gradient is a sum over tokens: Megatron adds those of the ranks that hold other tokens by this mark.
            self.gate.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
            self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.gate is not None and self.learned is not None:
            nn.init.constant_(self.gate, self.learned.start)

    def forward(self, training: bool, fused: bool) -> Callable[..., torch.Tensor]:
        """The addition. A call of the module, so that hooks which gather its parameters run before it.

        :param fused: ignored: without bias and dropout the addition is one kernel as it is.
        """
        return functools.partial(self._add, training)

    def _add(
        self, training: bool, h_with_bias: tuple[torch.Tensor, torch.Tensor | None], x: torch.Tensor, dropout: float
    ) -> torch.Tensor:
        """:param h_with_bias: the sub-layer's output (length, batch, hidden_size), and a bias (hidden_size,) or None.
        :param x: the stream, as the output. :param dropout: its probability.
        """
        h, bias = h_with_bias
        if bias is not None:
            h = h + bias
        if self.norm is not None:
            h = self.norm(h)
        h = nn.functional.dropout(h, dropout, training)
        h, x = (h.to(x.dtype), x) if _keeps_stream_dtype() else (h, x.to(h.dtype))
        if self.gate is None:
            return torch.add(x, h, alpha=self.factor)
        return torch.addcmul(x, self.gate.to(h.dtype), h, value=self.factor)

    def lns_plan(self, sub_layer: str) -> Plan:
        """The plan that the addition computes."""
        factor = self.factor * getattr(self.norm, "lns_scale", 1.0)
        return Plan(branch=self.norm is not None, branch_scale=factor, gate=self.learned)

    def extra_repr(self) -> str:
        return f"factor={self.factor:.4g}"


@lru_cache(maxsize=1)
def _keeps_stream_dtype() -> bool:
    """Whether Megatron's own addition keeps an fp32 stream under bf16 branches; up to 0.16 it does not."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add

    branch, stream = torch.zeros(1, dtype=torch.bfloat16, device="cpu"), torch.zeros(1, device="cpu")
    return bool(get_bias_dropout_add(False, False)((branch, None), stream, 0.0).dtype == stream.dtype)


def attach_addition(layer: Any, site: Site) -> None:
    """Put ``site``'s plan into its slot of a built ``TransformerLayer``.

    :raises LNSConfigError: the slot holds something else than Megatron's bias-dropout-add.
    :raises UpstreamChangedError: the layer calls its slots in a way that was not verified.
    """
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add

    upstream.check_readings()
    slot, config = SLOTS[site.sub_layer], layer.config
    if (found := getattr(layer, slot, None)) is not get_bias_dropout_add:
        name = getattr(found, "__name__", type(found).__name__)
        raise LNSConfigError(
            f"{type(layer).__name__} {layer.layer_number} has {name} as its {slot}, expected Megatron's "
            f"get_bias_dropout_add: {site.scheme} takes its place."
        )
    plan = site.plan
    norm = _branch_norm(layer) if plan.branch else None
    if norm is not None and plan.branch_scale != 1.0:
        scale_norm(norm, plan.branch_scale)
    addition = SchemeAddition(config, plan, norm, next(layer.parameters()))
    attach(addition, site)
    setattr(layer, slot, addition)


def _branch_norm(layer: Any) -> Any:
    """A norm of the kind that the layer's spec names, built as the layer builds its own."""
    from megatron.core.extensions.transformer_engine import HAVE_TE, TENorm
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.spec_utils import ModuleSpec, build_module

    how = {"config": layer.config, "hidden_size": layer.config.hidden_size, "eps": layer.config.layernorm_epsilon}
    specs = (layer.submodules_config.input_layernorm, layer.submodules_config.pre_mlp_layernorm)
    named = [spec for spec in specs if spec is not IdentityOp]
    # TE's spec names one only where it is not fused into a linear layer, and main's is fused with the residual.
    if HAVE_TE and all(_is_te(spec) for spec in named):
        return TENorm(**how)
    if not named:
        raise LNSConfigError(
            f"{type(layer).__name__} {layer.layer_number} has both norms of its spec inside other modules, and "
            "Transformer Engine is not installed: nothing names the norm that the scheme puts behind the branch. Use a "
            "spec with norms of their own (input_layernorm, pre_mlp_layernorm), as the local one, or install it."
        )
    return build_module(named[0], **how) if isinstance(named[0], ModuleSpec) else named[0](**how)


def _is_te(spec: Any) -> bool:
    kind = getattr(spec, "module", spec)
    return str(getattr(kind, "__module__", "")).startswith("megatron.core.extensions.transformer_engine")
