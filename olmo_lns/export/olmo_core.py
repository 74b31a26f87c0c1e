"""OLMo-core's checkpoints: folded for stock OLMo-core and transformers, unfolded to train on.

What a folded checkpoint names is OLMo-core's own block config, so that it runs where this package is not installed.
The transformers class that computes exactly what an OLMo-core model computes, if there is one:

==================  =================================================================
LlamaForCausalLM    ``default`` blocks (RMSNorm in front, SwiGLU, RoPE) without QK-norm
Qwen3ForCausalLM    the same with QK-norm per head
Olmo2ForCausalLM    ``reordered_norm`` blocks with QK-norm over all heads
==================  =================================================================
"""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Mapping

from olmo_lns import __version__
from olmo_lns.checkpoints.olmo_core import (
    BUFFER,
    DEFAULT_SCALED,
    PREFIX,
    WEIGHTS,
    OLMoCoreCheckpoint,
    block_type,
    is_olmo_core,
)
from olmo_lns.checkpoints.tensors import ChunkFunction, LazyTensor
from olmo_lns.errors import LNSConfigError
from olmo_lns.export import huggingface, tokenizer
from olmo_lns.export.atomic import copy_unread
from olmo_lns.export.fold import Factor, chunk_scaler, fold_record, scaled, unfolded_record
from olmo_lns.export.huggingface import Stock
from olmo_lns.export.moments import moment_functions
from olmo_lns.export.options import HF, OLMO_CORE, Options, Source, Target
from olmo_lns.integrations.olmo_core.checkpoint import CLASS, CONFIG_FILE
from olmo_lns.record import Record

__all__ = ["OLMoCore", "choose_class", "stock_config"]

_STOCK_CLASS = "olmo_core.nn.transformer.config.TransformerBlockConfig"
_OURS = ("scheme", "exponent", "initialization", "scale_router")
_MODEL_AND_OPTIMIZER = (PREFIX, "optim.")
#: Files of OLMo-core's trainer beside the weights; the second marks a checkpoint as complete.
_TRAINER, _COMPLETE = "train", ".metadata.json"
_TYPES = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3", "Olmo2ForCausalLM": "olmo2"}
_RMS = ("rms", "fused_rms", "cute_rms", "qwen_rms")
#: What a config may say without changing what is computed, or is read below.
_READ = {
    "block": {"sequence_mixer", "attention", "feed_forward", "layer_norm", "name", "scheme", "exponent"}
    | {"initialization", "scale_router"},
    "attention": {"name", "n_heads", "n_kv_heads", "head_dim", "bias", "rope", "qk_norm", "use_head_qk_norm"}
    | {"backend", "use_flash", "dtype", "type"},
    "rope": {"name", "theta", "full_precision"},
    "feed_forward": {"name", "hidden_size", "bias", "activation", "dtype"},
    "layer_norm": {"name", "eps", "bias", "elementwise_affine", "full_precision", "dtype"},
}
#: Values of other settings that change nothing.
_NEUTRAL = (None, False, 0.0, 1.0, 1)


class OLMoCore(Source):
    name = "olmo-core"
    kind = "an OLMo-core checkpoint"
    formats = (OLMO_CORE, HF)

    def recognises(self, folder: Path) -> bool:
        return is_olmo_core(folder)

    def fold(self, folder: Path, options: Options) -> Target:
        checkpoint = OLMoCoreCheckpoint.open(folder)
        options.require_exponent(checkpoint.record, folder)
        record, factors = fold_record(checkpoint.record), checkpoint.factors()
        if options.format == HF:
            return huggingface.export_target(_stock(checkpoint, factors, options), record, options)
        if not checkpoint.record.active:
            state = "folded already" if checkpoint.record.folded else "without a scheme"
            raise LNSConfigError(f"{folder} is {state}: there is nothing to fold, and stock OLMo-core runs it as it is")
        config = stock_config(checkpoint.config)

        def write(out: Path) -> list[str]:
            functions = _functions(checkpoint, factors, options)
            _rewrite(checkpoint, out, functions.__contains__, functions, options)
            record.write(out)
            _write_config(out, config)
            return [
                f"OLMo-core, {len(checkpoint.blocks)} factors folded into gains and biases of the block norms",
                "the optimizer's state is left out: its moments belong to the unfolded weights",
            ]

        weights = scaled(checkpoint.tensors, factors, options.rounding, options.dtype)
        return Target(write, weights, config["model"])

    def unfold(self, folder: Path, options: Options) -> Target:
        """Of a folded checkpoint, or of a right one of ``default_scaled`` blocks, whose weights stay as they are."""
        checkpoint = OLMoCoreCheckpoint.open(folder)
        options.require_exponent(checkpoint.record, folder)
        if checkpoint.default_scaled:
            return _mended(checkpoint, options)
        record = unfolded_record(checkpoint.record, folder)
        scales = checkpoint.factors_of(record.scheme)

        def write(out: Path) -> list[str]:
            functions = _functions(checkpoint, {name: 1 / scale for name, scale in scales.items()}, options)
            moments = {}
            if not options.drop_optimizer:
                moments = moment_functions(checkpoint.stored, checkpoint.folder, scales, options.rounding)
            kept = _MODEL_AND_OPTIMIZER if moments else (PREFIX,)
            _rewrite(checkpoint, out, lambda name: name.startswith(kept), functions | moments, options)
            _write_rest(out, checkpoint, record)
            return [f"{record}: the factor is outside again", _about_training(out, len(moments), options)]

        return Target(write)

    def train(self, folder: Path, options: Options) -> Target:
        checkpoint = OLMoCoreCheckpoint.open(folder)
        record = checkpoint.record
        scales = checkpoint.factors_of(record.scheme) if record.folded else {}
        stock = _stock(checkpoint, {name: 1 / scale for name, scale in scales.items()}, options)
        return huggingface.train_target(stock, record, options)

    def model(self, folder: Path, exported: Record | None = None) -> Any:
        from olmo_lns.models.loading import open_olmo_core

        return open_olmo_core(folder)


def _functions(
    checkpoint: OLMoCoreCheckpoint, factors: Mapping[str, Factor], options: Options
) -> dict[str, ChunkFunction]:
    return {
        PREFIX + name: chunk_scaler(name, factors.get(name, 1.0), options.rounding, options.dtype)
        for name in checkpoint.tensors
    }


def _rewrite(
    checkpoint: OLMoCoreCheckpoint,
    out: Path,
    keep: Callable[[str], bool],
    functions: Mapping[str, ChunkFunction],
    options: Options,
) -> None:
    dtypes = dict.fromkeys((PREFIX + name for name in checkpoint.tensors), options.dtype)
    stored = checkpoint.stored
    stored.rewrite(out / WEIGHTS, keep, functions, max_bytes=options.shard_bytes, dtypes=dtypes)


def _stock(checkpoint: OLMoCoreCheckpoint, factors: Mapping[str, Factor], options: Options) -> Stock:
    """:raises LNSConfigError: no transformers class computes this model."""
    own = tokenizer.identifier_in(checkpoint.config.get("dataset") or {}, checkpoint.folder / CONFIG_FILE)
    weights = to_huggingface(checkpoint, scaled(checkpoint.tensors, factors, options.rounding, options.dtype))
    return Stock(transformers_config(checkpoint), weights, "its blocks are this model's", own, checkpoint.folder)


def _mended(checkpoint: OLMoCoreCheckpoint, options: Options) -> Target:
    """A ``default_scaled`` checkpoint whose factors were right, as one of ours: weights and optimizer unchanged."""
    record = replace(checkpoint.record, plugin_version=__version__)

    def write(out: Path) -> list[str]:
        buffers = sum(name.endswith(f".{BUFFER}") for name in checkpoint.stored.names)
        functions = _functions(checkpoint, {}, options)
        _rewrite(checkpoint, out, lambda name: not name.endswith(f".{BUFFER}"), functions, options)
        _write_rest(out, checkpoint, record)
        return [f"{DEFAULT_SCALED} blocks are {CLASS} with {record.scheme} now; {buffers} buffers dropped"]

    return Target(write)


def _about_training(out: Path, moments: int, options: Options) -> str:
    reset = "start with --trainer.load_optim_state=false"
    if moments:
        note = f"{moments} moments of the optimizer rescaled to match"
    elif options.drop_optimizer:
        note = f"warning: the optimizer's moments were dropped as asked: {reset}"
    else:
        note = f"warning: the checkpoint holds no optimizer state: {reset}"
    if not (out / _TRAINER).is_dir():
        note += "; no trainer state either: also --trainer.load_trainer_state=false"
    return note


def _write_rest(out: Path, checkpoint: OLMoCoreCheckpoint, record: Record) -> None:
    """Everything of a checkpoint but its weights; last what marks it as complete."""
    if (checkpoint.folder / _TRAINER).is_dir():
        copy_unread(checkpoint.folder / _TRAINER, out / _TRAINER)
    record.write(out)
    fields = {"_CLASS_": CLASS, "scheme": record.scheme.name, **record.scheme.parameters}
    fields["initialization"] = record.scaled_init
    _write_config(out, with_blocks(checkpoint.config, fields))
    if (checkpoint.folder / _COMPLETE).is_file():
        copy_unread(checkpoint.folder / _COMPLETE, out / _COMPLETE)


def _write_config(out: Path, config: Mapping[str, Any]) -> None:
    (out / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def stock_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same config with OLMo-core's own plain block configs, at every depth."""
    return with_blocks(config, {"_CLASS_": _STOCK_CLASS})


def with_blocks(config: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The same config with ``fields`` in every plain block config, at every depth, in place of a scheme's."""

    def visit(value: Any) -> Any:
        if isinstance(value, list):
            return [visit(item) for item in value]
        if not isinstance(value, dict):
            return value
        made = {key: visit(item) for key, item in value.items()}
        if made.get("_CLASS_") in (CLASS, _STOCK_CLASS) or made.get("name") == DEFAULT_SCALED:
            made = {key: item for key, item in made.items() if key not in _OURS} | dict(fields)
            if made.get("name") == DEFAULT_SCALED:
                made["name"] = "default"
        return made

    result: dict[str, Any] = visit(copy.deepcopy(dict(config)))
    return result


def choose_class(checkpoint: OLMoCoreCheckpoint) -> str:
    """:raises LNSConfigError: no class computes the same, with everything that stands in the way."""
    model, block = checkpoint.model, checkpoint.blocks[0]
    attention = block.get("sequence_mixer") or block.get("attention") or {}
    name, problems = _shape(block, attention)
    if any(_computed(other) != _computed(block) for other in checkpoint.blocks[1:]):
        problems.append("blocks that differ from each other")
    parts = {
        "block": block,
        "attention": attention,
        "rope": attention.get("rope") or {},
        "feed_forward": block.get("feed_forward") or {},
        "layer_norm": block.get("layer_norm") or {},
    }
    for part, values in parts.items():
        problems += [f"{part}.{key}={value!r}" for key, value in values.items() if _matters(part, key, value)]
    problems += ["no RoPE"] * (not attention.get("rope"))
    problems += ["biases in attention"] * bool(attention.get("bias", True))
    problems += ["biases in the feed-forward layers"] * bool(parts["feed_forward"].get("bias", True))
    problems += ["another activation than SwiGLU's silu"] * (parts["feed_forward"].get("activation", "silu") != "silu")
    head = model.get("lm_head") or {}
    problems += ["a bias in the output layer"] * bool(head.get("bias", True))
    norms = {"block": block.get("layer_norm"), "final": head.get("layer_norm"), "q/k": attention.get("qk_norm")}
    for where, norm in norms.items():
        problems += _norm_problems(where, norm, block.get("layer_norm") or {}, needed=where != "q/k")
    for key in ("embedding_norm", "embed_scale"):
        problems += [f"{key}"] * (model.get(key) is not None)
    if problems:
        raise LNSConfigError(
            f"no stock transformers class computes exactly this model (nearest: {name}): {'; '.join(problems)}. "
            "Use --format olmo-core, which keeps the architecture"
        )
    return name


def _shape(block: Mapping[str, Any], attention: Mapping[str, Any]) -> tuple[str, list[str]]:
    kind, qk = block_type(block), attention.get("qk_norm") is not None
    per_head = bool(attention.get("use_head_qk_norm"))
    if kind == "reordered_norm":
        missing = not qk or per_head
        return "Olmo2ForCausalLM", ["reordered_norm blocks without QK-norm over all heads (Olmo2 has it)"] * missing
    if kind != "default":
        return "LlamaForCausalLM", [f"block type {kind}"]
    if qk and not per_head:
        return "Qwen3ForCausalLM", ["QK-norm over all heads in front of which the norm sits (Qwen3's is per head)"]
    return ("Qwen3ForCausalLM" if qk else "LlamaForCausalLM"), []


def _computed(block: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in block.items() if key not in ("scheme", "exponent", "initialization")}


def _matters(part: str, key: str, value: Any) -> bool:
    if key == "_CLASS_" or key in _READ[part]:
        return key == "name" and part in ("attention", "feed_forward", "rope") and value != "default"
    return value not in _NEUTRAL


def _norm_problems(where: str, norm: Any, like: Mapping[str, Any], *, needed: bool) -> list[str]:
    if norm is None:
        return [f"no {where} norm"] * needed
    problems = [f"{where} norm {norm.get('name')}"] * (norm.get("name", "default") not in _RMS)
    problems += [f"a bias in the {where} norm"] * bool(norm.get("bias", True))
    problems += [f"a {where} norm without gain"] * (norm.get("elementwise_affine") is False)
    problems += [f"another eps in the {where} norm"] * (norm.get("eps", 1e-5) != like.get("eps", 1e-5))
    return problems


def to_huggingface(checkpoint: OLMoCoreCheckpoint, weights: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """OLMo-core's (already folded) weights under transformers' names."""
    name = choose_class(checkpoint)
    norms = {"attention_norm": "input_layernorm", "feed_forward_norm": "post_attention_layernorm"}
    if name == "Olmo2ForCausalLM":
        norms = {"attention_norm": "post_attention_layernorm", "feed_forward_norm": "post_feedforward_layernorm"}
    parts = norms | {f"attention.w_{part}": f"self_attn.{part}_proj" for part in "qkv"}
    parts |= {"attention.w_out": "self_attn.o_proj", "feed_forward.w1": "mlp.gate_proj"}
    parts |= {"feed_forward.w2": "mlp.down_proj", "feed_forward.w3": "mlp.up_proj"}
    if name != "LlamaForCausalLM":
        parts |= {"attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm"}
    names = {"embeddings.weight": "model.embed_tokens.weight", "lm_head.norm.weight": "model.norm.weight"}
    for index in range(len(checkpoint.blocks)):
        for ours, theirs in parts.items():
            names[f"blocks.{index}.{ours}.weight"] = f"model.layers.{index}.{theirs}.weight"
    tied = bool(checkpoint.model.get("tie_word_embeddings"))
    if not tied:
        names["lm_head.w_out.weight"] = "lm_head.weight"
    found = set(weights) - ({"lm_head.w_out.weight"} if tied else set())
    if found != set(names):
        odd = sorted(found ^ set(names))
        raise LNSConfigError(f"{checkpoint.folder}: {odd[0]} is not what {name} wants ({len(odd)} such weights)")
    return {theirs: weights[ours] for ours, theirs in names.items()}


def transformers_config(checkpoint: OLMoCoreCheckpoint) -> dict[str, Any]:
    """``config.json`` but for the dtype, in keys that transformers 4 and 5, vLLM and llama.cpp read."""
    name = choose_class(checkpoint)
    model, block = checkpoint.model, checkpoint.blocks[0]
    attention = block.get("sequence_mixer") or block["attention"]
    data = checkpoint.config.get("dataset") or {}
    tokens = data.get("tokenizer") or {}
    length = data.get("sequence_length") or (checkpoint.config.get("train_module") or {}).get("max_sequence_length")
    heads = attention["n_heads"]
    return {
        "architectures": [name],
        "model_type": _TYPES[name],
        "vocab_size": model["vocab_size"],
        "hidden_size": model["d_model"],
        "intermediate_size": block["feed_forward"]["hidden_size"],
        "num_hidden_layers": model["n_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": attention.get("n_kv_heads") or heads,
        "head_dim": attention.get("head_dim") or model["d_model"] // heads,
        "hidden_act": "silu",
        "max_position_embeddings": length or 2048,
        "initializer_range": model.get("init_std", 0.02),
        "rope_theta": float(attention["rope"].get("theta", 500_000)),
        "rms_norm_eps": block["layer_norm"].get("eps", 1e-5),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": bool(model.get("tie_word_embeddings")),
        "use_cache": True,
        **huggingface.special_tokens(tokens.get("eos_token_id"), tokens.get("pad_token_id"), model["vocab_size"]),
    }
