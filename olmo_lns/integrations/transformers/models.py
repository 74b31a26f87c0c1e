"""Config and model classes under a scheme: ``lns_llama`` for ``llama``, ``LNSLlamaForCausalLM``, and so on.

A class of ours is made when somebody asks for it, by the prefix of its model type, for any family of transformers.
Only the construction of a model differs from transformers' own class: its norms get their factors. Forward, state
dict, saving, loading and generation are transformers' own. ``config.json`` names the model type, the scheme (``lns``)
and the norms that were found (``lns_norms``), by which a model on the meta device is built.
"""

from __future__ import annotations

import copy
import functools
import importlib
import math
import sys
from contextvars import ContextVar
from typing import Any, Callable

import torch
from torch import nn

from olmo_lns import probe, sites
from olmo_lns.errors import LNSConfigError, MeasurementError
from olmo_lns.integrations import anything
from olmo_lns.integrations.anything import Blocks
from olmo_lns.integrations.transformers.norms import folded
from olmo_lns.record import require_same
from olmo_lns.schemes import PRE_LN, Scheme, parse

PREFIX = "lns_"
#: ``config._attn_implementation`` of servers that put norms of their own into the model after it was built.
_SERVERS = ("vllm", "sglang")
#: Families that draw a residual output projection at std / sqrt(2·L), and its name in the module that draws it.
_DEPTH_SCALED = {"gpt2": "c_proj", "gpt_bigcode": "c_proj"}

_loading: ContextVar[bool] = ContextVar("olmo_lns_loading", default=False)


class SchemeConfig:
    """Mixin of a config class; ``lns_made_of`` is transformers' own."""

    lns_made_of: Any = None
    lns = "lns"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _blank, (config_class, self.lns_made_of), vars(self)


class SchemeModel:
    """Mixin of a model class; ``lns_made_of`` is transformers' own."""

    lns_made_of: Any = None

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        asked = getattr(config, "_attn_implementation", None)
        if isinstance(asked, str) and asked.startswith(_SERVERS):
            raise LNSConfigError(
                f"attn_implementation {asked!r}: this server replaces the norms of a transformers model by its own, "
                "which know no factor. Serve the folded export (olmo-lns export FOLDER OUT --format hf)."
            )
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        convert(self)
        scheme, names = scheme_of(config), getattr(config, "lns_norms", None)
        if names is not None:
            anything.attach(self, by_names(self, names), scheme, folded)
        if _loading.get():
            return
        if measurable(self):
            measure(self, scheme, initialization=getattr(config, "lns_initialization", "plain"))
        elif names is None:
            raise LNSConfigError(
                f"{type(self).__name__} is built without weights, and its config has no lns_norms, which say where "
                "its norms are. Build it once with weights (from_config on a CPU) and use that model's config."
            )

    def _init_weights(self: Any, module: Any) -> None:
        super()._init_weights(module)  # type: ignore[misc]
        projection: Any = getattr(module, _DEPTH_SCALED.get(self.lns_made_of.config_class.model_type, ""), None)
        plain = projection is not None and getattr(self.config, "lns_initialization", "plain") == "plain"
        if plain and not getattr(projection.weight, "_is_hf_initialized", False):
            with torch.no_grad():
                projection.weight.mul_(math.sqrt(2.0 * self.config.num_hidden_layers))

    @classmethod
    def from_pretrained(cls, name: Any, *args: Any, **kwargs: Any) -> Any:
        """As transformers', then measured. :raises CheckpointMismatchError: another scheme than ``config=`` says."""
        if hasattr(kwargs.get("config"), "model_type") and name is not None:
            running = scheme_of(kwargs["config"])
            require_same(saved_scheme(name, **kwargs), running, source=name, setting=in_words)
        token = _loading.set(True)
        try:
            result = super().from_pretrained(name, *args, **kwargs)  # type: ignore[misc]
        finally:
            _loading.reset(token)
        model = result[0] if isinstance(result, tuple) else result  # with output_loading_info
        if measurable(model):
            measure(model, scheme_of(model.config))
        return result

    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
        """As transformers'. :raises MeasurementError: norms or blocks were changed since the scheme was applied."""
        found = [site for _, _, site in sites.sites(self)]
        sites.check(self, scheme_of(self.config), found[0].n_layers if found else self.config.num_hidden_layers)
        return super().save_pretrained(*args, **kwargs)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _blank, (model_class, self.lns_made_of), vars(self)


def _blank(make: Callable[[Any], Any], stock: Any) -> Any:
    kind = make(stock)
    return kind.__new__(kind)


@functools.cache
def config_class(stock: Any) -> Any:
    """The config class of ``lns_<model_type>``; one for each of transformers' own."""
    members = {"model_type": PREFIX + stock.model_type, "lns_made_of": stock, "__module__": stock.__module__}
    return type(stock)(f"LNS{stock.__name__}", (SchemeConfig, stock), members)


@functools.cache
def model_class(stock: Any) -> Any:
    """The model class of ours for one of transformers' own, in whose module transformers looks things up."""
    members = {"lns_made_of": stock, "__module__": stock.__module__, "config_class": config_class(stock.config_class)}
    made = type(stock)(f"LNS{stock.__name__}", (SchemeModel, stock), members)
    # Where TRL looks for the class that config.json names, and transformers 5 for what output_hidden_states= records.
    setattr(importlib.import_module("transformers"), made.__name__, made)
    registry = getattr(sys.modules.get("transformers.modeling_utils"), "_CAN_RECORD_REGISTRY", None)
    if registry is not None:
        dict.__setitem__(registry, str(made), stock._can_record_outputs)
    return made


def scheme_of(config: Any) -> Scheme:
    """The scheme of a config of ours; Pre-LN for any other."""
    return parse(config.lns) if isinstance(config, SchemeConfig) else PRE_LN


def in_words(scheme: Scheme) -> str:
    """What a user does to run ``scheme``."""
    return "a stock class" if scheme.is_pre_ln else f'an Auto class, without config=, whose config says lns="{scheme}"'


def saved_scheme(name: Any, **kwargs: Any) -> Scheme | None:
    """The scheme in the ``config.json`` of a folder or of a name on the hub; None if there is none to be read."""
    from transformers import PretrainedConfig

    known = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
    try:
        values, _ = PretrainedConfig.get_config_dict(name, **{key: kwargs[key] for key in known if key in kwargs})
    except OSError:
        return None
    if not values:  # as transformers 5 says of a folder without the file
        return None
    ours = str(values.get("model_type", "")).startswith(PREFIX)
    return parse(values.get("lns", SchemeConfig.lns)) if ours else PRE_LN


def under_scheme(config: Any, scheme: Scheme, initialization: str = "plain") -> Any:
    """A copy of a stock config that says ``scheme``: what ``AutoModelForCausalLM.from_config`` takes."""
    stock: Any = type(config)
    made = copy.deepcopy(config)
    made.__class__ = config_class(stock)
    made.lns = str(scheme)
    if initialization != "plain":
        made.lns_initialization = initialization
    return made


def convert(model: Any) -> None:
    """Make ``model`` and the models of the same config inside it (a head's base model) classes of ours, in place."""
    from transformers import PreTrainedModel

    for module in model.modules():
        same = isinstance(module, PreTrainedModel) and module.config is model.config
        if same and not isinstance(module, SchemeModel):
            kind: Any = type(module)
            module.__class__ = model_class(kind)


def measurable(model: nn.Module) -> bool:
    """Whether its weights are here and are not quantized."""
    return all(p.is_floating_point() and not p.is_meta and p.numel() for p in model.parameters())


def measure(
    model: Any, scheme: Scheme, blocks: Any = None, example: Any = None, *, initialization: str | None = None
) -> None:
    """Find the norms, scale them or measure them again, note them in the config, and say so.

    :param initialization: of freshly drawn weights that are here already, ``plain`` or ``upstream``.
    """
    if getattr(model.config, "add_cross_attention", False):
        raise LNSConfigError(f"{type(model).__name__} with cross-attention has a third sub-layer that no scheme names.")
    found = anything.locate(model, anything.forward(model, example or usual_example(model)), blocks)
    names = by_path(model, found)
    if getattr(model.config, "lns_norms", names) != names:
        raise MeasurementError(
            f"{type(model).__name__}: its config names the norms {model.config.lns_norms}, found {names}. This "
            "transformers builds the family in another way: apply the scheme to a stock model of it."
        )
    measured = anything.attach(model, found, scheme, folded)
    model.config.lns_norms = names
    for _, norm, _ in sites.sites(model):
        if hasattr(norm, "kernel_layer_name"):  # `kernelize` would put a kernel there that knows no factor
            type(norm).kernel_layer_name = "LNSScaled"
    words = draw_plain(model, found.blocks) if initialization == "plain" else drawn(model, found.blocks)[0]
    anything.report(model, found, [*measured, *(["initialization"] if words else [])], words)


def usual_example(model: Any) -> dict[str, torch.Tensor] | None:
    """What one short forward takes."""
    config, text = model.config, model.config.get_text_config()
    device = next(model.parameters()).device
    if getattr(model, "main_input_name", "") == "pixel_values":
        size = config.image_size
        shape = (1, config.num_channels, *(size if isinstance(size, (tuple, list)) else (size, size)))
        pixels = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        return {"pixel_values": pixels.to(device, next(model.parameters()).dtype)}
    ids = torch.randint(3, max(4, min(text.vocab_size, 1000)), (1, 8), generator=torch.Generator().manual_seed(0))
    cached = {"use_cache": False} if hasattr(text, "use_cache") else {}
    return {"input_ids": ids.to(device), **cached}  # type: ignore[dict-item]


def by_path(model: Any, found: Blocks) -> dict[str, Any]:
    """``{"layers": ["input_layernorm", "post_attention_layernorm"]}``: the list below the base model, and its norms;
    where the blocks differ, a list of names for each.
    """
    base: nn.Module = model.base_model
    path = next((name for name, module in base.named_modules() if list(module.children()) == found.blocks), None)
    if path is None:
        raise LNSConfigError(f"{type(model).__name__}: expected blocks= to be one of the model's own lists.")
    names = [list(each) for each in found.names]
    return {path: names[0] if all(each == names[0] for each in names) else names}


def by_names(model: Any, norms: dict[str, Any]) -> Blocks:
    """The blocks and norms that a config names. :raises LNSConfigError: they are not there."""
    ((path, names),) = norms.items()
    lists = {name: m for name, m in model.named_modules() if isinstance(m, nn.ModuleList)}
    matching = [name for name in lists if f".{name}".endswith(f".{path}")]
    if not matching:
        raise LNSConfigError(f"{type(model).__name__} has no list of blocks {path!r}, which its config names.")
    name = min(matching, key=len)
    blocks = list(lists[name])
    each = [tuple(row) for row in (names if isinstance(names[0], list) else [names] * len(blocks))]
    weight = next(blocks[0].get_submodule(each[0][0]).parameters(), None)
    width = model.config.get_text_config().hidden_size if weight is None else weight.shape[-1]
    return Blocks(name, blocks, each, int(width))


def drawn(model: Any, blocks: list[nn.Module]) -> tuple[str, list[nn.Parameter]]:
    """How the block's matrices were drawn, in words, and those that were drawn at std / sqrt(2·L).

    The words are empty where nothing can be measured: loaded weights, another draw, no ``initializer_range``.
    """
    std = getattr(model.config.get_text_config(), "initializer_range", None)
    pooled: dict[str, list[nn.Parameter]] = {}
    for block in blocks:
        for name, parameter in block.named_parameters():
            if parameter.dim() == 2 and parameter.is_floating_point() and not parameter.is_meta:
                pooled.setdefault(name, []).append(parameter)
    if not std or not pooled or len(blocks) < 2:
        return "", []
    measured = {n: float(torch.stack([p.detach().float().std() for p in each]).mean()) for n, each in pooled.items()}
    scaled = std / math.sqrt(2.0 * len(blocks))
    low = [name for name, value in measured.items() if 0.9 * scaled < value < 1.1 * scaled]
    if low:
        return "scaled initialization on", [parameter for name in low for parameter in pooled[name]]
    plain = all(0.9 * std < value < 1.1 * std for value in measured.values())
    return ("scaled initialization off" if plain else ""), []


def draw_plain(model: Any, blocks: list[nn.Module]) -> str:
    """Take the depth factor off the freshly drawn matrices of a family that is known to have it; say what is there."""
    words, low = drawn(model, blocks)
    family = model.config.model_type.removeprefix(PREFIX)
    if low and family in _DEPTH_SCALED:
        with torch.no_grad():
            for parameter in low:
                parameter.mul_(math.sqrt(2.0 * len(blocks)))
        words, _ = drawn(model, blocks)
    return words


def plain_initialization(model: Any) -> None:
    """Take the depth factor off a freshly drawn stock model. :raises LNSConfigError: its draw is not known."""
    with anything.undisturbed(model):
        _, blocks, _ = probe.find_blocks(model, anything.forward(model, usual_example(model)))
    if draw_plain(model, blocks) != "scaled initialization off":
        raise LNSConfigError(f"{type(model).__name__}: found weights that were not drawn just now, or by another rule.")
