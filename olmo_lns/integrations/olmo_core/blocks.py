"""What a scheme is in each of OLMo-core's blocks, how a block gets it, and what is known when weights are drawn.

The forward of a block stays OLMo-core's: only norms that it already has are multiplied. OLMo-core builds its blocks one
by one, with one ``BufferCache`` for all blocks of a model, which tells one model's blocks from another's.
``init_method`` is a setting of the model, the scheme one of its blocks: a block learns the method only when its weights
are drawn. There it is refused where it brings a depth factor, which a scheme replaces (arXiv 2502.05795, footnote 1 and
section 6).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any, Mapping

from olmo_core.nn.moe.router import MoELinearRouter
from torch import nn

from olmo_lns.errors import LNSConfigError, UpstreamChangedError, did_you_mean
from olmo_lns.integrations import norm_sites
from olmo_lns.integrations.norm_sites import Scaled, Site, give
from olmo_lns.integrations.olmo_core.norms import scale_norm
from olmo_lns.record import Record
from olmo_lns.schemes import SUB_LAYERS, Plan, Scheme

log = logging.getLogger("olmo_lns")

#: What a block config may say of its initialization.
_INITIALIZATIONS = ("plain", "upstream")
#: ``init_method`` -> whether its residual projections are drawn without a depth factor.
_PLAIN = {"normal": True, "fan_in": True, "llama": False, "llama_depth": False, "normalized": False}
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

    def __init__(self, mixer: Any, initialization: str) -> None:
        self.mixer = mixer
        self.initialization = initialization
        self.census: Census | None = None

    def __call__(self, *, init_method: Any, **kwargs: Any) -> None:
        if self.census is not None:
            self.census.require_complete()
        plain = _PLAIN.get(str(init_method))
        if self.initialization == "plain" and not plain:
            why = "draws the residual projections with a depth factor" if plain is False else "was never verified"
            raise LNSConfigError(
                f"init_method={init_method} {why}, which a scheme replaces. Set init_method=normal or fan_in, or keep "
                "both knowingly with block.initialization=upstream."
            )
        type(self.mixer).init_weights(self.mixer, init_method=init_method, **kwargs)


def _count(cache: Any, block: Any, scheme: Scheme, *, block_idx: int, n_layers: int) -> None:
    """Count ``block``; with the last one the whole model is checked and the start-up line written."""
    census = getattr(cache, _ATTRIBUTE, None) or Census(n_layers)
    setattr(cache, _ATTRIBUTE, census)
    draw: Draw = block.attention.init_weights
    census.add(block_idx, scheme, draw.initialization)
    draw.census = census
    norm_sites.check(nn.ModuleList([block]), scheme, n_layers, layer_numbers=[block_idx + 1])
    if block_idx != n_layers - 1:
        return
    census.require_complete()
    backend = next(module for _, module, _ in norm_sites.sites(block)).lns_backend
    line = norm_sites.start_up_line(
        scheme,
        n_layers,
        norm=block.lns_base,
        how=f"backend {backend.name} ({backend.reason})",
        initialization="scaled initialization " + {"plain": "off", "upstream": "as upstream"}[draw.initialization],
    )
    log.info("%s", line)


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


def attach_scheme(block: Any, config: Any, *, cache: Any, block_idx: int, n_layers: int) -> None:
    """Attach the scheme of a ``BlockConfig`` to the block that OLMo-core has just built from it, and count it.

    :param cache: the model's ``BufferCache``; None for a block that is built alone, which is not counted.
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
    block.attention.init_weights = Draw(block.attention, str(config.initialization))
    if cache is not None:
        _count(cache, block, scheme, block_idx=block_idx, n_layers=n_layers)


class UnscaledRouter(Scaled, MoELinearRouter):
    """A router that sees the norm without its factor: it has the inverse. The experts see the scaled norm."""

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


def record_of(model: Any) -> Record:
    """The record of a built model, or of one stage of it, whose weights need not have been drawn here.

    :raises UpstreamChangedError: a site of its blocks is not there any more, a block is not in its place, or the norms
        of one sub-layer have different factors.
    :raises LNSConfigError: some of its blocks have no scheme, and others have.
    """
    scheme = norm_sites.read_back(model)
    if scheme.is_pre_ln:
        return Record()
    norm_sites.check_places(_built_blocks(model).items())
    found = list(_built_blocks(model).values()) or [model]  # a block alone
    mixers = (getattr(getattr(block, "attention", None), "init_weights", None) for block in found)
    draws = [draw for draw in mixers if isinstance(draw, Draw)]
    for draw in draws:
        if draw.census is not None:
            draw.census.require_complete()
    if stock := [block.block_idx for block in found if not any(norm_sites.sites(block))]:
        raise LNSConfigError(f"blocks {stock} (counted from 0) are OLMo-core's own, the others have a scheme")
    for block in found:
        dense, experts = (getattr(block, name, None) for name in _HYBRID["ff"])
        if experts is not None and getattr(dense, "lns_scale", 1.0) != getattr(experts, "lns_scale", 1.0):
            raise UpstreamChangedError(
                f"block {block.block_idx}: feed_forward_norm and feed_forward_moe_norm have different factors: "
                "something has replaced a module since the block was built."
            )
    drawn = {draw.initialization for draw in draws}
    return Record(scheme, found[0].lns_base, drawn.pop() if len(drawn) == 1 else "upstream")


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
