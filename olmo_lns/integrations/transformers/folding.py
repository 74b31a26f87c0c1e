"""Folding: a model of ours becomes a stock model that computes the same."""

from __future__ import annotations

from typing import Any

import torch

from olmo_lns import sites
from olmo_lns.errors import LNSConfigError
from olmo_lns.fold import fold_norms
from olmo_lns.integrations import anything
from olmo_lns.integrations.transformers import models
from olmo_lns.integrations.transformers.models import SchemeModel


def fold(model: Any, dtype: torch.dtype | None = None) -> Any:
    """Multiply the factors of a model of ours into its weights, in place: it becomes a stock model and is returned.

    A norm's factor goes into its weight and bias (into 1 + weight where a family adds 1), or, for a norm without
    them, into the weights of the projections that read it. Products are in fp64 and are rounded once, to the dtype of
    the weight. Merge adapters first: one that was trained on the unfolded model does not fit the folded.

    :param dtype: of the weights that are changed, None: their own.
    :raises LNSConfigError: not a model of ours, weights that two sub-layers share, an adapter on a projection that a
        factor goes into, or factors that have no place in the weights. The model is then as it was.

    Example: ``fold(model).save_pretrained("folded")``.
    """
    if not hasattr(model, "lns_made_of"):
        raise LNSConfigError(f"{type(model).__name__} has no scheme of ours: there is nothing to fold.")
    found = models.by_names(model, model.config.lns_norms)
    sites.check(model, models.scheme_of(model.config), len(found.blocks))
    with anything.undisturbed(model):
        fold_norms(model, anything.forward(model, models.usual_example(model)), dtype)
    return _stock(model)


def _stock(model: Any) -> Any:
    """Make the model, the models inside it and their config transformers' own again."""
    config = model.config
    for module in model.modules():
        if isinstance(module, SchemeModel):
            module.__class__ = module.lns_made_of
    config.__class__ = config.lns_made_of
    for name in ("lns", "lns_norms", "lns_initialization"):
        vars(config).pop(name, None)
    return model
