"""A scheme on the blocks of one transformers model: attached, counted, read back and reported."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import replace
from typing import Any

import torch

from olmo_lns.errors import CheckpointMismatchError, LNSConfigError, UpstreamChangedError
from olmo_lns.integrations import norm_sites
from olmo_lns.integrations.scaled import give
from olmo_lns.integrations.transformers.families import FAMILIES, Family, at, family_of
from olmo_lns.integrations.transformers.norms import how, scaled_class
from olmo_lns.record import Record
from olmo_lns.schemes import Scheme
from olmo_lns.schemes.initialization import factor

__all__ = ["attach_model", "blocks_of", "known_family", "redraw", "require_as_recorded", "require_supported"]

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


def blocks_of(model: Any, family: Family) -> list[Any]:
    """:raises UpstreamChangedError: the list of blocks is not where it was verified to be."""
    blocks = at(model.base_model, family.blocks)
    if blocks is None:
        raise UpstreamChangedError(
            f"{type(model).__name__} has no list of blocks at {family.blocks!r} below base_model: "
            "this transformers builds the family in a way that was not verified."
        )
    return list(blocks)


def require_supported(family: Family, scheme: Scheme, n_layers: int) -> None:
    """:raises LNSConfigError: the scheme needs another form of block than the family has."""
    scheme.require_built_by("transformers")
    for number, sub_layer, plan in scheme.plans(n_layers):
        fields = [name for name in ("norm_scale", "branch_scale") if getattr(plan, name) != 1.0]
        fits = replace(plan, norm_scale=1.0, branch_scale=1.0) == family.form and len(fields) < 2
        if not fits or ("norm_scale" in fields and not family.form.pre):
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
    family = known_family(model)
    blocks, n_layers = blocks_of(model, family), int(model.config.num_hidden_layers)
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
            if (module := at(block, path)) is None:
                raise UpstreamChangedError(
                    f"{type(block).__name__} has no {path}: this transformers builds {family.model_type} in a way that "
                    "was not verified."
                )
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
    family = known_family(model)
    blocks, n_layers = blocks_of(model, family), int(model.config.num_hidden_layers)
    number = len(blocks)
    try:
        if number != n_layers:
            raise UpstreamChangedError(f"its config says {n_layers} blocks.")
        for number, block in enumerate(blocks, start=1):
            norm_sites.check(block, record.scheme, n_layers, layer_numbers=[number])
    except UpstreamChangedError as error:
        raise CheckpointMismatchError(
            f"{type(model).__name__} is not what its config says ({record}): block {number}: {error} A folder of it "
            "would load as another model. Fold the model before its blocks or norms are changed "
            "(olmo_lns.integrations.transformers.fold(model)), and save it then."
        ) from error


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
