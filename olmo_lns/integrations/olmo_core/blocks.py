"""A scheme on each of OLMo-core's blocks: attached and measured when a block is built.

The forward of a block stays OLMo-core's: only norms that it already has are multiplied.
"""

from __future__ import annotations

import functools
import json
import logging
from dataclasses import dataclass, replace
from typing import Any, Mapping

import torch
from olmo_core.nn.moe.router import MoELinearRouter
from olmo_core.nn.transformer.config import TransformerBlockConfig

from olmo_lns import probe, sites
from olmo_lns.errors import LNSConfigError, MeasurementError, did_you_mean
from olmo_lns.integrations.olmo_core.model import built_blocks
from olmo_lns.integrations.olmo_core.norms import folded
from olmo_lns.schemes import SUB_LAYERS, Plan, Scheme
from olmo_lns.sites import Scaled, Site, give

log = logging.getLogger("olmo_lns")

#: What a block config may say of its initialization.
_INITIALIZATIONS = ("plain", "upstream")


@dataclass(frozen=True)
class Form:
    """The places of the norms in a type of block.

    :param norms: sub-layer -> the norms that a scheme's factor multiplies; the first one carries the site.
    :param field: name of that factor in a plan.
    """

    plan: Plan
    norms: Mapping[str, tuple[str, ...]]
    field: str

    def fits(self, plan: Plan) -> bool:
        """Return true if ``plan`` is this form with a factor on its norms."""
        neutral: dict[str, Any] = {self.field: 1.0}
        return replace(plan, **neutral) == self.plan


_PRE = Plan()
_BRANCH = Plan(pre=False, branch=True)
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
}
_WITHOUT_FORM = {
    "default_scaled": "it multiplies its norms itself, by a buffer that init_weights overwrites; use name=default",
    "normalized": "it has no norm in front of its sub-layers",
    "peri_norm": "it has a norm on the branch besides (Sandwich-LN); use name=default, or OLMo",
    "moe_fused_v2": "its blocks are built by OLMoDDPTransformerBlockConfig",
}
#: What to take instead, where a scheme does not fit a block.
_FITTING = {_PRE: "lns", _BRANCH: "branchln_depth"}


def resolve(asked: str | None) -> str:
    """:raises LNSConfigError: a name that is not one of :data:`_INITIALIZATIONS`."""
    name = asked or "plain"
    if name not in _INITIALIZATIONS:
        raise LNSConfigError(
            f"block.initialization={name!r}{did_you_mean(name, _INITIALIZATIONS)}: expected one of "
            f"{', '.join(_INITIALIZATIONS)} (OLMo-core's model draws the weights, by init_method)"
        )
    return name


def _probe(config: Any, width: int, block_idx: int, n_layers: int) -> bool:
    """Measure the sites of a narrow block with the config's structure; whether it could be run on this machine.

    Each block by its own number: OLMo-core gives it to the block, which may ask for it.
    """
    values = config.stock().as_config_dict()
    mixer = values["sequence_mixer" if "sequence_mixer" in values else "attention"]
    for name in ("backend", "use_flash"):  # the twin runs in fp32 on a CPU
        mixer.pop(name, None)
    return _probe_twin(json.dumps(values), width, block_idx, n_layers)


@functools.cache
def _probe_twin(text: str, width: int, block_idx: int, n_layers: int) -> bool:
    """:raises MeasurementError: the block of this config reads its stream through other norms than its two."""
    try:
        config = TransformerBlockConfig.from_dict(json.loads(text))
        with torch.random.fork_rng(devices=[]):  # the run's own draws stay what they are
            twin = config.build(d_model=width, block_idx=block_idx, n_layers=n_layers, init_device="cpu")
            call = probe.Call((torch.randn(2, 8, width),), {}, 0)
        found = probe.pre_ln_sites(twin, call, where=f"block {block_idx + 1}").names
    except (MeasurementError, RuntimeError, NotImplementedError) as error:  # kernels for GPUs, such as a mixture's
        log.debug("%s", error)
        return False
    if found != _DENSE["attn"] + _DENSE["ff"]:
        expected = " and ".join(_DENSE["attn"] + _DENSE["ff"])
        raise MeasurementError(
            f"{type(twin).__name__}: found a block that reads its stream through {' and '.join(found)}, expected "
            f"{expected}."
        )
    return True


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


def attach_scheme(block: Any, config: Any, *, d_model: int, block_idx: int, n_layers: int) -> None:
    """Attach the scheme of a ``BlockConfig`` to the block that OLMo-core has just built from it, and measure it.

    :param block_idx: 0-based, global, as OLMo-core counts.
    """
    scheme = config.resolved_scheme
    form = require_supported(scheme, config.name, n_layers)
    for sub_layer in SUB_LAYERS:
        site = Site(scheme, block_idx + 1, n_layers, sub_layer)
        for name in form.norms[sub_layer]:
            if (norm := getattr(block, name, None)) is None:
                raise MeasurementError(
                    f"{site}: found a {type(block).__name__} without {name}, expected its norm there."
                )
            factor, mixin = getattr(site.plan, form.field), folded(type(norm))
            sites.scale(norm, factor, where=site, width=d_model, folded=mixin, form=form.plan, field=form.field)
        sites.attach(getattr(block, form.norms[sub_layer][0]), site)
    if not config.scale_router:
        _unscale_router(block, form)
    block.lns_initialization = str(config.initialization)
    alone = form.plan == _PRE and form.norms == _DENSE
    block.lns_probed = alone and _probe(config, min(d_model, 8 * block.attention.n_heads), block_idx, n_layers)


class UnscaledRouter(Scaled):
    """A router that sees the norm without its factor: it has the inverse. The experts see the scaled norm."""

    def get_expert_logits(self, x: Any) -> Any:
        # The logits are linear in x: a pass over tokens x experts instead of tokens x channels.
        return super().get_expert_logits(x) * self.lns_factor  # type: ignore[misc]


def _unscale_router(block: Any, form: Form) -> None:
    router: Any = getattr(getattr(block, "feed_forward_moe", None), "router", None)
    if form.field != "norm_scale" or type(router) is not MoELinearRouter:
        raise LNSConfigError(
            "scale_router=false needs a mixture of experts behind a scaled norm and OLMo-core's linear router, found "
            + (f"a router of class {type(router).__name__}" if router is not None else "a block without a router")
        )
    give(router, sites.derived(UnscaledRouter, MoELinearRouter), 1.0 / getattr(block, form.norms["ff"][-1]).lns_scale)


def scheme_of_model(model: Any) -> Scheme:
    """Return the scheme of a built model, or of one stage of it, whose weights need not have been drawn here.

    :raises MeasurementError: a site of its blocks is not there any more, a block is not in its place, or the norms of
        one sub-layer have different factors.
    """
    scheme = sites.read_back(model)
    blocks = built_blocks(model)
    for number, block in () if scheme.is_pre_ln else blocks.items():
        sites.check(block, scheme, number, layer_numbers=[number])
        dense, experts = (getattr(block, name, None) for name in _HYBRID["ff"])
        if experts is not None and getattr(dense, "lns_scale", 1.0) != getattr(experts, "lns_scale", 1.0):
            raise MeasurementError(
                f"block {number}: found different factors on feed_forward_norm and feed_forward_moe_norm, expected "
                "one. Something has replaced a module since the block was built."
            )
    return scheme


def routers_of(model: Any) -> dict[int, bool]:
    """``scale_router`` of each block (from 0) of a built model that has a router.

    By attribute, which wrappers of the router pass on: one without the factor of its norm has its inverse.
    """
    blocks = built_blocks(model).values()
    routers = {b.block_idx: getattr(getattr(b, "feed_forward_moe", None), "router", None) for b in blocks}
    return {index: not hasattr(router, "lns_scale") for index, router in routers.items() if router is not None}
