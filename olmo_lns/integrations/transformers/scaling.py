"""Find the norms of a built transformers model, scale them, and decide about its initialization.

``config.json`` keeps the names of the norms (``lns_norms``), so that a model without weights can be scaled by name.
"""

from __future__ import annotations

import copy
import inspect
from contextlib import contextmanager, nullcontext
from typing import Any, Callable, Iterator

import torch
from torch import nn

from olmo_lns import probe, sites
from olmo_lns.errors import LNSConfigError, MeasurementError
from olmo_lns.initialization import Initialization, make_plain, measure
from olmo_lns.integrations import any_model
from olmo_lns.integrations.any_model import Located
from olmo_lns.integrations.hints import Hints
from olmo_lns.integrations.transformers.model_types import PREFIX
from olmo_lns.integrations.transformers.norms import arithmetic_of
from olmo_lns.measured import Measured
from olmo_lns.processes import same_outcome_on_every_rank
from olmo_lns.schemes import Scheme
from olmo_lns.shadow import device_of, has_no_values

#: Families that draw a residual output projection at std / sqrt(2·L), and the projection's name in its module.
DEPTH_SCALED = {"gpt2": "c_proj", "gpt_bigcode": "c_proj"}


def apply_when_built(model: Any, scheme: Scheme, initialization: str | None) -> None:
    """Scale and measure a model at the end of its constructor or of its loading.

    If its weights are absent or sharded, the norms that its config names are measured alone.

    :param initialization: as in :func:`locate_and_scale`.
    :raises LNSConfigError: if the model cannot run, and its config does not name the norms.
    """
    names = getattr(model.config, "lns_norms", None)
    weights = list(model.parameters())
    can_run = all(p.is_floating_point() and not hasattr(p, "placements") for p in weights)
    if can_run and (names is None or not any(map(has_no_values, weights))):
        model.config.lns_norms = locate_and_scale(model, scheme, Hints(trained=True), initialization=initialization)
    elif names is not None:
        any_model.write_start_up_line(model, located_by_names(model, names), {Measured.OUTPUT, Measured.GRADIENT})
    else:
        raise LNSConfigError(
            f"{type(model).__name__} is quantized or sharded, and its config lacks lns_norms, the names of its norms. "
            "Build the model once without that (from_config on a CPU) and use the config of that model."
        )


def locate(model: Any, hints: Hints, find: Callable[..., Located] = any_model.locate) -> Located:
    """Find the blocks and their norms by a forward without a key-value cache, which a block's second run would extend.

    :param hints: the default of the example is a short text or an image.
    :param find: finds the norms, in this process or in the first one of a launch.
    """
    with _without_cache(model):
        return find(model, _example(model, hints), hints.blocks, hints.norms, arithmetic_of=arithmetic_of)


def _example(model: Any, hints: Hints) -> Any:
    return usual_example(model) if hints.example is None else hints.example


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


def locate_and_scale(
    model: Any,
    scheme: Scheme,
    hints: Hints,
    *,
    initialization: str | None,
    in_every_process: bool = False,
) -> dict[str, Any]:
    """Find the norms, scale them if they are stock, measure the model, and write the start-up line.

    :param initialization: ``plain`` or ``upstream`` for freshly drawn weights, or None for loaded ones.
    :param in_every_process: as in :func:`olmo_lns.integrations.transformers.apply`.
    :returns: the norms, as in :func:`names_by_path`.
    :raises LNSConfigError: if a scheme does not support the model.
    :raises MeasurementError: if the model does not follow the scheme. It is left unchanged.
    """
    if getattr(model.config, "add_cross_attention", False):
        raise LNSConfigError(f"{type(model).__name__} has cross-attention, a third sub-layer that no scheme supports.")
    find = any_model.locate_on_first_rank if in_every_process else any_model.locate
    located = locate(model, hints, find)
    names = names_by_path(model, located)
    if getattr(model.config, "lns_norms", names) != names:
        raise MeasurementError(
            f"{type(model).__name__}: its config names the norms {model.config.lns_norms}, but the model has {names}. "
            "This version of transformers builds the family in another way. Apply the scheme to a stock model."
        )
    with sites.undo_on_failure(model), same_outcome_on_every_rank() if in_every_process else nullcontext():
        part = any_model.why_trained_of(model, located)
        measured = any_model.scale_norms(model, located, scheme, arithmetic_of, why_trained=part, trained=hints.trained)
        with _without_cache(model):
            any_model.check_without_hooks(model, located, _example(model, hints))
        found, is_removed = decide_initialization(model, located, initialization, part)
    if is_removed:
        make_plain(model, found)
        found = measure(model)
    keeps = "upstream" in (initialization, getattr(model.config, "lns_initialization", ""))
    text = f"scaled initialization on ({found.values})" if found and found.is_scaled and keeps else str(found or "")
    for each in sites.in_model(model):
        if hasattr(each.module, "kernel_layer_name"):  # `kernelize` would insert a kernel without the factor
            type(each.module).kernel_layer_name = "LNSScaled"
    any_model.write_start_up_line(model, located, measured, text)
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


def names_by_path(model: Any, located: Located) -> dict[str, Any]:
    """Return the path of the list of blocks -> the names of the norms in a block, or one list of names for each block.

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


def located_by_names(model: Any, norms: dict[str, Any]) -> Located:
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
    return Located(
        path=path,
        blocks=tuple(blocks),
        norms=paths,
        shapes=((),) * len(paths),
        width=int(width),
        sites_from="the config",
    )


def decide_initialization(
    model: Any, located: Located, initialization: str | None, why_trained: str
) -> tuple[Initialization | None, bool]:
    """Measure the initialization of fresh weights, and decide whether their depth factor is removed.

    The factor is removed if the family's own initialization draws it. Any other factor is the user's, and is kept.

    :param initialization: ``plain`` removes the factor, and ``upstream`` keeps it. None means that the weights were
        loaded.
    :param why_trained: as in :func:`olmo_lns.integrations.any_model.scale_norms`.
    :returns: the measured initialization, or None for trained weights, and true if the factor is to be removed.
    :raises MeasurementError: if the weights follow another rule, although the family is known to have the factor.
    """
    if why_trained:  # such as weights that load_state_dict filled
        return None, False
    found = measure(model)
    is_known = model.config.model_type.removeprefix(PREFIX) in DEPTH_SCALED
    if initialization == "plain" and found.rule == "" and is_known and _rule_of_family(model, located) == "":
        raise MeasurementError(
            f"{type(model).__name__}: the residual output projections are drawn by a rule that olmo-lns does not know "
            f"({found.values}). Expected 1 or 1/sqrt(2L) times the standard deviation of the others. To keep the "
            "initialization of this version of transformers, call olmo_lns.integrations.transformers.apply(model, "
            'initialization="upstream").'
        )
    keeps = getattr(model.config, "lns_initialization", "") == "upstream" or initialization != "plain"
    return found, found.is_scaled and not keeps and found.rule == _rule_of_family(model, located)


def _rule_of_family(model: Any, located: Located) -> str | None:
    """Return the rule by which the family draws its residual output projections, measured on copies of two blocks."""
    draw = getattr(type(model), "lns_made_of", None) or type(model)
    blocks = located.blocks_of(model)
    copies = nn.ModuleList(copy.deepcopy(block) for block in dict.fromkeys((blocks[0], blocks[-1])))
    with any_model.undisturbed(model):  # the launch keeps its random state
        copies.apply(lambda module: draw._init_weights(model, module))
    return measure(copies).rule
