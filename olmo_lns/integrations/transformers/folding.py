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
from olmo_lns.integrations.transformers.configs import record_of, to_stock
from olmo_lns.integrations.transformers.families import Family, at
from olmo_lns.integrations.transformers.models import stock_class
from olmo_lns.integrations.transformers.sites import blocks_of, known_family
from olmo_lns.schemes import SUB_LAYERS

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
    for block in blocks_of(model, family):
        for parameter, factor in _targets(block, family):
            if id(parameter) in seen:
                raise LNSConfigError(f"{names[id(parameter)]} belongs to two sub-layers: its factor has no one place")
            seen.add(id(parameter))
            parameter.copy_(scale(names[id(parameter)], parameter.detach(), factor, parameter.dtype))
    _detach(model, family)
    model.config.lns = "folded"
    model.config.lns_record = replace(record, folded=True, plugin_version=__version__).as_dict()
    return model


def _targets(block: Any, family: Family) -> Iterator[tuple[nn.Parameter, float]]:
    """Parameters of ``block`` and what each is multiplied by."""
    assert family.sub_layers is not None
    for sub_layer in SUB_LAYERS:
        place = family.sub_layers[sub_layer]
        norm, branch = at(block, place.norm), at(block, place.branch)
        on_branch = next((True for _, module, _ in norm_sites.sites(branch) if module is branch), False)
        carrier = branch if on_branch else norm
        into = [at(block, place.output)] if on_branch else [norm]
        parts: tuple[str, ...] = ("weight", "bias")
        if not on_branch and getattr(norm, "weight", None) is None:
            into, parts = [at(block, path) for path in place.readers], ("weight",)  # a bias there is added after
        for module in into:
            if hasattr(module, "base_layer") and carrier.lns_scale != 1.0:
                raise LNSConfigError(
                    f"{sub_layer}: a factor goes into a projection that has an adapter, which "
                    "would stay as it is. Merge adapters first (merge_and_unload())."
                )
            for part in parts:
                if (parameter := getattr(module, part, None)) is not None and carrier.lns_scale != 1.0:
                    yield parameter, carrier.lns_scale


def _detach(model: Any, family: Family) -> None:
    """Give every module and the config their stock classes back."""
    for _, module, _ in list(norm_sites.sites(model)):
        module.__class__ = type(module).__bases__[1]  # (the kind of scaling, the stock class)
        for name in [name for name in vars(module) if name.startswith("lns_")]:
            delattr(module, name)
    for module in model.modules():
        if (stock := stock_class(module)) is not None:
            module.__class__ = stock
        if hasattr(module, "lns_redraw"):
            del module.lns_redraw
    to_stock(model.config, family)
