"""The stock transformers class that computes exactly what an OLMo model computes, if there is one.

=================  =======================================================================
LlamaForCausalLM   RMSNorm with or without gain (without: unit gains are written), biases
OlmoForCausalLM    LayerNorm without gain and bias, eps 1e-5 (a constant of that class), clip_qkv
StableLmForCausalLM  LayerNorm with gain, with or without bias
=================  =======================================================================

All three are SwiGLU decoders with RoPE, in the layout that OLMo uses: ``att_proj`` is [q, k, v],
``ff_proj`` is [up, gate], and the rotation pairs element i with i + head_dim/2. Then how every such folder is written,
as a stock model or, factors outside the weights, as one of ours.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Mapping

import torch

from olmo_lns import __version__
from olmo_lns.checkpoints.architecture import Architecture
from olmo_lns.checkpoints.records import record_in
from olmo_lns.checkpoints.shards import write_safetensors
from olmo_lns.checkpoints.tensors import LazyTensor, split_rows
from olmo_lns.errors import LNSConfigError
from olmo_lns.export import tokenizer
from olmo_lns.export.fold import Rounding
from olmo_lns.export.options import Options, Target
from olmo_lns.norm.dtypes import DTYPES
from olmo_lns.record import Record

__all__ = [
    "Stock",
    "choose_class",
    "export_target",
    "llama_names",
    "of_olmo",
    "problems",
    "projections",
    "special_tokens",
    "to_huggingface",
    "train_target",
    "transformers_config",
    "write_card",
]

_MODEL_TYPES = {"LlamaForCausalLM": "llama", "OlmoForCausalLM": "olmo", "StableLmForCausalLM": "stablelm"}
#: OlmoLayerNorm's eps is a constant in its forward.
_OLMO_EPS = 1e-5


def choose_class(model: Architecture) -> tuple[str, str]:
    """Name of the class and why it.

    :raises LNSConfigError: no class computes the same, with everything that stands in the way.
    """
    found = problems(model)
    rms = model.base_norm == "rms"
    if rms:
        name, why = "LlamaForCausalLM", "RMSNorm, SwiGLU and RoPE are Llama's"
        found += ["biases in RMSNorm"] * model.norm_bias + ["clip_qkv (only Olmo clips)"] * bool(model.clip_qkv)
    elif not model.layer_norm_with_affine and model.layer_norm_eps == _OLMO_EPS:
        name, why = "OlmoForCausalLM", "its LayerNorm has no gain and no bias, like this model's"
        found += ["biases in the feed-forward layers (Olmo has none)"] * model.include_bias
    else:
        name, why = "StableLmForCausalLM", "its LayerNorm has a gain and a bias; Llama's and Olmo's have not"
        if not model.layer_norm_with_affine:
            why = f"Olmo's LayerNorm has eps {_OLMO_EPS:g}, not {model.layer_norm_eps:g}; unit gains are written"
        found += ["biases in the linear layers (StableLm has none)"] * model.include_bias
        found += ["clip_qkv (only Olmo clips)"] * bool(model.clip_qkv)
    if found:
        raise LNSConfigError(
            f"no stock transformers class computes exactly this model (nearest: {name}): {'; '.join(found)}. "
            "Use --format olmo, which keeps the architecture"
        )
    return name, why


def problems(model: Architecture) -> list[str]:
    """What no class of this module can do."""
    checks = {
        "norm_after (post-norm blocks)": model.norm_after,
        "ALiBi instead of RoPE": model.alibi,
        "learned position embeddings instead of RoPE": not (model.alibi or model.rope),
        "layer norm on the embeddings": model.embedding_layer_norm,
        "layer norm on queries and keys over all heads (attention_layer_norm)": model.attention_layer_norm,
        "scaled logits (scale_logits)": model.scale_logits,
        f"activation {model.activation_type} instead of SwiGLU": model.activation_type != "swiglu",
        "a bias in the output layer (include_bias without weight tying)": model.include_bias and not model.weight_tying,
        f"block type {model.block_type}": model.block_type not in ("sequential", "llama"),
        f"layer norm type {model.layer_norm_type}": model.base_norm not in ("rms", "default", "low_precision"),
    }
    return [problem for problem, found in checks.items() if found]


def llama_names(index: int) -> dict[str, str]:
    """Our names of the two block norms of block ``index`` (0-based) -> transformers' names."""
    layer = f"model.layers.{index}"
    return {"attn_norm": f"{layer}.input_layernorm", "ff_norm": f"{layer}.post_attention_layernorm"}


def to_huggingface(model: Architecture, weights: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """OLMo's (already folded) weights under transformers' names, fused projections taken apart."""
    name, _ = choose_class(model)
    result = {"model.embed_tokens.weight": weights["transformer.wte.weight"]}
    for index in range(model.n_layers):
        block, layer = f"transformer.blocks.{index}", f"model.layers.{index}"
        for ours, theirs in llama_names(index).items():
            result.update(_norm(model, name, weights, f"{block}.{ours}", theirs))
        result.update({f"{layer}.{key}": tensor for key, tensor in projections(model, weights, index).items()})
    result.update(_norm(model, name, weights, "transformer.ln_f", "model.norm"))
    if not model.weight_tying:
        result["lm_head.weight"] = weights["transformer.ff_out.weight"]
    return result


def projections(model: Architecture, weights: Mapping[str, LazyTensor], index: int) -> dict[str, LazyTensor]:
    """The matrices and biases of block ``index`` (0-based) under transformers' names within a layer."""
    block, result = f"transformer.blocks.{index}", {}
    for kind in ("weight", "bias") if model.include_bias else ("weight",):
        for part, tensor in _qkv(model, weights, block, kind).items():
            result[f"self_attn.{part}.{kind}"] = tensor
        result[f"self_attn.o_proj.{kind}"] = weights[f"{block}.attn_out.{kind}"]
        fused = weights[f"{block}.ff_proj.{kind}"]
        for part, tensor in zip(("up_proj", "gate_proj"), split_rows(fused, [model.ff_out_inner] * 2), strict=True):
            result[f"mlp.{part}.{kind}"] = tensor
        result[f"mlp.down_proj.{kind}"] = weights[f"{block}.ff_out.{kind}"]
    return result


def _qkv(model: Architecture, weights: Mapping[str, LazyTensor], block: str, kind: str) -> dict[str, LazyTensor]:
    names = ("q_proj", "k_proj", "v_proj")
    if model.block_type == "llama":
        return {name: weights[f"{block}.{name}.{kind}"] for name in names}
    kv = model.kv_heads * model.head_dim
    parts = split_rows(weights[f"{block}.att_proj.{kind}"], (model.d_model, kv, kv))
    return dict(zip(names, parts, strict=True))


def _norm(
    model: Architecture, class_name: str, weights: Mapping[str, LazyTensor], ours: str, theirs: str
) -> dict[str, LazyTensor]:
    """Gain and bias that the class has: the model's, or ones and zeros."""
    if class_name == "OlmoForCausalLM":
        return {}
    shape, dtype = (model.d_model,), weights["transformer.wte.weight"].dtype
    parts = {"weight": torch.ones} | ({"bias": torch.zeros} if class_name == "StableLmForCausalLM" else {})
    constants = {part: LazyTensor(shape, dtype, partial(make, shape, dtype=dtype)) for part, make in parts.items()}
    return {f"{theirs}.{part}": weights.get(f"{ours}.{part}", constant) for part, constant in constants.items()}


def transformers_config(model: Architecture) -> dict[str, Any]:
    """``config.json`` but for the dtype, in keys that transformers 4 and 5, vLLM and llama.cpp read."""
    name, _ = choose_class(model)
    config: dict[str, Any] = {
        "architectures": [name],
        "model_type": _MODEL_TYPES[name],
        "vocab_size": model.embeddings,
        "hidden_size": model.d_model,
        "intermediate_size": model.ff_out_inner,
        "num_hidden_layers": model.n_layers,
        "num_attention_heads": model.n_heads,
        "num_key_value_heads": model.kv_heads,
        "hidden_act": "silu",
        "max_position_embeddings": model.max_sequence_length,
        "initializer_range": model.init_std,
        "rope_theta": float(model.rope_theta),
        "attention_dropout": 0.0,
        "tie_word_embeddings": model.weight_tying,
        "use_cache": True,
        **special_tokens(model.eos_token_id, model.pad_token_id, model.embeddings),
    }
    if name == "LlamaForCausalLM":
        config |= {"rms_norm_eps": model.layer_norm_eps, "attention_bias": model.include_bias}
        config |= {"mlp_bias": model.include_bias, "head_dim": model.head_dim}
    elif name == "OlmoForCausalLM":
        config |= {"attention_bias": False, "clip_qkv": model.clip_qkv}
    else:
        config |= {"layer_norm_eps": model.layer_norm_eps, "use_qkv_bias": False, "partial_rotary_factor": 1.0}
        config |= {"qk_layernorm": False, "use_parallel_residual": False, "hidden_dropout": 0.0}
    return config


def special_tokens(eos: Any, pad: Any, vocabulary: int) -> dict[str, Any]:
    """Token ids for config and generation config; an id outside the vocabulary is left out."""
    ids = {"bos_token_id": None, "eos_token_id": eos, "pad_token_id": pad}
    return {role: i if isinstance(i, int) and 0 <= i < vocabulary else None for role, i in ids.items()}


@dataclass(frozen=True)
class Stock:
    """A model that a stock class computes.

    :param config: of that class, without dtype and record. :param weights: by transformers' names.
    :param why: that class computes it. :param tokenizer: its own, where it names one.
    :param beside: the checkpoint.
    """

    config: dict[str, Any]
    weights: Mapping[str, LazyTensor]
    why: str
    tokenizer: str | None
    beside: Path

    @property
    def name(self) -> str:
        """Of the class."""
        return str(self.config["architectures"][0])

    def write_tokenizer(self, out: Path, options: Options) -> str:
        return tokenizer.write_tokenizer(
            out, options.tokenizer or self.tokenizer, config=self.config, beside=self.beside
        )

    def write(self, out: Path, options: Options, record: Mapping[str, Any]) -> None:
        """Weights, generation_config.json and, last, config.json.

        :raises LNSConfigError: a dtype that weights are not written in.
        """
        config = self.config | {"torch_dtype": self.dtype} | dict(record)
        write_safetensors(out, self.weights, options.shard_bytes)
        generation = {k: config.get(k) for k in ("bos_token_id", "eos_token_id", "pad_token_id")} | {"use_cache": True}
        _write_json(out / "generation_config.json", generation)
        _write_json(out / "config.json", config)

    @property
    def dtype(self) -> str:
        """The one to name in the config: that of the embedding. :raises LNSConfigError: none that is written."""
        dtype = self.weights["model.embed_tokens.weight"].dtype
        if dtype not in DTYPES.values():
            raise LNSConfigError(f"the weights are {dtype}: give --dtype fp32, bf16 or fp16")
        return str(dtype).removeprefix("torch.")


def of_olmo(model: Architecture, weights: Mapping[str, LazyTensor], tokenizer: str | None, beside: Path) -> Stock:
    """:param weights: OLMo's names, already folded, or as they were trained.

    :raises LNSConfigError: no class computes this model.
    """
    _, why = choose_class(model)
    return Stock(transformers_config(model), to_huggingface(model, weights), why, tokenizer, beside)


def export_target(stock: Stock, record: Record, options: Options) -> Target:
    """The folder that stock software runs, its factors folded in."""
    # What tells later readers of a config that the factor is inside; stock code keeps and ignores it.
    said: dict[str, Any] = {"lns": "folded", "lns_record": record.as_dict()} if record.folded else {}

    def write(out: Path) -> list[str]:
        lines = [f"{stock.name}: {stock.why}", f"lns: {'folded' if said else 'none (a Pre-LN model)'}"]
        lines.append(stock.write_tokenizer(out, options))
        stock.write(out, options, said)
        return lines

    return Target(write, stock.weights, stock.config)


def train_target(stock: Stock, saved: Record, options: Options) -> Target:
    """A model folder of ours to train on in transformers, its factors outside the weights.

    :param saved: of the checkpoint, from which ``stock`` was unfolded where it was folded.
    :raises LNSConfigError: Pre-LN, or a model or scheme that the transformers integration does not have.
    """
    from olmo_lns.integrations.transformers.families import FAMILIES
    from olmo_lns.integrations.transformers.sites import require_supported

    folder, kind = stock.beside, str(stock.config["model_type"])
    if saved.scheme.is_pre_ln:
        raise LNSConfigError(f"{folder} is Pre-LN: olmo-lns export --format hf makes a stock model of it")
    family = FAMILIES.get(kind)
    if family is None or not family.sub_layers:
        raise LNSConfigError(f"{folder}: becomes a {kind} model, which the transformers integration does not know")
    require_supported(family, saved.scheme, int(stock.config["num_hidden_layers"]))
    record = replace(saved, folded=False, plugin_version=__version__)

    def config() -> Any:
        from olmo_lns.integrations.transformers.configs import config_class

        values = {name: value for name, value in stock.config.items() if name != "model_type"}
        made = config_class(family)(**values, lns_record=record.as_dict())
        made.architectures = [f"LNS{stock.name}"]
        return made

    def write(out: Path) -> list[str]:
        made = config()
        setattr(made, "dtype" if hasattr(made, "dtype") else "torch_dtype", stock.dtype)  # since 4.56
        note = stock.write_tokenizer(out, options)
        stock.write(out, options, {})
        made.save_pretrained(out)
        state = "unfolded: the factors are outside again" if saved.folded else "as trained, factors outside the weights"
        return [f"{made.model_type}: {record}", state, note]

    return Target(write, stock.weights, config().to_dict())


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_card(folder: Path, source: str, rounding: Rounding) -> None:
    """Write README.md beside a finished config.json: what the weights are, how exact they are, how to load them.

    :param source: name of the checkpoint's folder, without its path.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    record = record_in(folder) or Record()
    name = (config.get("architectures") or [config.get("model_type", "?")])[0]
    if record.folded:
        what = (
            f"trained under `{record.scheme}` ({record.scheme.definition.title}); the factor is folded into the weights"
        )
    else:
        what = "a Pre-LN model"
    record_lines = "\n".join(f"| {key} | `{value}` |" for key, value in record.as_dict().items())
    text = f"""---
library_name: transformers
tags: [olmo-lns, {record.scheme.name}]
---

# {source}

`{name}`, {what}. It runs in stock transformers, vLLM and whatever else reads this class; no custom code.

```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(".")  # this folder
```

| | |
|---|---|
| dtype | `{str(config.get("torch_dtype", config.get("dtype", "?"))).removeprefix("torch.")}` |
| blocks | {config.get("num_hidden_layers", "?")} |
| hidden size | {config.get("hidden_size", "?")} |
{record_lines}

{_changes(rounding)} `SHA256SUMS` holds the hash of every file; compare the logits with those of the checkpoint by
`olmo-lns verify CHECKPOINT .`. To train on under the scheme, unfold the checkpoint first: a folded model computes the
same, but its gradients are not those of the scheme.

Written by olmo-lns {__version__}.
"""
    (folder / "README.md").write_text(text, encoding="utf-8")


def _changes(rounding: Rounding) -> str:
    """What was done to the weights, in the dtype they are written in."""
    done = {"multiplied by their block's factor": rounding.multiplied, "written in another dtype": rounding.cast}
    lines = [f"{len(names)} tensors were {what}; " for what, names in done.items() if names]
    return (
        "".join([*lines, f"largest relative rounding error {rounding.worst:.2e}."])
        if lines
        else "No weight was changed."
    )
