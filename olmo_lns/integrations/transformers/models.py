"""Config and model classes under a scheme, with the model type ``lns_llama`` for ``llama``.

A scheme class is made on first use, by the prefix of its model type, for any family of transformers. Only the
construction of a model differs from the stock class: the norms get their factors. Forward, state dict, saving, loading
and generation are transformers' own. ``config.json`` names the model type, the scheme (``lns``) and the found norms
(``lns_norms``), from which a model on the meta device is built.

In memory a model class has the name of its stock class, because other programs look that name up in their tables: the
Trainer shifts the labels of label smoothing only for the causal language models that it knows. On disk the name is
``LNSLlamaForCausalLM``. A reader that goes by ``architectures`` or ``auto_map`` then fails without this package,
instead of loading the weights as Pre-LN.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import math
import sys
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Callable, Iterator

import torch
from torch import nn

from olmo_lns import initialization as drawing
from olmo_lns import probe, sites
from olmo_lns.errors import LNSConfigError, MeasurementError
from olmo_lns.integrations import any_model
from olmo_lns.integrations.any_model import Located
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
from olmo_lns.shadow import device_of, is_absent

#: ``config._attn_implementation`` of servers that replace the norms of a built model.
_SERVERS = ("vllm", "sglang")
#: Families that draw a residual output projection at std / sqrt(2·L), and the projection's name in its module.
_DEPTH_SCALED = {"gpt2": "c_proj", "gpt_bigcode": "c_proj"}

_loading: ContextVar[bool] = ContextVar("olmo_lns_loading", default=False)
#: True while a scheme's class builds its parts, whose stock classes are converted afterwards.
_building: ContextVar[bool] = ContextVar("olmo_lns_building", default=False)


class SchemeClass:
    """Mixin of the classes of :func:`scheme_class`. :param lns_made_of: the stock class."""

    lns_made_of: Any = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _blank, (self.lns_made_of,), vars(self)


class SchemeConfig(SchemeClass):
    """Mixin of a config class."""

    lns = "lns"

    @property
    def auto_map(self) -> dict[str, Any]:
        """The classes of remote code, by the names of their scheme classes. TRL reads it from every config.

        The dictionary is the instance's own, since transformers adds a model's stock name to it on saving.
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
        convert(self)
        if (names := getattr(config, "lns_norms", None)) is not None:
            any_model.attach(self, by_names(self, names), scheme_of(config), arithmetic_of, trained=True)
        if not _loading.get():
            _finish(self, getattr(config, "lns_initialization", "plain"))

    def _init_weights(self: Any, module: Any) -> None:
        super()._init_weights(module)  # type: ignore[misc]
        projection: Any = getattr(module, _DEPTH_SCALED.get(self.lns_made_of.config_class.model_type, ""), None)
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
        _finish(model, None)
        return result

    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Save as transformers does. :raises MeasurementError: norms or blocks changed after the scheme was applied."""
        check(self)
        return super().save_pretrained(*args, **kwargs)  # type: ignore[misc]


def _blank(stock: Any) -> Any:
    scheme_kind = scheme_class(stock)
    return scheme_kind.__new__(scheme_kind)


@functools.cache
def scheme_class(stock: Any) -> Any:
    """Return the scheme class of a stock config or model class, under the stock module, in which transformers looks.

    A model class has its stock name. A config class does not: transformers finds the class of a model by the name of
    its config's class, and would find the stock one.
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


def restore_names(config: Any) -> None:
    """Set the stock names of classes in the config of a folded model."""
    if config.architectures:
        config.architectures = list(map(stock_name, config.architectures))
    if references := vars(config).pop("auto_map", None):
        config.auto_map = {auto: stock_reference(reference) for auto, reference in references.items()}


def scheme_of(config: Any) -> Scheme:
    """Return the scheme of a config; Pre-LN for a stock config."""
    return parse(config.lns) if isinstance(config, SchemeConfig) else PRE_LN


def describe_setting(scheme: Scheme) -> str:
    """Describe the way to load a model under ``scheme``, for a message."""
    return "a stock class" if scheme.is_pre_ln else f'an Auto class, without config=, whose config says lns="{scheme}"'


def saved_scheme(name: Any, **kwargs: Any) -> Scheme | None:
    """Return the scheme in the ``config.json`` of a folder or of a name on the hub; None without a readable one."""
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
    """Refuse a built stock model with the config of a scheme, unless it has an Auto class's model in it.

    :raises CheckpointMismatchError: the model is Pre-LN.
    """
    is_part = _building.get() or any(isinstance(module, SchemeModel) for module in model.modules())
    if isinstance(model.config, SchemeConfig) and not is_part:
        require_same(scheme_of(model.config), PRE_LN, source=type(model).__name__, setting=describe_setting)


def check(model: Any) -> None:
    """Check a model.

    :raises MeasurementError: norms or blocks changed after the scheme was applied.
    :raises LNSConfigError: PEFT has wrapped its norms.
    """
    any_model.refuse_adapted(model, [name for name, _, _ in sites.in_model(model)])
    n_layers = max((site.n_layers for _, _, site in sites.in_model(model)), default=1)
    sites.require_complete(model, scheme_of(model.config), n_layers)


def convert(model: Any) -> None:
    """Set the scheme classes of ``model`` and of the models in it with the same config (a head's base model)."""
    from transformers import PreTrainedModel

    for module in model.modules():
        shares_config = isinstance(module, PreTrainedModel) and module.config is model.config
        if shares_config and not isinstance(module, SchemeModel):
            kind: Any = type(module)
            module.__class__ = scheme_class(kind)


def forget_origin(model: Any) -> None:
    """Clear the name from which a model was loaded: what is there has no scheme.

    TRL loads a reference model by this name, and PEFT saves it as the base of an adapter. Without it, as for a model
    that was built from a config, they ask for the model.
    """
    model.config.name_or_path = ""
    for module in model.modules():
        if isinstance(module, SchemeModel):
            module.name_or_path = ""  # type: ignore[attr-defined]


def _finish(model: Any, initialization: str | None) -> None:
    """Measure a built or loaded model. For weights that are not here, the norms that the config names are measured."""
    scheme, names = scheme_of(model.config), getattr(model.config, "lns_norms", None)
    weights = list(model.parameters())
    can_run = all(p.is_floating_point() and not hasattr(p, "placements") for p in weights)
    if can_run and (names is None or not any(map(is_absent, weights))):
        model.config.lns_norms = measure(model, scheme, initialization=initialization)
    elif names is not None:
        any_model.report(model, by_names(model, names), ["output", "gradient"])
    else:
        raise LNSConfigError(
            f"{type(model).__name__} is quantized or sharded, and its config lacks lns_norms, the names of its norms. "
            "Build the model once without that (from_config on a CPU) and use the config of that model."
        )


def locate(
    model: Any,
    example: Any = None,
    blocks: Any = None,
    norms: Any = None,
    find: Callable[..., Located] = any_model.locate,
) -> Located:
    """Find the blocks and their norms by a forward without a key-value cache, which a block's second run would extend.

    :param example: as in :func:`olmo_lns.apply`; the default is a short text or an image.
    :param find: finds the norms, in this process or in the first one of a launch.
    """
    example = usual_example(model) if example is None else example
    with _without_cache(model):
        return find(model, example, blocks, norms, arithmetic_of=arithmetic_of)


@contextmanager
def _without_cache(model: Any) -> Iterator[None]:
    """Pass ``use_cache=False`` to the forward of ``model``, if it takes that."""
    parameters = inspect.signature(model.forward).parameters.values()
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    takes = takes_any or any(parameter.name == "use_cache" for parameter in parameters)
    if not takes or not hasattr(text_config(model.config), "use_cache"):
        yield
        return
    with probe.hooks(
        [
            model.register_forward_pre_hook(
                lambda module, args, kwargs: (args, {**kwargs, "use_cache": False}), with_kwargs=True
            )
        ]
    ):
        yield


def measure(
    model: Any,
    scheme: Scheme,
    blocks: Any = None,
    example: Any = None,
    *,
    norms: Any = None,
    initialization: str | None = None,
    trained: bool | None = True,
    find: Callable[..., Located] = any_model.locate,
) -> dict[str, Any]:
    """Find the norms, scale or measure them, write the start-up line, and return the norms as in :func:`by_path`.

    :param initialization: ``plain`` or ``upstream`` for freshly drawn weights, None for loaded ones.
    :param trained: as in :func:`olmo_lns.apply`.
    """
    if getattr(model.config, "add_cross_attention", False):
        raise LNSConfigError(f"{type(model).__name__} has cross-attention, a third sub-layer that no scheme supports.")
    located = locate(model, example, blocks, norms, find)
    names = by_path(model, located)
    if getattr(model.config, "lns_norms", names) != names:
        raise MeasurementError(
            f"{type(model).__name__}: its config names the norms {model.config.lns_norms}, found {names}. This "
            "version of transformers builds the family in another way: apply the scheme to a stock model."
        )
    with sites.stock_on_failure(model):
        measured = any_model.attach(model, located, scheme, arithmetic_of, trained=trained)
        with _without_cache(model):
            any_model.check_without_hooks(model, located, usual_example(model) if example is None else example)
        text = settle_initialization(model, located, initialization)
    for _, norm, _ in sites.in_model(model):
        if hasattr(norm, "kernel_layer_name"):  # `kernelize` would insert a kernel without the factor
            type(norm).kernel_layer_name = "LNSScaled"
    any_model.report(model, located, measured, text)
    return names


def text_config(config: Any) -> Any:
    """Return the config of the language model. :raises LNSConfigError: a composite model with several."""
    try:
        return config.get_text_config()
    except ValueError as error:
        raise LNSConfigError(f"{type(config).__name__}: {error} Apply the scheme to one of its models.") from None


def image_shape(config: Any, count: int) -> tuple[int, ...]:
    """Return the shape of ``count`` input images."""
    size = config.image_size
    return (count, config.num_channels, *(size if isinstance(size, (tuple, list)) else (size, size)))


def usual_example(model: Any) -> dict[str, torch.Tensor] | None:
    """Return the arguments of one short forward."""
    config, text = model.config, text_config(model.config)
    device = device_of(model)
    if getattr(model, "main_input_name", "") == "pixel_values":
        pixels = torch.randn(image_shape(config, 1), generator=torch.Generator().manual_seed(0), device="cpu")
        return {"pixel_values": pixels.to(device, next(model.parameters()).dtype)}
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, max(4, min(text.vocab_size, 1000)), (1, 8), generator=generator, device="cpu")
    options = {"use_cache": False} if hasattr(text, "use_cache") else {}
    return {"input_ids": ids.to(device), **options}  # type: ignore[dict-item]


def by_path(model: Any, located: Located) -> dict[str, Any]:
    """Return the list in the base model, and the norms; for blocks that differ, a list of names for each.

    Example: ``{"layers": ["input_layernorm", "post_attention_layernorm"]}``. Norms that are in no list of blocks have
    the path ``""`` and their names in the base model.
    """
    base: nn.Module = model.base_model
    blocks = located.blocks_of(model)
    path = next((name for name, module in base.named_modules() if list(module.children()) == blocks), "")
    owners = blocks if path else [base] * len(blocks)
    inner = [{module: name for name, module in owner.named_modules()} for owner in dict.fromkeys(owners)]
    tables = inner if path else inner * len(blocks)
    norms = [
        [table[model.get_submodule(name)] for name in each] for table, each in zip(tables, located.norms, strict=True)
    ]
    return {path: norms[0] if path and all(each == norms[0] for each in norms) else norms}


def by_names(model: Any, norms: dict[str, Any]) -> Located:
    """Return the blocks and norms that a config names. :raises LNSConfigError: the model lacks them."""
    ((path, names),) = norms.items()
    lists = {name: m for name, m in model.named_modules() if isinstance(m, nn.ModuleList)}
    front = next((name for name, module in model.named_modules() if module is model.base_model), "")
    if not path:
        blocks = [front] * len(names)
    elif matching := [name for name in lists if f".{name}".endswith(f".{path}")]:
        name = min(matching, key=len)
        blocks = [f"{name}.{key}" for key, _ in lists[name].named_children()]
    else:
        raise LNSConfigError(f"{type(model).__name__} has no list of blocks {path!r}, which its config names.")
    block_names = [tuple(row) for row in (names if isinstance(names[0], list) else [names] * len(blocks))]
    paths = tuple(
        tuple(f"{block}.{n}" if block else n for n in each) for block, each in zip(blocks, block_names, strict=True)
    )
    weight = next(model.get_submodule(paths[0][0]).parameters(), None)
    width = weight.shape[-1] if weight is not None and weight.numel() else text_config(model.config).hidden_size
    return Located(path, tuple(blocks), paths, ((),) * len(paths), int(width), given=not path)


def settle_initialization(model: Any, located: Located, initialization: str | None) -> str:
    """Remove the depth factor with which the family draws its fresh weights; return the text of the start-up line.

    Weights that the family's own initialization does not scale are left as they are.

    :param initialization: ``plain`` removes the factor, ``upstream`` keeps it. None: the weights were loaded.
    :raises MeasurementError: a family that is known to have the factor draws by another rule.
    """
    matrices = drawing.matrices_of(located.blocks_of(model))
    if drawing.trained_part(located.norms_of(model), matrices):  # such as weights that load_state_dict filled
        return ""
    found = drawing.measure(model)
    is_known = model.config.model_type.removeprefix(PREFIX) in _DEPTH_SCALED
    if initialization == "plain" and found.rule == "" and is_known and _rule_of_family(model, located) == "":
        raise MeasurementError(
            f"{type(model).__name__}: found residual output projections drawn by another rule ({found.values}), "
            "expected 1 or 1/sqrt(2L) times the others. This version of transformers draws them in another way: "
            'olmo_lns.integrations.transformers.apply(model, initialization="upstream") keeps that.'
        )
    if not found.is_scaled:
        return str(found)
    if "upstream" in (initialization, getattr(model.config, "lns_initialization", "")):
        return f"scaled initialization on ({found.values})"
    if initialization == "plain" and found.rule == _rule_of_family(model, located):
        drawing.make_plain(model, found)
        found = drawing.measure(model)
    return str(found)


def _rule_of_family(model: Any, located: Located) -> str | None:
    """Return the rule by which the family draws its residual output projections, measured on copies of two blocks."""
    draw = getattr(type(model), "lns_made_of", None) or type(model)
    blocks = located.blocks_of(model)
    copies = nn.ModuleList(copy.deepcopy(block) for block in dict.fromkeys((blocks[0], blocks[-1])))
    with any_model.undisturbed(model):  # the launch keeps its random state
        copies.apply(lambda module: draw._init_weights(model, module))
    return drawing.measure(copies).rule
