"""Config and model classes under a scheme, with the model type ``lns_llama`` for ``llama``.

A scheme class is made on first use, by the prefix of its model type, for any family of transformers. Only the
construction of a model differs from the stock class: the norms get their factors. Forward, state dict, saving, loading
and generation are transformers' own. ``config.json`` has the model type, the scheme (``lns``) and the names of the
norms (``lns_norms``). A model on the meta device, which cannot be measured, gets its factors by these names.

In memory a model class has the name of its stock class, because other programs look that name up in their tables. For
example, the Trainer's label smoothing shifts labels only for the causal language models that it knows. On disk the name
is ``LNSLlamaForCausalLM``. A reader that goes by ``architectures`` or ``auto_map`` then fails without this package,
instead of loading the weights as Pre-LN.
"""

from __future__ import annotations

import functools
import importlib
import math
import sys
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from olmo_lns import sites
from olmo_lns.errors import LNSConfigError
from olmo_lns.hook import require_wrapped
from olmo_lns.integrations import any_model
from olmo_lns.integrations.transformers import scaling
from olmo_lns.integrations.transformers.model_types import (
    PREFIX,
    saved_name,
    saved_reference,
    stock_name,
    stock_reference,
)
from olmo_lns.integrations.transformers.norms import arithmetic_of
from olmo_lns.integrations.transformers.spellings import with_all_spellings
from olmo_lns.records import require_same
from olmo_lns.schemes import PRE_LN, Scheme, parse

#: ``config._attn_implementation`` of servers that replace the norms of a built model.
_SERVERS = ("vllm", "sglang")

_loading: ContextVar[bool] = ContextVar("olmo_lns_loading", default=False)
#: True while a scheme's class builds its parts, which get their scheme classes afterwards.
_building: ContextVar[bool] = ContextVar("olmo_lns_building", default=False)


class SchemeClass:
    """Mixin of the classes of :func:`scheme_class`. :param lns_made_of: the stock class."""

    lns_made_of: Any = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _empty_instance, (self.lns_made_of,), vars(self)


class SchemeConfig(SchemeClass):
    """Mixin of a config class."""

    lns = "lns"

    @property
    def auto_map(self) -> dict[str, Any]:
        """The classes of remote code, by the names of their scheme classes. TRL reads it from every config.

        Each instance has its own dictionary, because transformers adds a model's stock name to it on saving.
        """
        references: dict[str, Any] = vars(self).setdefault("auto_map", {})
        references.update({auto: saved_reference(auto, reference) for auto, reference in references.items()})
        return references

    @auto_map.setter
    def auto_map(self, references: dict[str, Any] | None) -> None:
        vars(self)["auto_map"] = dict(references or {})

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Read a config that any version of transformers has saved."""
        return super().from_dict(with_all_spellings(config_dict), **kwargs)  # type: ignore[misc]

    def to_dict(self) -> dict[str, Any]:
        """Return what ``config.json`` says, with the names of scheme classes."""
        values: dict[str, Any] = super().to_dict()  # type: ignore[misc]
        if values.get("architectures"):
            values["architectures"] = list(map(saved_name, values["architectures"]))
        values.pop("auto_map", None)
        return values | ({"auto_map": dict(self.auto_map)} if self.auto_map else {})


class SchemeModel(SchemeClass):
    """Mixin of a model class."""

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        require_wrapped("transformers")
        implementation = getattr(config, "_attn_implementation", None)
        if isinstance(implementation, str) and implementation.startswith(_SERVERS):
            raise LNSConfigError(
                f"attn_implementation {implementation!r}: this server replaces the norms of a transformers model by "
                "norms without a factor. Serve the folded export (olmo-lns export FOLDER OUT --format hf)."
            )
        token = _building.set(True)
        try:
            super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        finally:
            _building.reset(token)
        set_scheme_classes(self)
        if (names := getattr(config, "lns_norms", None)) is not None:
            any_model.scale_norms(
                self, scaling.located_by_names(self, names), scheme_of(config), arithmetic_of, trained=True
            )
        if not _loading.get():
            scaling.apply_when_built(self, scheme_of(config), getattr(config, "lns_initialization", "plain"))

    def _init_weights(self: Any, module: Any) -> None:
        super()._init_weights(module)  # type: ignore[misc]
        projection: Any = getattr(module, scaling.DEPTH_SCALED.get(self.lns_made_of.config_class.model_type, ""), None)
        is_plain = projection is not None and getattr(self.config, "lns_initialization", "plain") == "plain"
        if is_plain and not getattr(projection.weight, "_is_hf_initialized", False):
            with torch.no_grad():
                projection.weight.mul_(math.sqrt(2.0 * self.config.num_hidden_layers))

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load as transformers does, then measure. :raises CheckpointMismatchError: another scheme in ``config=``."""
        name = pretrained_model_name_or_path
        if hasattr(kwargs.get("config"), "model_type") and name is not None:
            running = scheme_of(kwargs["config"])
            require_same(saved_scheme(name, **kwargs), running, source=name, setting=describe_setting)
        token = _loading.set(True)
        try:
            result = super().from_pretrained(name, *args, **kwargs)  # type: ignore[misc]
        finally:
            _loading.reset(token)
        model = result[0] if isinstance(result, tuple) else result  # with output_loading_info
        scaling.apply_when_built(model, scheme_of(model.config), None)
        return result

    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Save as transformers does. :raises MeasurementError: norms or blocks changed after the scheme was applied."""
        require_unchanged(self)
        return super().save_pretrained(*args, **kwargs)  # type: ignore[misc]


def _empty_instance(stock: Any) -> Any:
    scheme_kind = scheme_class(stock)
    return scheme_kind.__new__(scheme_kind)


@functools.cache
def scheme_class(stock: Any) -> Any:
    """Return the scheme class of a stock config or model class, under the stock module, in which transformers looks.

    A model class has its stock name. A config class has a name of its own, because transformers finds the class of a
    model by the name of its config's class, and would otherwise find the stock one.
    """
    if hasattr(sys.modules.get(stock.__module__), name := saved_name(stock.__name__)) and name != stock.__name__:
        raise LNSConfigError(
            f"{stock.__module__} defines {stock.__name__} and {name}. The first is saved as {name} with a scheme. "
            "The other class would be loaded in its place. Rename that class."
        )
    members = {"lns_made_of": stock, "__module__": stock.__module__}
    if not issubclass(stock, nn.Module):
        named = {"model_type": PREFIX + stock.model_type}
        return type(stock)(saved_name(stock.__name__), (SchemeConfig, stock), members | named)
    members |= {"__qualname__": stock.__qualname__, "config_class": scheme_class(stock.config_class)}
    scheme_model = type(stock)(stock.__name__, (SchemeModel, stock), members)
    # TRL and pipeline() look here for the class that config.json names, never for one of remote code.
    if stock.__module__.startswith("transformers."):
        setattr(importlib.import_module("transformers"), saved_name(stock.__name__), scheme_model)
    # transformers 5 looks here for the records of output_hidden_states=.
    registry = getattr(sys.modules.get("transformers.modeling_utils"), "_CAN_RECORD_REGISTRY", None)
    if registry is not None:
        dict.__setitem__(registry, str(scheme_model), stock._can_record_outputs)
    return scheme_model


def restore_stock_class(model: Any) -> None:
    """Give a model whose factors were folded, and its config, their stock classes and names."""
    if registered := vars(type(model)).get("_auto_class"):  # transformers saves the code of such a class
        model.lns_made_of.register_for_auto_class(registered)
    model.__class__ = model.lns_made_of
    config: Any = model.config
    if not hasattr(config, "lns_made_of"):
        return
    config.__class__ = config.lns_made_of
    for name in ("lns", "lns_norms", "lns_initialization"):
        vars(config).pop(name, None)
    if config.architectures:
        config.architectures = list(map(stock_name, config.architectures))
    if references := vars(config).pop("auto_map", None):
        config.auto_map = {auto: stock_reference(reference) for auto, reference in references.items()}


def scheme_of(config: Any) -> Scheme:
    """Return the scheme of a config, which is Pre-LN for a stock config."""
    return parse(config.lns) if isinstance(config, SchemeConfig) else PRE_LN


def describe_setting(scheme: Scheme) -> str:
    """Describe the way to load a model under ``scheme``, for a message."""
    return "a stock class" if scheme.is_pre_ln else f'an Auto class, without config=, whose config says lns="{scheme}"'


def saved_scheme(name: Any, **kwargs: Any) -> Scheme | None:
    """Return the scheme in the ``config.json`` of a folder or of a name on the hub, or None without a readable one."""
    from transformers import PretrainedConfig

    kwargs.pop("trust_remote_code", None)  # transformers warns about it here
    try:
        values, _ = PretrainedConfig.get_config_dict(name, **kwargs)
    except OSError:
        return None
    if not values or not isinstance(values, dict):  # transformers 5 returns {} for a folder without the file
        return None
    return scheme_in(values)


def scheme_in(values: dict[str, Any]) -> Scheme:
    """Return the scheme in the values of a ``config.json``."""
    is_scheme = str(values.get("model_type", "")).startswith(PREFIX)
    return parse(values.get("lns", SchemeConfig.lns)) if is_scheme else PRE_LN


def require_scheme_class(model: Any) -> None:
    """Refuse a built stock model whose config names a scheme.

    A model is accepted in two cases. It may be a part of a scheme model whose constructor is running, or it may contain
    a model of a scheme class, as TRL's model with a value head does after an Auto class has built the base model.

    :raises CheckpointMismatchError: if the model is Pre-LN.
    """
    is_part = _building.get() or any(isinstance(module, SchemeModel) for module in model.modules())
    if isinstance(model.config, SchemeConfig) and not is_part:
        require_same(scheme_of(model.config), PRE_LN, source=type(model).__name__, setting=describe_setting)


def require_unchanged(model: Any) -> None:
    """Check that a model still follows its scheme, before it is saved or folded.

    :raises MeasurementError: if norms or blocks changed after the scheme was applied.
    :raises LNSConfigError: if PEFT has wrapped its norms.
    """
    any_model.refuse_adapted(model, [each.name for each in sites.in_model(model)])
    n_layers = max((each.site.n_layers for each in sites.in_model(model)), default=1)
    sites.require_complete(model, scheme_of(model.config), n_layers)


def require_free_names(model: Any) -> None:
    """Make the classes that :func:`set_scheme_classes` sets, which may be refused, before the model is changed."""
    for module in _with_config_of(model):
        kind: Any = type(module)
        scheme_class(kind)


def set_scheme_classes(model: Any) -> None:
    """Set the scheme classes of ``model`` and of the models in it with the same config (a head's base model)."""
    for module in _with_config_of(model):
        kind: Any = type(module)
        module.__class__ = scheme_class(kind)


def _with_config_of(model: Any) -> list[Any]:
    """Return the stock models in ``model`` that have its config, such as itself and the base model of a head."""
    from transformers import PreTrainedModel

    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    return [each for each in models if each.config is model.config and not isinstance(each, SchemeModel)]


def forget_origin(model: Any) -> None:
    """Clear the name from which a model was loaded, because the model with this name has no scheme.

    TRL loads a reference model by this name, and PEFT saves it as the base of an adapter. If there is no name, as for
    a model that was built from a config, they ask for the model.
    """
    model.config.name_or_path = ""
    for module in model.modules():
        if isinstance(module, SchemeModel):
            module.name_or_path = ""  # type: ignore[attr-defined]
