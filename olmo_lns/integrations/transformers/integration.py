"""Models of transformers that are built already: their classes and their config name the scheme."""

from __future__ import annotations

import copy
from typing import Any, Callable

from torch import nn

from olmo_lns import environment
from olmo_lns.errors import LNSConfigError
from olmo_lns.hook import require_wrapped
from olmo_lns.integrations import any_model
from olmo_lns.integrations.any_model import Located
from olmo_lns.integrations.hints import Hints
from olmo_lns.integrations.interface import Integration, fold_model
from olmo_lns.integrations.transformers import classes, scaling
from olmo_lns.integrations.transformers.norms import arithmetic_of
from olmo_lns.norm import NormArithmetic
from olmo_lns.schemes import Scheme


def apply(
    model: Any,
    scheme: Scheme,
    hints: Hints,
    *,
    initialization: str = "",
    in_every_process: bool,
) -> None:
    """See :func:`olmo_lns.integrations.transformers.apply`."""
    from transformers import PreTrainedModel

    environment.check()
    require_wrapped("transformers")
    if initialization not in ("", "plain", "upstream"):
        raise LNSConfigError(f"initialization is {initialization!r}, but expected plain or upstream. Pass one of them.")
    if not isinstance(model, PreTrainedModel):
        raise LNSConfigError(
            f"apply found an object of the type {type(model).__name__}. It expects a model of "
            "transformers. Call olmo_lns.apply."
        )
    any_model.require_unwrapped(model)
    is_attached = isinstance(model, classes.SchemeModel)
    if not is_attached:
        classes.require_free_names(model)
    draw = None if is_attached or hints.trained else initialization or "plain"
    names = scaling.locate_and_scale(model, scheme, hints, initialization=draw, in_every_process=in_every_process)
    if not is_attached:
        stock_config, config = model.config, copy.deepcopy(model.config)
        stock_class: Any = type(stock_config)
        config.__class__, config.lns, config.lns_norms = classes.scheme_class(stock_class), str(scheme), names
        if initialization == "upstream":
            config.lns_initialization = initialization
        for module in model.modules():
            if vars(module).get("config") is stock_config:
                module.config = config
        classes.set_scheme_classes(model)
        classes.forget_origin(model)


def fold(model: Any, dtype: Any, example: Any) -> None:
    """See :func:`olmo_lns.integrations.transformers.fold`."""
    any_model.refuse_offloaded(model)
    parts: list[Any] = [(module, INTEGRATION) for module in model.modules() if isinstance(module, classes.SchemeModel)]
    fold_model(model, parts, lambda: INTEGRATION.forward(model, example), dtype)


class Transformers(Integration):
    """Models of transformers."""

    def arithmetic_of(self, norm: nn.Module) -> NormArithmetic | None:
        return arithmetic_of(norm)

    def forward(self, model: nn.Module, example: Any) -> Callable[[], Any]:
        return any_model.forward(model, scaling.usual_example(model) if example is None else example)

    def locate(self, model: nn.Module, hints: Hints, find: Callable[..., Located] = any_model.locate) -> Located:
        return scaling.locate(model, hints, find)

    def apply(self, model: Any, scheme: Scheme, hints: Hints) -> None:
        apply(model, scheme, hints, in_every_process=True)

    def require_foldable(self, model: Any) -> None:
        if isinstance(model, classes.SchemeModel):
            classes.require_unchanged(model)

    def remove_recorded_scheme(self, model: Any) -> None:
        if isinstance(model, classes.SchemeModel):
            classes.restore_stock_class(model)


INTEGRATION = Transformers()
