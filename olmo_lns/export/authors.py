"""LLaMA checkpoints of the paper's authors (github.com/lmsdss/LayerNorm-Scaling) as stock Llama.

Their training script saves a transformers folder (config.json, pytorch_model.bin) of a patched
``modeling_llama`` that multiplies both norms of layer ``i`` by ``1/sqrt(i+1)``. Nothing in the
folder says so: a stock Llama loads it and runs without the factor. Saying ``--source authors`` is
saying that it was trained with ``NORM_TYPE=LNS``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Mapping

import torch

from olmo_lns.checkpoints.architecture import Architecture
from olmo_lns.checkpoints.shards import read_weights
from olmo_lns.checkpoints.tensors import LazyTensor, check_depth, check_shapes
from olmo_lns.errors import LNSConfigError, one_line
from olmo_lns.export import huggingface
from olmo_lns.export.fold import Factor, scaled
from olmo_lns.export.options import HF, Options, Source, Target
from olmo_lns.export.reference import hooked_llama
from olmo_lns.record import Record
from olmo_lns.schemes import DEFAULT_EXPONENT, LNS, Scheme, lns_scale

__all__ = ["Authors"]


class Authors(Source):
    """Their files say nothing about the norms, so they are never recognised."""

    name = "authors"
    kind = "the paper's LLaMA"
    formats = (HF,)

    def recognises(self, folder: Path) -> bool:
        return False

    def fold(self, folder: Path, options: Options) -> Target:
        config, model, weights = _opened(folder)
        exponent = DEFAULT_EXPONENT if options.exponent is None else options.exponent
        factors: dict[str, Factor] = {
            f"{name}.weight": lns_scale(index + 1, exponent=exponent)
            for index in range(model.n_layers)
            for name in huggingface.llama_names(index).values()
        }
        values = huggingface.transformers_config(model)
        values |= huggingface.special_tokens(config.get("eos_token_id"), config.get("pad_token_id"), model.embeddings)
        stock = huggingface.Stock(
            values | {"bos_token_id": config.get("bos_token_id")},
            scaled(weights, factors, options.rounding, options.dtype),
            "the authors' LLaMA with the factor 1/sqrt(i+1) of layer i inside its norms. Their files do not say which "
            "NORM_TYPE they were trained with: LNS is taken on your word",
            str(folder) if any(folder.glob("tokenizer*")) else None,
            folder,
        )
        record = Record(Scheme.of("lns", exponent=exponent), "rms", "plain", folded=True)
        return huggingface.export_target(stock, record, options)

    def model(self, folder: Path, exported: Record | None = None) -> Any:
        _, model, weights = _opened(folder)
        return hooked_llama(model, weights, scheme=exported.scheme if exported and exported.folded else LNS)


def _opened(folder: Path) -> tuple[dict[str, Any], Architecture, dict[str, LazyTensor]]:
    """Their config, their model, and its weights as they are, in transformers' names.

    :raises LNSConfigError: not their layout, or damaged.
    """
    config = _read_config(folder / "config.json")
    model = _architecture(config, folder)
    # RoPE's frequencies, which older transformers saved too, are left out.
    weights = {n: tensor for n, tensor in read_weights(folder).items() if not n.endswith("rotary_emb.inv_freq")}
    check_depth(model.n_layers, weights, folder)
    check_shapes(weights, _llama_shapes(model), folder)
    return config, model, weights


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise LNSConfigError(f"{path} cannot be read: {one_line(error)}") from None
    if not isinstance(config, dict) or config.get("model_type") != "llama":
        raise LNSConfigError(f"{path} is not the config of a Llama")
    if config.get("lns"):
        raise LNSConfigError(f"{path} says lns: {config['lns']!r}: the factor is inside the weights already")
    return config


def _architecture(config: Mapping[str, Any], source: Path) -> Architecture:
    try:
        heads = int(config["num_attention_heads"])
        model = Architecture(
            d_model=int(config["hidden_size"]),
            n_heads=heads,
            n_kv_heads=int(config.get("num_key_value_heads") or heads),
            n_layers=int(config["num_hidden_layers"]),
            mlp_hidden_size=2 * int(config["intermediate_size"]),
            rope=True,
            rope_theta=float(config.get("rope_theta") or 10_000),
            layer_norm_type="rms",
            layer_norm_eps=float(config["rms_norm_eps"]),
            max_sequence_length=int(config.get("max_position_embeddings") or 2048),
            include_bias=False,
            vocab_size=int(config["vocab_size"]),
            embedding_size=int(config["vocab_size"]),
            weight_tying=bool(config.get("tie_word_embeddings", False)),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise LNSConfigError(f"{source}/config.json: missing or wrong value: {error!r}") from None
    return model.checked(source / "config.json")


def _llama_shapes(model: Architecture) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the same model in transformers."""
    empty = {
        name: LazyTensor(shape, torch.float32, lambda shape=shape: torch.empty(shape))  # type: ignore[misc]
        for name, shape in model.shapes().items()
    }
    return {name: tensor.shape for name, tensor in huggingface.to_huggingface(model, empty).items()}
