"""The places of the norms in each type of OLMo-core's blocks. OLMo-core is not imported."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Mapping

from olmo_lns.schemes import Plan, Scheme

#: The norm of the experts in a hybrid block, where they run in parallel to the dense feed-forward.
EXPERTS_NORM = "feed_forward_moe_norm"


@dataclass(frozen=True)
class NormLayout:
    """The places of the norms in a type of block.

    :param plan: the plan of a sub-layer of this block without a factor.
    :param norms: sub-layer -> branch -> the name of the norm that is multiplied by the factor. The first branch is
        the sub-layer itself, and has the name ``""``.
    :param factor_name: the field of a plan which the factor sets.
    :param suggested_scheme: a scheme that fits this block, for error messages.
    """

    plan: Plan
    norms: Mapping[str, Mapping[str, str]]
    factor_name: str
    suggested_scheme: str

    def fits(self, scheme: Scheme, n_layers: int) -> bool:
        """Return true if the plans of a scheme differ from this layout only in the factor of the norms."""
        neutral: dict[str, Any] = {self.factor_name: 1.0}
        return all(replace(plan, **neutral) == self.plan for _, _, plan in scheme.plans(n_layers))


_DENSE = {"attn": {"": "attention_norm"}, "ff": {"": "feed_forward_norm"}}
#: In a hybrid block, the experts run in parallel to the dense feed-forward. Each of the two has a norm.
_HYBRID = {**_DENSE, "ff": {"": "feed_forward_norm", "experts": EXPERTS_NORM}}


def _pre(norms: Mapping[str, Mapping[str, str]]) -> NormLayout:
    return NormLayout(Plan(), norms, "norm_scale", "lns")


def _branch(norms: Mapping[str, Mapping[str, str]]) -> NormLayout:
    return NormLayout(Plan(norm_before=False, norm_on_output=True), norms, "output_scale", "branchln_depth")


#: ``TransformerBlockConfig.name`` -> where the block has its norms.
LAYOUTS = {
    "default": _pre(_DENSE),
    "moe": _pre(_DENSE),
    "moe_hybrid": _pre(_HYBRID),
    "reordered_norm": _branch(_DENSE),
    "moe_reordered_norm": _branch(_DENSE),
    "moe_hybrid_reordered_norm": _branch(_HYBRID),
}
