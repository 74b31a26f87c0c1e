"""Factors multiplied into the weights of a model of ours: a stock model that computes the same.

A norm's factor goes into its gain and bias, or, for a norm without gain, into the weights of the
projections that read it; a branch's goes into weight and bias of its last projection.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Callable, Iterator

import torch
from torch import nn

from olmo_lns import __version__
from olmo_lns.errors import LNSConfigError
from olmo_lns.integrations import norm_sites
from olmo_lns.integrations.transformers.configs import record_of, stock_config_class
from olmo_lns.integrations.transformers.families import Family, at
from olmo_lns.integrations.transformers.models import stock_class
from olmo_lns.integrations.transformers.sites import blocks_of, known_family

__all__ = ["fold"]

#: ``scale(name, tensor, factor, dtype)`` -> the product in ``dtype``.
Scale = Callable[[str, torch.Tensor, float, torch.dtype], torch.Tensor]


def _exactly(name: str, tensor: torch.Tensor, factor: float, dtype: torch.dtype) -> torch.Tensor:
    return (tensor.double() * factor).to(dtype)


@torch.no_grad()
def fold(model: Any, scale: Scale = _exactly) -> Any:
    """Fold a model of ours in place and return it; it is transformers' own class afterwards.

    Merge adapters first: one that was trained on the unfolded model does not fit the folded one.

    :param scale: multiplies one tensor, in fp64 and rounded once.
    :raises LNSConfigError: not a model of ours, weights that two sub-layers share, or an adapter on a projection that
        a factor goes into.
    """
    if stock_class(model) is None:
        raise LNSConfigError(f"{type(model).__name__} is no model of ours: there is nothing to fold")
    family, record = known_family(model), record_of(model.config)
    norm_sites.check(model, record.scheme, int(model.config.num_hidden_layers))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    seen: set[int] = set()
    for parameter, factor in _targets(model, family):
        if id(parameter) in seen:
            raise LNSConfigError(f"{names[id(parameter)]} belongs to two sub-layers: its factor has no one place")
        seen.add(id(parameter))
        parameter.copy_(scale(names[id(parameter)], parameter.detach(), factor, parameter.dtype))
    for module in model.modules():
        if "lns_scale" in vars(module):
            module.__class__ = type(module).__bases__[1]  # (the kind of scaling, the stock class)
        elif (stock := stock_class(module)) is not None:
            module.__class__ = stock
        for name in [name for name in vars(module) if name.startswith("lns_")]:
            delattr(module, name)
    model.config.__class__ = stock_config_class(family)
    model.config.lns = "folded"
    model.config.lns_record = replace(record, folded=True, plugin_version=__version__).as_dict()
    return model


def _targets(model: Any, family: Family) -> Iterator[tuple[nn.Parameter, float]]:
    """Parameters and what each is multiplied by."""
    blocks = blocks_of(model, family)
    for _, carrier, site in norm_sites.sites(model):
        block, place = blocks[site.layer_number - 1], family.sub_layers[site.sub_layer]
        into, parts = [carrier], ["weight", "bias"]
        if carrier is not at(block, place.norm):
            into = [at(block, place.output)]
        elif getattr(carrier, "weight", None) is None:
            into, parts = [at(block, path) for path in place.readers], ["weight"]  # a bias there is added after
        for module in into if carrier.lns_scale != 1.0 else ():
            if hasattr(module, "base_layer"):
                raise LNSConfigError(
                    f"{site.sub_layer}: a factor goes into a projection that has an adapter, which would stay as it "
                    "is. Merge adapters first (merge_and_unload())."
                )
            for part in parts:
                if (parameter := getattr(module, part, None)) is not None:
                    yield parameter, carrier.lns_scale
