"""Scale exactly the two norms in front of attention and MLP of each block of a built model, and measure what was built.

| spec                       | in front of attention                         | in front of the MLP       |
|----------------------------|-----------------------------------------------|---------------------------|
| TE, dense                  | inside ``self_attention.linear_qkv``          | inside ``mlp.linear_fc1`` |
| TE, MoE                    | inside ``self_attention.linear_qkv``          | ``pre_mlp_layernorm``     |
| TE, MLA                    | ``input_layernorm``                           | inside ``mlp.linear_fc1`` |
| MLA, fused down projection | inside ``self_attention.linear_qkv_down_proj``| inside ``mlp.linear_fc1`` |
| local                      | ``input_layernorm``                           | ``pre_mlp_layernorm``     |

Not sites: norms of q and k (also those fused into MLA's ``linear_q_up_proj`` and ``linear_kv_up_proj``), the final
norm, and the norms around an MTP module.
"""

from __future__ import annotations

import os
import re
from typing import Any, Callable

import torch
from torch import nn

from olmo_lns import probe, sites
from olmo_lns.errors import LNSConfigError, MeasurementError
from olmo_lns.integrations.megatron import MODELS, norms
from olmo_lns.integrations.megatron.settings import Settings
from olmo_lns.settings import check as check_environment

#: Sub-layer -> the norm in front of it, the module that computes it, and where a norm is fused into that.
_PLACES = {
    "attn": ("input_layernorm", "self_attention", ("linear_qkv", "linear_qkv_down_proj")),
    "ff": ("pre_mlp_layernorm", "mlp", ("linear_fc1",)),
}
_WORDS = {"attn": "attention", "ff": "MLP"}
_PAST = "it reads the norm's parameters past its forward"
_NO_STREAM = "with hyper-connections there is no single residual stream to scale in"
_NO_DEPTH = "heterogeneous blocks have no common depth"
#: Attribute of the config -> whether its value is refused, and why.
_REFUSED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "use_transformer_engine_op_fuser": (bool, _PAST),
    "inference_fuse_tp_communication": (bool, _PAST),
    "transformer_impl": (lambda found: found == "inference_optimized", _PAST),
    "enable_mhc_connections": (bool, _NO_STREAM),
    "enable_hyper_connections": (bool, _NO_STREAM),
    "heterogeneous_block_specs": (bool, _NO_DEPTH),
    "heterogeneous_layers_config_path": (bool, _NO_DEPTH),
    "batch_invariant_mode": (bool, "its RMSNorm takes the place of TE's forward, which a scaled norm does not run"),
}
#: Residual output projections, by the ends of their weights' names.
_OUTPUT = re.compile(r"(linear_proj|linear_fc2)\.weight\d*$|experts\.weight2$")
_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "TorchFullyShardedDataParallel", "OptimizedModule")
_said: set[str] = set()


def say(text: str) -> None:
    """Print one line, once, as Megatron's ``print_rank_0`` does (its loggers are silent by default)."""
    if int(os.environ.get("RANK", "0")) == 0 and text not in _said:
        _said.add(text)
        print(f"olmo-lns: {text}", flush=True)


def check_config(config: Any) -> None:
    """:raises LNSConfigError: a setting that LayerNorm Scaling cannot be right with."""
    check_environment()
    for name, (is_refused, why) in _REFUSED.items():
        if is_refused(found := getattr(config, name, None)):
            raise LNSConfigError(f"LayerNorm Scaling does not support {name}={found!r}: {why}. Switch one of them off.")


def layers_of(module: nn.Module) -> list[Any]:
    """The ``TransformerLayer``s in ``module``, itself among them."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    return [child for child in module.modules() if isinstance(child, TransformerLayer)]


def models_in(module: nn.Module) -> list[Any]:
    """The language models in ``module``, without the towers beside them; or ``module`` itself.

    :raises LNSConfigError: ``module`` is wrapped or compiled.
    """
    if type(module).__name__ in _WRAPPERS:
        raise LNSConfigError(f"found a {type(module).__name__}: apply first, then wrap or compile the model.")
    found = [child for child in module.modules() if {kind.__name__ for kind in type(child).__mro__} & set(MODELS)]
    return found or [module]


def attach(model: Any, settings: Settings, *, drawn: bool) -> int:
    """Scale and measure the norms of every block of ``model``, and say what was measured.

    :param model: a language model, or a part of one. :param drawn: its weights were just drawn under ``settings``.
    :returns: how many norms were scaled.
    :raises LNSConfigError: a layer or a setting that LayerNorm Scaling does not support; the model is as it was.
    :raises MeasurementError: a norm or a draw measures otherwise than asked; the model is as it was.
    """
    layers = layers_of(model)
    config = next((m.config for m in (model, *layers) if hasattr(m, "config")), None)
    if config is None or not (layers or hasattr(model, "pre_process")):  # a pipeline stage may have no layer
        raise LNSConfigError(f"{type(model).__name__} holds no TransformerLayer: nothing to scale.")
    check_config(config)
    _refuse_other_layers(model)
    try:
        halves = {len(_scale_layer(layer, settings, number)) for layer, number in _numbered(model, layers)}
        _check_numbers(model, config, blocks := int(config.num_layers) // (2 if 1 in halves else 1))
    except Exception:
        sites.restore(model)
        raise
    found = [(site.layer_number, norms.is_fused(module)) for _, module, site in sites.sites(model)]
    if not found:
        say("LayerNorm Scaling on: no block in this process")
        return 0
    measured = ["output"] if all(fused for _, fused in found) else ["output", "gradient"]
    measured += check_initialization(model, config) if drawn else []
    how: dict[str, Any] = {
        "here": f"{len(found)} in this process (blocks {min(found)[0]}-{max(found)[0]})",
        "norm": str(getattr(config, "normalization", "")),
        "initialization": _describe(config, settings.scaled_init_off) if drawn else "weights as they were",
    }
    say(sites.start_up_line(model, blocks, measured=measured, **how))
    return len(found)


def _numbered(model: Any, layers: list[Any]) -> list[tuple[Any, int | None]]:
    """Each layer, and the number of an MTP module's: L + k, since its own means something else in each version."""
    mtps = [child for child in model.modules() if type(child).__name__ == "MultiTokenPredictionLayer"]
    numbers = {id(layer): m.config.num_layers + m.layer_number for m in mtps for layer in layers_of(m)}
    for mtp in mtps:
        if len(layers_of(mtp)) != 1:
            raise LNSConfigError(
                f"MTP layer {mtp.layer_number} holds {len(layers_of(mtp))} transformer layers, expected 1: LayerNorm "
                "Scaling does not support MTP layers of a hybrid model. Drop --mtp-num-layers."
            )
    return [(layer, numbers.get(id(layer))) for layer in layers]


def _refuse_other_layers(model: Any) -> None:
    """:raises LNSConfigError: a stack holds Mamba or custom layers."""
    layers = {id(layer) for layer in layers_of(model)}
    for stack in model.modules():
        stacked = getattr(stack, "layers", None)
        if not isinstance(stacked, nn.ModuleList) or type(stack).__name__ == "MultiTokenPredictionBlock":
            continue
        for layer in stacked:
            inner = getattr(layer, "module", layer)
            if id(layer) not in layers and id(inner) not in layers:
                raise LNSConfigError(
                    f"{type(layer).__name__} {getattr(layer, 'layer_number', '?')} of {type(stack).__name__} is no "
                    "TransformerLayer: LayerNorm Scaling supports attention and MLP in turn (hybrid patterns: '*-' or "
                    "'*E' repeated)."
                )


def _scale_layer(layer: Any, settings: Settings, number: int | None) -> list[str]:
    """Scale the norms of one layer; return its sub-layers: two, or one in a hybrid model."""
    if not _is_absent(getattr(layer, "cross_attention", None)):
        raise _refuse(layer, "has cross attention, a third sub-layer that LayerNorm Scaling does not define")
    found = {
        sub_layer: _site(layer, sub_layer) for sub_layer, (_, holder, _) in _PLACES.items()
        if not _is_absent(getattr(layer, holder, None))
    }  # fmt: skip
    if not found:
        raise _refuse(layer, "has neither attention nor MLP")
    count = int(layer.config.num_layers)
    if len(found) == 1 and count % 2:
        raise _refuse(layer, f"is one of {count} layers of a hybrid pattern, which ends with attention without an MLP")
    if number is None:
        number = int(layer.layer_number)
    if len(found) == 1:
        if number % 2 != (1 if "attn" in found else 0):
            raise _refuse(
                layer,
                f"is layer {number} of a hybrid pattern and holds only {_WORDS[next(iter(found))]}: only the plain "
                "transformer patterns are supported, '*-' or '*E' repeated",
            )
        number, count = (number + 1) // 2, count // 2
    if number < 1:
        raise MeasurementError(f"{type(layer).__name__}: found the block number {number}, expected 1 … {count}.")
    for sub_layer, module in found.items():
        site = sites.Site(settings.scheme, number, count, sub_layer)
        sites.attach(module, site)
        norms.scale(module, site.plan.norm_scale, where=site, width=int(layer.config.hidden_size))
    return list(found)


def _site(layer: Any, sub_layer: str) -> nn.Module:
    norm, holder, fused = _PLACES[sub_layer]
    inner = getattr(layer, holder)
    for module in (inner, *(getattr(inner, name, None) for name in fused)):
        for kind in type(module).__mro__:
            if kind.__name__.startswith(("TEFusedMLP", "Inference")):
                raise _refuse(layer, f"has a {kind.__name__} in its {holder}, and {_PAST}. Use another spec")
    candidates = {f"{holder}.{name}": getattr(inner, name, None) for name in fused}
    found: dict[str, Any] = {path: module for path, module in candidates.items() if norms.is_fused(module)}
    if not _is_absent(standalone := getattr(layer, norm, None)):
        found[norm] = standalone
    if len(found) != 1:
        raise _refuse(
            layer,
            f"has {len(found)} norms in front of its {_WORDS[sub_layer]} ({', '.join(found) or 'none'}; the "
            f"{_WORDS[sub_layer]} is a {type(inner).__name__}), expected exactly one of "
            f"{', '.join((norm, *candidates))}",
        )
    return next(iter(found.values()))


def _check_numbers(model: Any, config: Any, blocks: int) -> None:
    """:raises MeasurementError: numbers of this part of the model that cannot be global, 1 … L, each once."""
    own = [(site.layer_number, site.sub_layer) for _, _, site in sites.sites(model)]
    numbers = sorted({number for number, _ in own if number <= blocks})
    in_a_row = list(range(numbers[0], numbers[-1] + 1)) if numbers else []
    wrong = len(set(own)) != len(own) or numbers != in_a_row
    if numbers and hasattr(model, "pre_process"):
        # Such a first stage may hold the embedding alone, so that block 1 is in the second.
        layouts = ("pipeline_model_parallel_layout", "account_for_embedding_in_pipeline_split")
        empty_first = any(getattr(config, name, None) for name in layouts)
        wrong |= numbers[0] != 1 if model.pre_process else numbers[0] == 1 and not empty_first
        wrong |= bool(model.post_process) and numbers[-1] != blocks
    if wrong:
        raise MeasurementError(
            f"{type(model).__name__}: found norms of the blocks {[n for n, _ in own]}, expected two of each block of "
            f"this pipeline stage, numbered globally from 1 to {blocks}. This Megatron numbers its layers in an "
            "unknown way."
        )


def _is_absent(module: Any) -> bool:
    return module is None or type(module).__name__ in ("IdentityOp", "IdentityFuncOp")


def _refuse(layer: Any, problem: str) -> LNSConfigError:
    return LNSConfigError(f"{type(layer).__name__} {getattr(layer, 'layer_number', '?')} {problem}.")


# --- initialization -------------------------------------------------------------------------------------------------


def check_initialization(model: Any, config: Any) -> list[str]:
    """Check how the residual output projections were drawn; return what was done, in words.

    :raises MeasurementError: found and expected standard deviation.
    """
    init = config.output_layer_init_method
    if not getattr(config, "perform_initialization", True) or not layers_of(model):
        return []
    std, measured = _std(init), False
    for layer in layers_of(model) if std else []:
        weights = {name: weight for name, weight in layer.named_parameters() if _OUTPUT.search(name)}
        measured |= probe.check_drawn(weights, std, where=f"block {getattr(layer, 'layer_number', '?')}")
    return ["initialization"] if measured else ["initialization (read back)"]


def _std(init: Callable[[torch.Tensor], object]) -> float:
    """The standard deviation that ``init`` draws with; 0 where it depends on the matrix's shape (Xavier)."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        small, large = (torch.zeros(64, width, device="cpu") for width in (64, 256))
        init(small), init(large)
    found = float(large.std())
    return found if abs(float(small.std()) / found - 1) < 0.1 else 0.0


def _describe(config: Any, off: bool) -> str:
    """The policy in words, for the log."""
    if not off:
        return "scaled initialization kept (std/sqrt(2L) for output projections)"
    width = ", MuP's width factor kept" if getattr(config, "use_mup", False) else ""
    return f"scaled initialization off (output projections: init_method{width})"
