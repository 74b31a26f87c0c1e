"""Scale and measure the two norms before attention and MLP in each block of a built model.

| spec                       | before attention                              | before the MLP            |
|----------------------------|-----------------------------------------------|---------------------------|
| TE, dense                  | inside ``self_attention.linear_qkv``          | inside ``mlp.linear_fc1`` |
| TE, MoE                    | inside ``self_attention.linear_qkv``          | ``pre_mlp_layernorm``     |
| TE, MLA                    | ``input_layernorm``                           | inside ``mlp.linear_fc1`` |
| MLA, fused down projection | inside ``self_attention.linear_qkv_down_proj``| inside ``mlp.linear_fc1`` |
| local                      | ``input_layernorm``                           | ``pre_mlp_layernorm``     |

Other norms are not scaled. These are the norms of q and k (also those inside of MLA's ``linear_q_up_proj`` and
``linear_kv_up_proj``), the final norm, and the norms around an MTP module.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Callable

import torch
from torch import nn

from olmo_lns import records, sites, start_up_line
from olmo_lns.errors import LNSConfigError, MeasurementError
from olmo_lns.initialization import check_drawn, matrices_of, why_trained
from olmo_lns.integrations import any_model
from olmo_lns.integrations.megatron import norms
from olmo_lns.integrations.megatron.configs import NORM_NOT_CALLED, check_config
from olmo_lns.integrations.megatron.flags import MegatronFlags
from olmo_lns.integrations.megatron.language_models import LANGUAGE_MODELS
from olmo_lns.integrations.megatron.module_names import LAYER
from olmo_lns.integrations.megatron.printing import print_once
from olmo_lns.measured import Measured
from olmo_lns.schemes import SUB_LAYERS

#: Modules of a layer that a Pre-LN block does not have: cross attention, and norms other than the two before
#: attention and MLP.
_UNSUPPORTED_MODULES = re.compile(
    rf"^cross_attention$|^(?!({'|'.join(names.norm for names in LAYER.values())})$)[^.]*norm[^.]*$"
    rf"|({'|'.join(names.output for names in LAYER.values())})\..*norm"
)
#: The names of the residual output projections end in this way.
_OUTPUT_WEIGHTS = re.compile(
    rf"({'|'.join(names.output for names in LAYER.values())}|fc2_latent_proj)\.weight\d*$|experts\.weight2$"
)


def layers_of(module: nn.Module) -> list[Any]:
    """Return all ``TransformerLayer``s in ``module``, including ``module`` itself."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    return [child for child in module.modules() if isinstance(child, TransformerLayer)]


def models_in(module: nn.Module) -> list[Any]:
    """Return the language models in ``module``, without other towers. If there are none, return ``module`` itself.

    :raises LNSConfigError: if ``module`` is wrapped or compiled.
    """
    any_model.refuse_wrappers(module)
    names = set(LANGUAGE_MODELS.values())
    models = [child for child in module.modules() if {kind.__name__ for kind in type(child).__mro__} & names]
    return models or [module]


@dataclass(frozen=True)
class PlacedNorm:
    """A norm before attention or MLP.

    :param module: the norm, or the linear layer that contains it.
    :param block: number of its block in the whole model, from 1.
    :param sub_layer: ``attn`` or ``ff``.
    """

    module: nn.Module
    block: int
    sub_layer: str


@dataclass(frozen=True)
class Placed:
    """The norms of a model, or of a part of one, that get a factor.

    :param norms: the norms in order. A pipeline stage may have none.
    :param n_layers: number of blocks of the whole model.
    :param config: the ``TransformerConfig``.
    """

    norms: list[PlacedNorm]
    n_layers: int
    config: Any


def attach_to_new(model: Any, flags: MegatronFlags) -> None:
    """Scale and measure the norms of a model at the end of its constructor, and print the start-up line.

    The constructor has just drawn the weights under ``flags``, so their initialization is measured as well.

    :raises LNSConfigError: if LayerNorm Scaling does not support a layer or a setting. The model is left unchanged.
    :raises MeasurementError: if a norm or the initialization is measured to be wrong. The model is left unchanged.
    """
    placed = _place_norms(model)
    with sites.undo_on_failure(model):
        measured = _scale(placed, flags) | check_initialization(model, placed.config)
    initialization = "scaled initialization kept (std/sqrt(2L) for output projections)"
    if flags.scaled_init_off:
        width = ", MuP's width factor kept" if getattr(placed.config, "use_mup", False) else ""
        initialization = f"scaled initialization off (output projections: init_method{width})"
    _write_start_up_line(model, placed, measured, initialization)


def attach_to_built(model: Any, flags: MegatronFlags, *, trained: bool | None = None) -> int:
    """Scale and measure the norms of a model that is built already, and print the start-up line.

    :param model: a language model, or a part of one.
    :param trained: as in :func:`olmo_lns.apply`.
    :returns: the number of scaled norms.
    :raises LNSConfigError: if LayerNorm Scaling does not support a layer or a setting. The model is left unchanged.
    :raises CheckpointMismatchError: if the weights were trained without a factor.
    :raises MeasurementError: if a norm is measured to be wrong. The model is left unchanged.
    """
    placed = _place_norms(model)
    by_sub_layer = {name: [each.module for each in placed.norms if each.sub_layer == name] for name in SUB_LAYERS}
    part = why_trained(by_sub_layer, matrices_of(layers_of(model)))
    records.require_untrained(part, flags.scheme, source=type(model).__name__, trained=trained)
    with sites.undo_on_failure(model):
        measured = _scale(placed, flags)
    _write_start_up_line(
        model, placed, measured, "" if part or trained else describe_initialization(model, placed.config)
    )
    return len(placed.norms)


def _place_norms(model: Any) -> Placed:
    """Find the norms before attention and MLP in all blocks of a model, or of a part of one.

    :raises LNSConfigError: if LayerNorm Scaling does not support a layer or a setting.
    :raises MeasurementError: if the blocks are not numbered as expected.
    """
    layers = layers_of(model)
    config = next((m.config for m in (model, *layers) if hasattr(m, "config")), None)
    if config is None or not (layers or hasattr(model, "pre_process")):  # a pipeline stage may have no layer
        raise LNSConfigError(
            f"{type(model).__name__} has no TransformerLayer, so there is nothing to scale. Pass another model."
        )
    check_config(config)
    found = [norm for layer, number in _numbered(model, layers) for norm in _norms_of_layer(layer, number)]
    return Placed(found, _check_numbers(model, config, found), config)


def _scale(placed: Placed, flags: MegatronFlags) -> set[Measured]:
    """Scale and measure the norms, store their sites, and return what was measured of all of them."""
    by_norm: list[frozenset[Measured]] = []
    for norm in placed.norms:
        site = sites.Site(flags.scheme, norm.block, placed.n_layers, norm.sub_layer)
        width = int(placed.config.hidden_size)
        by_norm.append(norms.scale(norm.module, site.plan.norm_scale, where=site, width=width))
        sites.store(norm.module, site)
    measured = set[Measured]().union(*by_norm)
    if len({Measured.GRADIENT in each for each in by_norm}) == 2:  # some norms are fused
        measured = measured - {Measured.GRADIENT} | {Measured.GRADIENT_UNLESS_FUSED}
    return measured


def _write_start_up_line(model: Any, placed: Placed, measured: set[Measured], initialization: str) -> None:
    """Print the start-up line.

    :param initialization: what the line says about the initialization.
    """
    if not placed.norms:
        print_once("LayerNorm Scaling on: no block in this process")
        return
    first, last = placed.norms[0].block, placed.norms[-1].block
    line = start_up_line.compose(
        model,
        placed.n_layers,
        measured=measured,
        local=f"{len(placed.norms)} in this process (blocks {first}-{last})",
        norm=str(getattr(placed.config, "normalization", "")),
        initialization=initialization,
    )
    print_once(line)


def _numbered(model: Any, layers: list[Any]) -> list[tuple[Any, int]]:
    """Return each layer with its number.

    In a model of L layers, the layer of MTP module k has the number L + k. Its attribute ``layer_number`` cannot be
    used, as its meaning differs between versions of Megatron.

    :raises LNSConfigError: if a stack has Mamba or custom layers, or an MTP module has more than one layer.
    """
    numbers = {layer: int(layer.layer_number) for layer in layers}
    for stack in model.modules():
        members: Any = getattr(stack, "layers", ())
        is_list: bool = isinstance(members, nn.ModuleList) and bool(layers_of(members))
        for layer in members if is_list else ():
            if type(layer).__name__ == "MultiTokenPredictionLayer":
                if len(inner_layers := layers_of(layer)) != 1:
                    raise _refuse(
                        layer,
                        f"has {len(inner_layers)} transformer layers, expected one. LayerNorm Scaling does not support "
                        "MTP layers of a hybrid model. Remove --mtp-num-layers",
                    )
                numbers[inner_layers[0]] = layer.config.num_layers + layer.layer_number
            elif layer not in numbers and getattr(layer, "module", None) not in numbers:
                raise _refuse(
                    layer,
                    f"of {type(stack).__name__} is not a TransformerLayer. LayerNorm Scaling supports layers in which "
                    "attention and MLP alternate. In a hybrid model use a pattern that repeats '*-' or '*E'",
                )
    return list(numbers.items())


def _norms_of_layer(layer: Any, number: int) -> list[PlacedNorm]:
    """Return the norms of a layer that get a factor.

    There are two, or one in a hybrid model, whose layers are half a block each.

    :raises LNSConfigError: if the layer has other norms, cross attention, or neither attention nor MLP.
    """
    modules = [name for name, module in layer.named_modules() if not _is_absent(module)]
    other_norms = list(filter(_UNSUPPORTED_MODULES.search, modules))
    if other_norms:
        raise _refuse(
            layer,
            f"has {', '.join(other_norms)}. Expected two norms, before attention and before MLP. Either they are "
            f"called {' and '.join(names.norm for names in LAYER.values())}, or they are fused with a linear layer. "
            "LayerNorm Scaling does not define cross attention and norms after a sub-layer. If this version of "
            "Megatron has renamed a norm, install another version or a newer olmo-lns",
        )
    sub_layers = [name for name, names in LAYER.items() if not _is_absent(getattr(layer, names.module, None))]
    if not sub_layers:
        raise _refuse(layer, "has neither attention nor MLP")
    block = number if len(sub_layers) == 2 else (number + 1) // 2
    return [PlacedNorm(_norm(layer, sub_layer), block, sub_layer) for sub_layer in sub_layers]


def _norm(layer: Any, sub_layer: str) -> nn.Module:
    """Return the norm before a sub-layer.

    :raises LNSConfigError: if there is not exactly one, or the sub-layer does not call it.
    """
    names = LAYER[sub_layer]
    holder = getattr(layer, names.module)
    for module in (holder, *(getattr(holder, linear, None) for linear in names.may_contain_norm)):
        for base in type(module).__mro__:
            if base.__name__.startswith(("TEFusedMLP", "Inference")):
                raise _refuse(
                    layer, f"has a {base.__name__} in its {names.module}, and {NORM_NOT_CALLED}. Use another spec"
                )
    candidates = {f"{names.module}.{linear}": getattr(holder, linear, None) for linear in names.may_contain_norm}
    present: dict[str, Any] = {path: module for path, module in candidates.items() if norms.is_fused(module)}
    if not _is_absent(standalone := getattr(layer, names.norm, None)):
        present[names.norm] = standalone
    if len(present) != 1:
        raise _refuse(
            layer,
            f"has {len(present)} norms before its {names.module}, which is a {type(holder).__name__}: "
            f"{', '.join(present) or 'none'}. Expected exactly one of {', '.join((names.norm, *candidates))}",
        )
    return next(iter(present.values()))


def _check_numbers(model: Any, config: Any, placed: list[PlacedNorm]) -> int:
    """Check the numbers of the blocks, and return the number of blocks of the whole model.

    :param placed: the norms of this pipeline stage.
    :raises MeasurementError: if the norms do not alternate between attention and MLP, or the blocks are not numbered
        consecutively from 1 over the whole model.
    """
    is_hybrid = len(placed) < 2 * len(layers_of(model))  # each layer is half a block
    last = int(config.num_layers) * (1 if is_hybrid else 2)
    indices = [2 * norm.block - (norm.sub_layer == "attn") for norm in placed]
    layer_numbers = [int(layer.layer_number) for layer in layers_of(model)]
    if not indices:
        problem = ""
    elif is_hybrid and indices != layer_numbers:
        problem = (
            "In a hybrid model layer 2l - 1 must be attention of block l, and layer 2l its MLP. The layers here have "
            f"the numbers {', '.join(map(str, layer_numbers))}."
        )
    else:
        problem = _numbering_problem(model, config, indices, last)
    if problem:
        raise MeasurementError(
            f"{type(model).__name__}: the norms found in this pipeline stage belong to "
            f"{[f'{norm.block} {norm.sub_layer}' for norm in placed]}. {problem} Expected norms of attention and MLP "
            f"in turn, with global block numbers from 1 to {last / 2:g}. LayerNorm Scaling supports plain "
            "transformers, and hybrid models whose pattern repeats '*-' or '*E'. Use such a model, or remove the flag."
        )
    return last // 2


def _numbering_problem(model: Any, config: Any, indices: list[int], last: int) -> str:
    """Return the reason why the norms of a pipeline stage are not those of consecutive blocks, or ``""``.

    :param indices: number of each norm in the whole model, from 1. Attention of block l has 2l - 1, and its MLP has 2l.
    :param last: number of the last norm of the whole model, without those of MTP modules.
    """
    first = indices[0]
    if indices != list(range(first, first + len(indices))):
        return "One of them is missing, or they are in another order."
    if first < 1:
        return "The blocks are numbered from 0."
    if last % 2 == 1:
        return "The model has an odd number of attention and MLP layers, so its last block lacks one."
    if not hasattr(model, "pre_process"):
        return ""
    # With these layouts the first stage may have only the embedding. Block 1 is in the second stage then.
    layouts = ("pipeline_model_parallel_layout", "account_for_embedding_in_pipeline_split")
    empty_first = any(getattr(config, name, None) for name in layouts)
    if model.pre_process and first != 1:
        return "This is the first stage, but it does not begin with attention of block 1."
    if not model.pre_process and first == 1 and not empty_first:
        return "This is a later stage, but it begins with block 1."
    mtps = [module for module in model.modules() if type(module).__name__ == "MultiTokenPredictionLayer"]
    if model.post_process and indices[-1] != last + 2 * len(mtps):
        return "This is the last stage, but it does not end with the last block."
    return ""


def _is_absent(module: Any) -> bool:
    return module is None or type(module).__name__ in ("Identity", "IdentityOp", "IdentityFuncOp")


def _refuse(layer: Any, problem: str) -> LNSConfigError:
    return LNSConfigError(f"{type(layer).__name__} {getattr(layer, 'layer_number', '?')} {problem}.")


# --- initialization -------------------------------------------------------------------------------------------------


def check_initialization(model: Any, config: Any) -> set[Measured]:
    """Check the initialization of the residual output projections.

    :returns: what was measured. It is empty if Megatron did not initialize the weights.
    :raises MeasurementError: if a standard deviation is not the expected one. The message gives both.
    """
    init = config.output_layer_init_method
    if not getattr(config, "perform_initialization", True) or not layers_of(model):
        return set()
    std, measured = _std(init), False
    for layer in layers_of(model) if std else []:
        weights = {name: weight for name, weight in layer.named_parameters() if _OUTPUT_WEIGHTS.search(name)}
        where = f"block {getattr(layer, 'layer_number', '?')}"
        for names in LAYER.values():
            module = getattr(layer, names.module, None)
            if not _is_absent(module) and not any(name.startswith(names.module) for name in weights):
                raise MeasurementError(f"{where}: its {names.module} has no {names.output}. Expected one.")
        measured |= check_drawn(weights, std, where=where)
    return {Measured.INITIALIZATION if measured else Measured.INITIALIZATION_IN_CONFIG}


def describe_initialization(model: Any, config: Any) -> str:
    """Return what the start-up line says about the fresh weights of a model that was built without the scheme."""
    init, plain = config.output_layer_init_method, config.init_method
    std, others = (_std(each) if each is not None else 0.0 for each in (init, plain))
    weights = [(name, weight) for name, weight in model.named_parameters() if _OUTPUT_WEIGHTS.search(name)]
    try:
        measured = [check_drawn({name: weight}, std, where=name) for name, weight in weights] if std and others else []
    except MeasurementError:
        return "initialization not changed"
    if not any(measured):
        return "initialization not changed"
    if math.isclose(std, others, rel_tol=0.1):
        return "scaled initialization off"
    return (
        f"scaled initialization found (output projections {std:.2g}, others {others:.2g}): to remove it, apply to the "
        "TransformerConfig before the model is built"
    )


def _std(init: Callable[[torch.Tensor], object]) -> float:
    """Return the standard deviation of ``init``, or 0 if it depends on the shape of the matrix, as with Xavier."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        small, large = (torch.zeros(64, width, device="cpu") for width in (64, 256))
        init(small), init(large)
    std = float(large.std())
    return std if abs(float(small.std()) / std - 1) < 0.1 else 0.0
