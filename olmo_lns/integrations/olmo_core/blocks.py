"""A scheme on each of OLMo-core's blocks: attached and measured when a block is built, checked when it is drawn.

The forward of a block stays OLMo-core's: only norms that it already has are multiplied. OLMo-core builds its blocks one
by one, with one ``BufferCache`` for all blocks of a model, which tells one model's blocks from another's.
``init_method`` is a setting of the model, the scheme one of its blocks: a block learns the method only when its weights
are drawn. A draw with a depth factor, which a scheme replaces (arXiv 2502.05795, footnote 1 and section 6), is refused.
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
from torch import nn

from olmo_lns import environment, probe, sites
from olmo_lns.errors import LNSConfigError, MeasurementError, did_you_mean
from olmo_lns.integrations.olmo_core.norms import folded
from olmo_lns.schemes import SUB_LAYERS, Plan, Scheme
from olmo_lns.sites import Scaled, Site, give

log = logging.getLogger("olmo_lns")

#: What a block config may say of its initialization.
_INITIALIZATIONS = ("plain", "upstream")
_ATTRIBUTE = "olmo_lns_census"


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


class Census(dict[int, tuple[Scheme, str]]):
    """Block, counted from 0 -> its scheme and initialization. :param n_layers: of the whole model."""

    def __init__(self, n_layers: int) -> None:
        super().__init__()
        self.n_layers = n_layers

    def add(self, block_idx: int, scheme: Scheme, initialization: str) -> None:
        """:raises LNSConfigError: the block has another scheme than those before it."""
        self[block_idx] = (scheme, initialization)
        if len(set(self.values())) > 1:
            found = {index: f"{s}, initialization {i}" for index, (s, i) in self.items()}
            raise LNSConfigError(f"one model with two schemes (block: scheme): {found}. Give all blocks the same.")

    def require_complete(self) -> None:
        """:raises LNSConfigError: some blocks of the model have no scheme."""
        if missing := sorted(set(range(self.n_layers)) - set(self)):
            raise LNSConfigError(
                f"{next(iter(self.values()))[0]} was asked for, but blocks {missing} of {self.n_layers} (counted from "
                "0) are OLMo-core's own: block_overrides and named blocks are configs of their own, and each needs "
                "the class (olmo_lns.olmo_core.apply(config) gives it to all of them)."
            )


class Draw:
    """Stands in for ``init_weights`` of a block's sequence mixer, which OLMo-core calls before it draws a block."""

    def __init__(self, mixer: Any, initialization: str, number: int) -> None:
        self.mixer, self.initialization, self.number = mixer, initialization, number
        self.census: Census | None = None

    def __call__(self, *, init_method: Any, num_blocks: int, **kwargs: Any) -> None:
        if self.census is not None:
            self.census.require_complete()
        type(self.mixer).init_weights(self.mixer, init_method=init_method, num_blocks=num_blocks, **kwargs)
        first = next((getattr(self.mixer, name) for name in ("w_q", "w_qkv") if hasattr(self.mixer, name)), None)
        last = getattr(self.mixer, "w_out", None)
        if self.initialization == "upstream" or first is None or last is None:
            return
        std = float(_local(first.weight).float().std())
        if str(init_method) == "fan_in":  # of each matrix's own number of inputs
            std *= (first.in_features / last.in_features) ** 0.5
        try:
            probe.check_drawn({"attention.w_out": last.weight}, std, where=f"block {self.number}")
        except MeasurementError as error:
            raise LNSConfigError(
                f"init_method={init_method} draws the residual projections with a depth factor, which a scheme "
                f"replaces ({error}). Set init_method=normal or fan_in, or keep both knowingly with "
                "block.initialization=upstream."
            ) from None


def _local(weight: Any) -> Any:
    return getattr(weight, "_local_tensor", weight)


def _count(cache: Any, block: Any, config: Any, *, block_idx: int, n_layers: int, probed: bool) -> None:
    """Count ``block``; with the last one the whole model is checked and the start-up line written."""
    scheme, draw = config.resolved_scheme, block.attention.init_weights
    census = getattr(cache, _ATTRIBUTE, None) or Census(n_layers)
    setattr(cache, _ATTRIBUTE, census)
    census.add(block_idx, scheme, draw.initialization)
    draw.census = census
    sites.check(nn.ModuleList([block]), scheme, n_layers, layer_numbers=[block_idx + 1])
    if block_idx != n_layers - 1:
        return
    census.require_complete()
    environment.check()
    line = sites.start_up_line(
        block,
        n_layers,
        measured=["output", "gradient", *(["block"] if probed else [])],
        norm="" if config.layer_norm is None else str(config.layer_norm.name),
        initialization="scaled initialization " + {"plain": "off", "upstream": "as upstream"}[draw.initialization],
    )
    log.info("%s", line)


def _probe(config: Any, width: int) -> bool:
    """Measure the sites of a narrow block with the config's structure; whether it could be run on this machine."""
    values = config.stock().as_config_dict()
    values["sequence_mixer"].update(backend=None, use_flash=None)  # fp32 on a CPU
    return _probe_twin(json.dumps(values), width)


@functools.cache
def _probe_twin(text: str, width: int) -> bool:
    """:raises MeasurementError: the block of this config reads its stream through other norms than its two."""
    try:
        config = TransformerBlockConfig.from_dict(json.loads(text))
        twin = config.build(d_model=width, block_idx=0, n_layers=1, init_device="cpu")
        found = probe.pre_ln_sites(twin, probe.Call((torch.randn(2, 8, width),), {}, 0)).names
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


def attach_scheme(block: Any, config: Any, *, d_model: int, cache: Any, block_idx: int, n_layers: int) -> None:
    """Attach the scheme of a ``BlockConfig`` to the block that OLMo-core has just built from it; measure and count it.

    :param cache: the model's ``BufferCache``; None for a block that is built alone, which is not counted.
    :param block_idx: 0-based, global, as OLMo-core counts.
    """
    scheme = config.resolved_scheme
    form = require_supported(scheme, config.name, n_layers)
    for sub_layer in SUB_LAYERS:
        site = Site(scheme, block_idx + 1, n_layers, sub_layer)
        for name in form.norms[sub_layer]:
            norm, factor = getattr(block, name), getattr(site.plan, form.field)
            mixin = folded(type(norm))
            sites.scale(norm, factor, where=site, width=d_model, folded=mixin, form=form.plan, field=form.field)
        sites.attach(getattr(block, form.norms[sub_layer][0]), site)
    if not config.scale_router:
        _unscale_router(block, form)
    block.attention.init_weights = Draw(block.attention, str(config.initialization), block_idx + 1)
    probed = form.plan == _PRE and form.norms == _DENSE and _probe(config, min(d_model, 8 * block.attention.n_heads))
    if cache is not None:
        _count(cache, block, config, block_idx=block_idx, n_layers=n_layers, probed=probed)


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
    blocks = _built_blocks(model)
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
    blocks = _built_blocks(model).values()
    routers = {b.block_idx: getattr(getattr(b, "feed_forward_moe", None), "router", None) for b in blocks}
    return {index: not hasattr(router, "lns_scale") for index, router in routers.items() if router is not None}


def _built_blocks(model: Any) -> dict[int, Any]:
    names = ((name.split("."), each) for name, each in model.named_modules())
    return {int(name[-1]) + 1: each for name, each in names if name[-2:-1] == ["blocks"]}
