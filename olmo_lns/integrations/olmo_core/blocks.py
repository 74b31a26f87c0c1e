"""What a scheme is in each of OLMo-core's blocks, and how a block that was just built gets it.

The forward of a block stays OLMo-core's: only norms that it already has are multiplied.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Mapping

from olmo_core.nn.moe.router import MoELinearRouter

from olmo_lns.errors import LNSConfigError, UpstreamChangedError
from olmo_lns.integrations import norm_sites
from olmo_lns.integrations.norm_sites import Scaled, Site, give
from olmo_lns.integrations.olmo_core import draw
from olmo_lns.integrations.olmo_core.checkpoint import compare_converted
from olmo_lns.integrations.olmo_core.norms import scale_norm
from olmo_lns.schemes import SUB_LAYERS, Plan, Scheme

__all__ = ["FORMS", "Form", "attach_scheme", "require_one_factor", "require_supported"]


@dataclass(frozen=True)
class Form:
    """Where a type of block has its norms.

    :param norms: sub-layer -> the norms that a scheme's factor multiplies; the first one carries the site.
    :param field: name of that factor in a plan.
    """

    plan: Plan
    norms: Mapping[str, tuple[str, ...]]
    field: str

    def fits(self, plan: Plan) -> bool:
        """Whether ``plan`` is this form with a factor on its norms."""
        neutral: dict[str, Any] = {self.field: 1.0}
        return replace(plan, **neutral) == self.plan


_PRE = Plan()
_BRANCH = Plan(pre=False, branch=True)
_BOTH = Plan(pre=True, branch=True)
_DENSE = {"attn": ("attention_norm",), "ff": ("feed_forward_norm",)}
#: The experts and the dense feed-forward stand side by side, each behind a norm of its own.
_HYBRID = {"attn": ("attention_norm",), "ff": ("feed_forward_norm", "feed_forward_moe_norm")}

#: ``TransformerBlockConfig.name`` -> form.
FORMS = {
    "default": Form(_PRE, _DENSE, "norm_scale"),
    "moe": Form(_PRE, _DENSE, "norm_scale"),
    "moe_hybrid": Form(_PRE, _HYBRID, "norm_scale"),
    "reordered_norm": Form(_BRANCH, _DENSE, "branch_scale"),
    "moe_reordered_norm": Form(_BRANCH, _DENSE, "branch_scale"),
    "moe_hybrid_reordered_norm": Form(_BRANCH, _HYBRID, "branch_scale"),
    "peri_norm": Form(_BOTH, {"attn": ("post_attention_norm",), "ff": ("post_feed_forward_norm",)}, "branch_scale"),
}
_WITHOUT_FORM = {
    "default_scaled": "it multiplies its norms itself, by a buffer that init_weights overwrites; use name=default",
    "normalized": "it has no norm in front of its sub-layers",
    "moe_fused_v2": "its blocks are built by OLMoDDPTransformerBlockConfig",
}
#: What to take instead, where a scheme does not fit a block.
_FITTING = {_PRE: "lns", _BRANCH: "branchln_depth", _BOTH: "sandwich_depth"}


def require_supported(scheme: Scheme, name: Any, n_layers: int) -> Form:
    """The form of the block type ``name``.

    :raises LNSConfigError: it has its norms elsewhere than the scheme wants them, or no scheme can be laid on it.
    """
    if str(name) not in FORMS:
        why = _WITHOUT_FORM.get(str(name), "this version of olmo-lns does not know it")
        raise LNSConfigError(
            f"block.name={name}: no scheme can be laid on this block: {why}. Expected one of {', '.join(FORMS)}."
        )
    form = FORMS[str(name)]
    scheme.require_built_by("OLMo-core")
    for _, _, plan in scheme.plans(n_layers):
        if not form.fits(plan):
            fitting = [other for other, its in FORMS.items() if its.fits(plan)]
            here = _FITTING[form.plan]
            raise LNSConfigError(
                f"scheme={scheme} with block.name={name}: the scheme needs "
                + (f"block.name {' or '.join(fitting)}" if fitting else "a block that OLMo-core does not have")
                + f"; the scheme for {name} is {here}"
                + ("" if here == "lns" else " (not the method of the LayerNorm Scaling paper)")
            )
    return form


def attach_scheme(block: Any, config: Any, *, block_idx: int, n_layers: int) -> None:
    """Attach the scheme of a ``BlockConfig`` to the block that OLMo-core has just built from it.

    :param block_idx: 0-based, global, as OLMo-core counts.
    """
    scheme = config.resolved_scheme
    form = require_supported(scheme, config.name, n_layers)
    for sub_layer in SUB_LAYERS:
        site = Site(scheme, block_idx + 1, n_layers, sub_layer)
        for name in form.norms[sub_layer]:
            scale_norm(getattr(block, name), getattr(site.plan, form.field), form=form.plan, field=form.field)
        norm_sites.attach(getattr(block, form.norms[sub_layer][0]), site)
    if not config.scale_router:
        _unscale_router(block, form)
    block.lns_base = "" if config.layer_norm is None else str(config.layer_norm.name)
    block.attention.init_weights = draw.Draw(block.attention, str(config.initialization))
    block.register_load_state_dict_pre_hook(compare_converted)


def require_one_factor(block: Any) -> None:
    """:raises UpstreamChangedError: the norms of one sub-layer have different factors."""
    dense, experts = (getattr(block, name, None) for name in _HYBRID["ff"])
    if experts is not None and getattr(dense, "lns_scale", 1.0) != getattr(experts, "lns_scale", 1.0):
        raise UpstreamChangedError(
            f"block {block.block_idx}: feed_forward_norm and feed_forward_moe_norm have different factors: something "
            "has replaced a module since the block was built."
        )


class UnscaledRouter(Scaled, MoELinearRouter):
    """A router that sees the norm without its factor, while the experts see it scaled: it has the factor's inverse."""

    def get_expert_logits(self, x: Any) -> Any:
        # The logits are linear in x: a pass over tokens x experts instead of tokens x channels.
        return super().get_expert_logits(x) * self.lns_factor


def _unscale_router(block: Any, form: Form) -> None:
    router: Any = getattr(getattr(block, "feed_forward_moe", None), "router", None)
    if form.field != "norm_scale" or type(router) is not MoELinearRouter:
        raise LNSConfigError(
            "scale_router=false needs a mixture of experts behind a scaled norm and OLMo-core's linear router, found "
            + (f"a router of class {type(router).__name__}" if router is not None else "a block without a router")
        )
    give(router, UnscaledRouter, 1.0 / getattr(block, form.norms["ff"][-1]).lns_scale)
