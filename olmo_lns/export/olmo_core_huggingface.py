"""The stock transformers class that computes exactly what an OLMo-core model computes, if there is one.

==================  =================================================================
LlamaForCausalLM    ``default`` blocks (RMSNorm in front, SwiGLU, RoPE) without QK-norm
Qwen3ForCausalLM    the same with QK-norm per head
Olmo2ForCausalLM    ``reordered_norm`` blocks with QK-norm over all heads
==================  =================================================================
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Mapping

import torch

from olmo_lns.checkpoints.olmo_core import OLMoCoreCheckpoint, block_type
from olmo_lns.checkpoints.tensors import LazyTensor
from olmo_lns.errors import LNSConfigError
from olmo_lns.export import huggingface, tokenizer
from olmo_lns.export.fold import scaled
from olmo_lns.export.options import Options, Target
from olmo_lns.record import Record

__all__ = ["choose_class", "huggingface_target", "to_huggingface", "transformers_config"]

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


def transformers_config(checkpoint: OLMoCoreCheckpoint, dtype: torch.dtype, record: Record) -> dict[str, Any]:
    """``config.json``, in keys that transformers 4 and 5, vLLM and llama.cpp read."""
    name = choose_class(checkpoint)
    model, block = checkpoint.model, checkpoint.blocks[0]
    attention = block.get("sequence_mixer") or block["attention"]
    data = checkpoint.config.get("dataset") or {}
    tokens = data.get("tokenizer") or {}
    length = data.get("sequence_length") or (checkpoint.config.get("train_module") or {}).get("max_sequence_length")
    heads = attention["n_heads"]
    config = {
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
        "torch_dtype": str(dtype).removeprefix("torch."),
        **huggingface.special_tokens(tokens.get("eos_token_id"), tokens.get("pad_token_id"), model["vocab_size"]),
    }
    return config | huggingface.record_keys(record)


def huggingface_target(
    checkpoint: OLMoCoreCheckpoint,
    record: Record,
    options: Options,
) -> Target:
    """:raises LNSConfigError: no transformers class computes this model."""
    name = choose_class(checkpoint)
    weights = to_huggingface(
        checkpoint, scaled(checkpoint.tensors, checkpoint.factors(), options.rounding, options.dtype)
    )
    config = transformers_config(checkpoint, huggingface.dominant_dtype(weights), record)
    own = ((checkpoint.config.get("dataset") or {}).get("tokenizer") or {}).get("identifier")
    identifier = options.tokenizer or own

    def write(out: Path) -> list[str]:
        lines = [f"{name}: its blocks are this model's", f"lns: {'folded' if record.folded else 'none'}"]
        lines.append(tokenizer.write_tokenizer(out, identifier, config=config, beside=checkpoint.folder))
        huggingface.write_huggingface(out, weights, config, max_shard_bytes=options.max_shard_size)
        return lines

    return write
