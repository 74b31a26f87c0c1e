"""Folding: a model of ours becomes a stock model that computes the same."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from olmo_lns import sites
from olmo_lns.errors import LNSConfigError
from olmo_lns.integrations import anything
from olmo_lns.integrations.transformers import models
from olmo_lns.integrations.transformers.models import SchemeModel


def fold(model: Any) -> Any:
    """Multiply the factors of a model of ours into its weights, in place: it becomes a stock model and is returned.

    A norm's factor goes into its weight and bias (into 1 + weight where a family adds 1), or, for a norm without
    them, into the weights of the projections that read it. Products are in fp64 and are rounded once, to the dtype of
    the weight. Merge adapters first: one that was trained on the unfolded model does not fit the folded.

    :raises LNSConfigError: not a model of ours, weights that two sub-layers share, an adapter on a projection that a
        factor goes into, or factors that have no place in the weights. The model is then as it was.

    Example: ``fold(model).save_pretrained("folded")``.
    """
    if not hasattr(model, "lns_made_of"):
        raise LNSConfigError(f"{type(model).__name__} has no scheme of ours: there is nothing to fold.")
    found = models.by_names(model, model.config.lns_norms)
    sites.check(model, models.scheme_of(model.config), len(found.blocks))
    norms = list(dict.fromkeys(norm for _, norm, _ in sites.sites(model)))
    bare = [norm for norm in norms if not list(norm.parameters())]
    readers = _readers(model, bare) if bare else {}
    new: dict[nn.Parameter, torch.Tensor] = {}
    for norm in norms:
        for parameter, value in _folded(norm, readers.get(norm, []), found.width).items():
            if parameter in new:
                raise LNSConfigError(
                    f"a weight of {type(norm).__name__} belongs to two sub-layers: its factor has no one place."
                )
            new[parameter] = value
    with torch.no_grad():
        for parameter, value in new.items():
            parameter.copy_(value)
    sites.restore(model)
    return _stock(model)


def _readers(model: nn.Module, norms: list[Any]) -> dict[Any, list[nn.Module]]:
    """For each norm the projections that read its output as it is.

    :raises LNSConfigError: something else reads it, or one of them has an adapter.
    """
    found: dict[Any, list[nn.Module]] = {norm: [] for norm in norms}
    outputs: dict[int, tuple[Any, torch.Tensor]] = {}

    def wrote(norm: Any, args: Any, output: torch.Tensor) -> None:
        outputs[output.data_ptr()] = norm, output  # kept alive: its memory is not used again

    def read(module: nn.Module, args: Any) -> None:
        norm, output = outputs.get(args[0].data_ptr(), (None, None)) if args else (None, None)
        if output is not None and output.numel() == args[0].numel() and module not in found[norm]:
            found[norm].append(module)

    matrices = [m for m in model.modules() if getattr(getattr(m, "weight", None), "ndim", 0) == 2]
    handles = [norm.register_forward_hook(wrote) for norm in norms]
    expected = _logits(model, handles + [module.register_forward_pre_hook(read) for module in matrices])
    readers = [module for each in found.values() for module in each]
    adapters = {child for module in model.modules() if hasattr(module, "base_layer") for child in module.modules()}
    if adapters.intersection(readers):
        raise LNSConfigError(
            "a factor goes into a projection that has an adapter, which would stay as it is. Merge adapters first "
            "(merge_and_unload())."
        )
    handles = [norm.register_forward_hook(lambda module, args, output: 2.0 * output) for norm in norms]
    halved = [m.register_forward_pre_hook(lambda module, args: (args[0] / 2.0, *args[1:])) for m in readers]
    if not torch.allclose(
        _logits(model, handles + halved), expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max())
    ):
        raise LNSConfigError(f"{type(model).__name__}: more than projections reads its norms, which have no weights.")
    return found


def _logits(model: nn.Module, handles: list[Any]) -> torch.Tensor:
    """The model's first output on a short example, while hooks are there."""
    try:
        with anything.undisturbed(model):
            output = anything.forward(model, models.usual_example(model))()
    finally:
        for handle in handles:
            handle.remove()
    logits: torch.Tensor = getattr(output, "logits", output[0])
    return logits


def _folded(norm: Any, readers: list[nn.Module], width: int) -> dict[nn.Parameter, torch.Tensor]:
    """The new values of the parameters that the factor of ``norm`` goes into."""
    factor, own = norm.lns_scale, dict(norm.named_parameters())
    if factor == 1.0:
        return {}
    if not own:
        weights: list[Any] = [module.weight for module in readers]
        if not weights:
            raise LNSConfigError(f"no projection reads {type(norm).__name__} as it is: its factor has no place.")
        return {weight: weight.double() * factor for weight in weights}
    stock = copy.deepcopy(norm)
    sites.restore(stock)
    stock.double()
    x = torch.randn((4, 1, width), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = x.to(next(iter(own.values())).device)
    with torch.no_grad():
        expected = stock(x) * factor
        for added in (0.0, 1.0):  # the arithmetic may use 1 + weight
            values = {n: (p.double() + added * (n != "bias")) * factor - added * (n != "bias") for n, p in own.items()}
            found = torch.func.functional_call(stock, values, (x,))
            if float((found - expected).norm()) <= 1e-5 * float(expected.norm()):
                return {own[name]: value for name, value in values.items()}
    raise LNSConfigError(f"{type(norm).__name__} does not multiply by its weight: a factor cannot be folded into it.")


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
