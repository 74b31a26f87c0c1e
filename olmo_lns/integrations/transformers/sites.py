"""A scheme on the blocks of one transformers model: attached, counted, read back, reported, and folded away.

Folded, a norm's factor goes into its gain and bias, or, for a norm without gain, into the weights of the
projections that read it; a branch's goes into weight and bias of its last projection.
"""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import replace
from typing import Any

import torch

from olmo_lns import __version__
from olmo_lns.errors import CheckpointMismatchError, LNSConfigError, UpstreamChangedError
from olmo_lns.integrations import norm_sites
from olmo_lns.integrations.norm_sites import give
from olmo_lns.integrations.transformers.configs import record_of, stock_config_class
from olmo_lns.integrations.transformers.families import FAMILIES, Family, at, family_of
from olmo_lns.integrations.transformers.models import own_config, stock_class
from olmo_lns.integrations.transformers.norms import how, scaled_class
from olmo_lns.record import Record
from olmo_lns.schemes import Scheme
from olmo_lns.schemes.initialization import factor

__all__ = [
    "attach_model",
    "fold",
    "fold_factors",
    "known_family",
    "redraw",
    "require_as_recorded",
    "require_named",
    "require_supported",
]

log = logging.getLogger("olmo_lns")


def known_family(model: Any) -> Family:
    """:raises LNSConfigError: not a transformers model of a family that this integration knows."""
    family = family_of(model)
    if family is not None and family.sub_layers:
        return family
    kind = getattr(getattr(model, "config", None), "model_type", None)
    reason = " (its norms follow the addition: there is none in front of a sub-layer)" if family else ""
    known = ", ".join(name for name, known in FAMILIES.items() if known.sub_layers)
    raise LNSConfigError(
        f"{type(model).__name__} (model_type {kind!r}){reason}: the transformers integration knows {known}"
    )


def _parts(model: Any) -> tuple[Family, list[Any], int]:
    """Its family, its blocks, and how many of them its config says."""
    family = known_family(model)
    return family, list(_require(model.base_model, family.blocks, family)), int(model.config.num_hidden_layers)


def _require(module: Any, path: str, family: Family) -> Any:
    """:raises UpstreamChangedError: nothing is where it was verified to be."""
    if (found := at(module, path)) is not None:
        return found
    raise UpstreamChangedError(
        f"{type(module).__name__} has no {path}: this transformers builds {family.model_type} in a way that was not "
        "verified."
    )


def require_supported(family: Family, scheme: Scheme, n_layers: int) -> None:
    """:raises LNSConfigError: the scheme needs another form of block than the family has."""
    scheme.require_built_by("transformers")
    for number, sub_layer, plan in scheme.plans(n_layers):
        fields = [name for name in ("norm_scale", "branch_scale") if getattr(plan, name) != 1.0]
        fits = replace(plan, norm_scale=1.0, branch_scale=1.0) == family.form and len(fields) < 2
        if not fits:
            place = "in front of" if family.form.pre else "after"
            raise LNSConfigError(
                f"scheme {scheme} ({scheme.definition.title}) on {family.model_type}: its blocks have one norm {place} "
                f"each sub-layer, and block {number}, {sub_layer}, would need another form of the block. "
                "This integration multiplies norms and branches and replaces no block's forward."
            )


def attach_model(model: Any, record: Record) -> None:
    """Give every block of ``model`` the factors of the record's scheme, check them, say so.

    Freshly drawn residual output projections get the depth factor of the record's initialization. A model that has
    the scheme already (a head around a base model of ours) is only checked.
    """
    family, blocks, n_layers = _parts(model)
    require_supported(family, record.scheme, n_layers)
    if any(True for _ in norm_sites.sites(model)):
        norm_sites.check(model, record.scheme, n_layers)
        return
    if getattr(model.config, "add_cross_attention", False):
        raise LNSConfigError(
            f"{type(model).__name__} with cross-attention has a third sub-layer, which no scheme names"
        )
    for sub_layer, place in family.sub_layers.items():
        plans = [plan for _, name, plan in record.scheme.plans(n_layers) if name == sub_layer]
        on_branch = not family.form.pre or any(plan.branch_scale != 1.0 for plan in plans)
        field = "branch_scale" if on_branch else "norm_scale"
        path = place.branch if on_branch else place.norm
        for number, block in enumerate(blocks, start=1):
            module = _require(block, path, family)
            site = norm_sites.Site(record.scheme, number, n_layers, sub_layer)
            norm_sites.attach(module, site)
            give(module, scaled_class(type(module)), getattr(site.plan, field), form=family.form, field=field)
    norm_sites.check(model, record.scheme, n_layers)
    _set_initialization(family, blocks, record)
    _report(model, at(blocks[0], family.sub_layers["attn"].norm), record)


def require_as_recorded(model: Any, record: Record) -> None:
    """The built model is the one that a folder with ``record`` loads as: each block with its own number's factors.

    :raises CheckpointMismatchError: blocks or norms were removed, moved, doubled or replaced since it was built.
    """
    _, blocks, n_layers = _parts(model)
    where = f"it has {len(blocks)} blocks"
    try:
        if not record.active:
            raise UpstreamChangedError("its factors are outside the weights.")
        if len(blocks) != n_layers:
            raise UpstreamChangedError(f"its config says {n_layers}.")
        for number, block in enumerate(blocks, start=1):
            where = f"block {number}"
            norm_sites.check(block, record.scheme, n_layers, layer_numbers=[number])
    except UpstreamChangedError as error:
        raise CheckpointMismatchError(
            f"{type(model).__name__} is not what its config says ({record}): {where}: {error} A folder of it "
            "would load as another model. Fold the model before its blocks or norms are changed "
            "(olmo_lns.integrations.transformers.fold(model)), and save it then."
        ) from error


def require_named(model: Any) -> None:
    """A stock model may hold one of ours only where its config holds the other's, so that its folder names the scheme.

    :raises CheckpointMismatchError: it has factors of which its folder would not know.
    """
    if not record_of(model.config).active and any(True for _ in norm_sites.sites(model)):
        configs = [vars(module).get("config") for module in model.modules()]  # not classes: fully_shard derives its own
        inside, held = [config for config in configs if record_of(config).active], vars(model.config).values()
        if not inside or any(all(config is not value for value in held) for config in inside):
            raise CheckpointMismatchError(
                f"{type(model).__name__} has blocks under a scheme and a config without one: its folder would load as "
                "Pre-LN. Apply the scheme to the whole model (olmo_lns.integrations.transformers.apply), load such a "
                "head by its Auto class, or fold the model inside before saving."
            )


def _set_initialization(family: Family, blocks: list[Any], record: Record) -> None:
    """Leave on each drawing module what its draw is to be multiplied by, and do so now."""
    if record.scaled_init == "upstream":
        return
    for number, block in enumerate(blocks, start=1):
        present = factor("scaled" if family.scaled else "plain", number, len(blocks))
        ratio = factor(record.scaled_init, number, len(blocks)) / present
        for place in family.sub_layers.values() if ratio != 1.0 else ():
            # Where the family scales, the projection is drawn when _init_weights sees the module that holds it.
            holder, _, path = place.output.rpartition(".") if family.scaled else (place.output, "", "")
            drawer = at(block, holder)
            drawer.lns_redraw = (path, ratio)
            redraw(drawer)


@torch.no_grad()
def redraw(module: Any) -> None:
    """After a draw of ``module``'s weights: multiply its residual output projection. Loaded weights are left alone."""
    path, ratio = getattr(module, "lns_redraw", ("", 1.0))
    projection = at(module, path) if path else module
    if ratio != 1.0 and not getattr(projection.weight, "_is_hf_initialized", False):
        projection.weight.mul_(ratio)


def _report(model: Any, norm: Any, record: Record) -> None:
    """The start-up line: through the log where somebody listens, else on stderr."""
    if os.environ.get("RANK", "0") != "0":
        return
    modules = [module for _, module, _ in norm_sites.sites(model)]
    state = {"plain": "off", "upstream": "as upstream"}.get(record.scaled_init, f"on, {record.scaled_init}")
    line = norm_sites.start_up_line(
        record.scheme,
        int(model.config.num_hidden_layers),
        norm=type(norm).__name__.removeprefix("LNS"),
        how="; ".join(dict.fromkeys(map(how, modules))),
        initialization=f"scaled initialization {state}",
    )
    if log.hasHandlers() and log.isEnabledFor(logging.INFO):
        log.info("%s", line)
    else:
        print(line, file=sys.stderr)


def fold_factors(model: Any) -> dict[str, float]:
    """Name of a parameter -> what folding multiplies it by, where that is not 1.

    :raises LNSConfigError: not a model of ours, weights that two sub-layers share, or an adapter on a projection that
        a factor goes into.
    """
    if stock_class(model) is None:
        raise LNSConfigError(f"{type(model).__name__} is no model of ours: there is nothing to fold")
    family, blocks, n_layers = _parts(model)
    norm_sites.check(model, record_of(model.config).scheme, n_layers)
    names, found = {parameter: name for name, parameter in model.named_parameters()}, {}
    for _, carrier, site in norm_sites.sites(model):
        if carrier.lns_scale == 1.0:
            continue
        block, place = blocks[site.layer_number - 1], family.sub_layers[site.sub_layer]
        into, parts = [carrier], ["weight", "bias"]
        if carrier is not at(block, place.norm):
            into = [at(block, place.output)]
        elif getattr(carrier, "weight", None) is None:
            into, parts = [at(block, path) for path in place.readers], ["weight"]  # a bias there is added after
        if any(hasattr(module, "base_layer") for module in into):
            raise LNSConfigError(
                f"{site.sub_layer}: a factor goes into a projection that has an adapter, which would stay as it is. "
                "Merge adapters first (merge_and_unload())."
            )
        for parameter in [getattr(module, part, None) for module in into for part in parts]:
            if parameter is None:
                continue
            if names[parameter] in found:
                raise LNSConfigError(f"{names[parameter]} belongs to two sub-layers: its factor has no one place")
            found[names[parameter]] = carrier.lns_scale
    return found


@torch.no_grad()
def fold(model: Any) -> Any:
    """Fold a model of ours in place and return it; it is transformers' own class afterwards.

    :raises LNSConfigError: as :func:`fold_factors`. The model is then as it was.
    """
    factors, family, record = fold_factors(model), known_family(model), record_of(model.config)
    for name, parameter in model.named_parameters():
        if name in factors:  # the product in fp64, rounded once
            parameter.copy_((parameter.double() * factors[name]).to(parameter.dtype))
    for module in model.modules():
        if "lns_scale" in vars(module):
            module.__class__ = type(module).__bases__[1]  # (the kind of scaling, the stock class)
        elif (stock := stock_class(module)) is not None:
            module.__class__ = stock
        for name in [name for name in vars(module) if name.startswith("lns_")]:
            delattr(module, name)
    own_config(model).__class__ = stock_config_class(family)
    model.config.lns = "folded"
    model.config.lns_record = replace(record, folded=True, plugin_version=__version__).as_dict()
    return model
