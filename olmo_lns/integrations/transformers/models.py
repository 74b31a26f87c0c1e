"""Model classes that carry a scheme: ``LNSLlamaForCausalLM`` and so on, made from transformers' own.

Nothing but the construction differs: after transformers has built the model, its blocks get their
factors. Forward, state dict, saving, loading and generation are transformers' own.
"""

from __future__ import annotations

import copy
import functools
import sys
from typing import Any

from olmo_lns.errors import LNSConfigError
from olmo_lns.integrations.transformers.configs import available, building, config_class, heads, record_of
from olmo_lns.integrations.transformers.families import Family

__all__ = ["class_of", "convert", "model_class", "own_config", "register_models", "stock_class"]


@functools.cache
def model_class(stock: Any, family: Family) -> Any:
    """The class of ours for one of transformers' model classes of ``family``."""

    # torch: not before a model is wanted
    from olmo_lns.integrations.transformers.sites import attach_model, redraw, require_as_recorded

    class Model(stock):
        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            with building(config):
                super().__init__(config, *args, **kwargs)
                convert(self, family)
                attach_model(self, record_of(config))

        def _init_weights(self, module: Any) -> None:
            super()._init_weights(module)
            redraw(module)

        def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
            require_as_recorded(self, record_of(self.config))
            return super().save_pretrained(*args, **kwargs)

    Model.config_class = config_class(family)
    Model.__name__ = Model.__qualname__ = f"LNS{stock.__name__}"
    Model.__module__ = __name__
    Model.__doc__ = f"``{stock.__name__}`` under a scheme."
    setattr(sys.modules[__name__], Model.__name__, Model)
    # transformers 5 finds what output_hidden_states= records by the name of the class, filled in as a model is built.
    registry = getattr(sys.modules["transformers.modeling_utils"], "_CAN_RECORD_REGISTRY", None)
    if registry is not None:
        dict.__setitem__(registry, str(Model), stock._can_record_outputs)
    return Model


def convert(model: Any, family: Family) -> None:
    """Make ``model`` and the models of the same config inside it (a head's base model) classes of ours, in place."""
    from transformers import PreTrainedModel

    for module in model.modules():
        if isinstance(module, PreTrainedModel) and module.config is model.config and stock_class(module) is None:
            stock: Any = type(module)
            module.__class__ = model_class(stock, family)


def own_config(model: Any) -> Any:
    """Give ``model`` and what is inside it a copy of its config, which another model may share; returns the copy."""
    shared, own = model.config, copy.deepcopy(model.config)
    for module in model.modules():
        if vars(module).get("config") is shared:
            module.config = own
    return own


def stock_class(model: Any) -> type | None:
    """The class of transformers' from which the class of ``model`` was made; None where it is not ours."""
    kind = type(model)
    return kind.__mro__[1] if kind.__module__ == __name__ else None


def class_of(config: Any) -> Any:
    """The class of ours that a saved model had.

    :raises LNSConfigError: its config names none.
    """
    for name in getattr(config, "architectures", None) or []:
        if name.startswith("LNS") and hasattr(sys.modules[__name__], name):
            return getattr(sys.modules[__name__], name)
    raise LNSConfigError(f"config.json: architectures {config.architectures} name no class of {config.model_type}")


@functools.cache
def register_models(family: Family) -> None:
    """Tell the auto classes, and whoever looks a class up in ``transformers`` by its name (TRL does)."""
    import transformers

    for name, auto in heads(family).items():
        ours = model_class(getattr(transformers, name), family)
        getattr(transformers, auto).register(config_class(family), ours, exist_ok=True)
        setattr(transformers, ours.__name__, ours)


def __getattr__(name: str) -> Any:
    """A class of ours by its name, for pickle and for `import`."""
    for family in available() if name.startswith("LNS") else ():
        if name == f"LNS{family.stem}Config":
            return config_class(family)
        if name.removeprefix("LNS") in heads(family):
            register_models(family)
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
