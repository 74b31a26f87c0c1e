"""The stock transformers class that computes exactly what an OLMo model computes, if there is one.

=================  =======================================================================
LlamaForCausalLM   RMSNorm with or without gain (without: unit gains are written), biases
OlmoForCausalLM    LayerNorm without gain and bias, eps 1e-5 (a constant of that class), clip_qkv
StableLmForCausalLM  LayerNorm with gain, with or without bias
Gemma2ForCausalLM  Sandwich-LN (Peri-LN), whose blocks have the same four norms
=================  =======================================================================

All are SwiGLU decoders with RoPE, in the layout that OLMo uses: ``att_proj`` is [q, k, v],
``ff_proj`` is [up, gate], and the rotation pairs element i with i + head_dim/2. What Gemma 2 does beside that is undone
or switched off: it multiplies the embedding by sqrt(d), its gains are stored minus one, its activation is set to SiLU
and its soft-capping to none. Last comes a stock Llama whose scheme is in hooks: ``verify`` compares
exports of Megatron and of the authors with it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Callable, Mapping

import torch

from olmo_lns.checkpoints.olmo import Architecture
from olmo_lns.checkpoints.tensors import LazyTensor, split_rows
from olmo_lns.errors import LNSConfigError
from olmo_lns.export import fold
from olmo_lns.export.sources import Options, Stock
from olmo_lns.record import Record
from olmo_lns.schemes import Plan, Scheme

_GEMMA2 = "Gemma2ForCausalLM"
#: Our norms of a block -> Gemma 2's.
_GEMMA2_NORMS = {
    "attn_norm": "input_layernorm",
    "attn_norm_out": "post_attention_layernorm",
    "ff_norm": "pre_feedforward_layernorm",
    "ff_norm_out": "post_feedforward_layernorm",
}
#: Those of a Pre-LN block -> Llama's, Olmo's and StableLm's.
_NORMS = {"attn_norm": "input_layernorm", "ff_norm": "post_attention_layernorm"}
#: Weights of a scheme that a Pre-LN model has no place for.
_OWN = re.compile(r"_(gate|omega|norm_out)\.(weight|bias)$")
#: OlmoLayerNorm's eps is a constant in its forward.
_OLMO_EPS = 1e-5


def choose_class(model: Architecture) -> tuple[str, str]:
    """The name of the class that computes the model, and why it does.

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
    """What the model has that no class of this module computes."""
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


def llama_names(index: int) -> list[str]:
    """transformers' names of the two norms of block ``index`` (0-based)."""
    return [f"model.layers.{index}.{theirs}" for theirs in _NORMS.values()]


def to_huggingface(model: Architecture, weights: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """OLMo's (already folded) weights under transformers' names, fused projections taken apart."""
    name, _ = choose_class(model)
    dtype = weights["transformer.wte.weight"].dtype
    made = {"OlmoForCausalLM": {}, "StableLmForCausalLM": {"weight": 1.0, "bias": 0.0}}.get(name, {"weight": 1.0})

    def norm(ours: str) -> dict[str, LazyTensor]:
        """Gain and bias that the class has: the model's, or ones and zeros."""
        return {part: weights.get(f"{ours}.{part}") or _constant(model, value, dtype) for part, value in made.items()}

    result = _renamed(model, weights, _NORMS, norm)
    if not model.weight_tying:
        result["lm_head.weight"] = weights["transformer.ff_out.weight"]
    return result


def _renamed(
    model: Architecture,
    weights: Mapping[str, LazyTensor],
    norms: Mapping[str, str],
    norm: Callable[[str], Mapping[str, LazyTensor]],
) -> dict[str, LazyTensor]:
    """:param norms: our norms of a block -> theirs. :param norm: our name of a norm -> its parameters."""
    result = {"model.embed_tokens.weight": weights["transformer.wte.weight"]}
    for index in range(model.n_layers):
        block, layer = f"transformer.blocks.{index}", f"model.layers.{index}"
        for ours, theirs in norms.items():
            result |= {f"{layer}.{theirs}.{part}": tensor for part, tensor in norm(f"{block}.{ours}").items()}
        result |= {f"{layer}.{key}": tensor for key, tensor in _projections(model, weights, block).items()}
    return result | {f"model.norm.{part}": tensor for part, tensor in norm("transformer.ln_f").items()}


def _constant(model: Architecture, value: float, dtype: torch.dtype) -> LazyTensor:
    return LazyTensor(
        (model.d_model,), dtype, lambda: torch.full((model.d_model,), value, dtype=torch.float64).to(dtype)
    )


def _projections(model: Architecture, weights: Mapping[str, LazyTensor], block: str) -> dict[str, LazyTensor]:
    """The matrices and biases of a block under transformers' names within a layer."""
    kv, names = model.kv_heads * model.head_dim, ("q_proj", "k_proj", "v_proj")
    result: dict[str, LazyTensor] = {}
    for kind in ("weight", "bias") if model.include_bias else ("weight",):
        if model.block_type == "llama":
            parts = [weights[f"{block}.{name}.{kind}"] for name in names]
        else:
            parts = split_rows(weights[f"{block}.att_proj.{kind}"], (model.d_model, kv, kv))
        result |= {f"self_attn.{name}.{kind}": part for name, part in zip(names, parts, strict=True)}
        result[f"self_attn.o_proj.{kind}"] = weights[f"{block}.attn_out.{kind}"]
        up, gate = split_rows(weights[f"{block}.ff_proj.{kind}"], [model.ff_out_inner] * 2)
        result |= {f"mlp.up_proj.{kind}": up, f"mlp.gate_proj.{kind}": gate}
        result[f"mlp.down_proj.{kind}"] = weights[f"{block}.ff_out.{kind}"]
    return result


def transformers_config(model: Architecture) -> dict[str, Any]:
    """``config.json`` but for the dtype, in keys that transformers 4 and 5, vLLM and llama.cpp read."""
    name, _ = choose_class(model)
    config = common(model, name)
    if name == "LlamaForCausalLM":
        config |= {"rms_norm_eps": model.layer_norm_eps, "attention_bias": model.include_bias}
        config |= {"mlp_bias": model.include_bias, "head_dim": model.head_dim}
    elif name == "OlmoForCausalLM":
        config |= {"attention_bias": False, "clip_qkv": model.clip_qkv}
    else:
        config |= {"layer_norm_eps": model.layer_norm_eps, "use_qkv_bias": False, "partial_rotary_factor": 1.0}
        config |= {"qk_layernorm": False, "use_parallel_residual": False, "hidden_dropout": 0.0}
    return config


def common(model: Architecture, name: str) -> dict[str, Any]:
    """What the config of every stock class here holds. :param name: the class's name."""
    return {
        "architectures": [name],
        "model_type": name.removesuffix("ForCausalLM").lower(),
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


def special_tokens(eos: Any, pad: Any, vocabulary: int) -> dict[str, Any]:
    """Token ids for config and generation config; an id outside the vocabulary is left out."""
    ids = {"bos_token_id": None, "eos_token_id": eos, "pad_token_id": pad}
    return {role: i if isinstance(i, int) and 0 <= i < vocabulary else None for role, i in ids.items()}


def stock_of(
    model: Architecture,
    weights: Mapping[str, LazyTensor],
    record: Record,
    options: Options,
    tokenizer: str | None,
    beside: Path,
    *,
    trained: bool = False,
    otherwise: str = "",
) -> Stock:
    """:param weights: OLMo's names, a scheme's own among them. :param record: of them.

    :param trained: not folded: as they were trained. :param otherwise: what to do where they cannot be folded.
    :raises LNSConfigError: no class computes this model.
    """
    scheme, layers, factors = record.scheme, model.n_layers, {}
    if trained:
        factors = fold.inverse(model, record)
    elif record.active:
        if is_gemma2(scheme, layers):
            why = f"its blocks have the four norms of {scheme.definition.title}"
            return Stock(*_gemma2(model, scheme, weights, options), why, tokenizer, beside)
        fold.require_foldable(scheme, layers, beside, otherwise)
        factors = fold.factors(model, scheme, weights)
        weights = {name: tensor for name, tensor in weights.items() if name not in fold.gates(model)}
    _, why = choose_class(model)
    folded = fold.scaled(weights, factors, options.rounding, options.dtype)
    return Stock(transformers_config(model), to_huggingface(model, folded), why, tokenizer, beside)


def is_gemma2(scheme: Scheme, n_layers: int) -> bool:
    """Whether the scheme's blocks are Gemma 2's, up to factors that a gain can hold."""
    plans = [plan for _, _, plan in scheme.plans(n_layers)]
    return all(plan == Plan(branch=True, branch_scale=plan.branch_scale) for plan in plans)


def _gemma2(
    model: Architecture, scheme: Scheme, weights: Mapping[str, LazyTensor], options: Options
) -> tuple[dict[str, Any], dict[str, LazyTensor]]:
    """Config and weights. :raises LNSConfigError: Gemma 2 does not compute this model."""
    found = problems(model)
    found += ["LayerNorm (Gemma 2 has RMSNorm)"] * (model.base_norm != "rms")
    found += ["biases"] * (model.include_bias or model.norm_bias) + ["clip_qkv"] * bool(model.clip_qkv)
    if found:
        raise LNSConfigError(
            f"no stock transformers class computes this model (nearest: {_GEMMA2}): {'; '.join(found)}"
        )
    embedding = weights["transformer.wte.weight"]
    dtype = options.dtype or embedding.dtype

    def gain(ours: str) -> dict[str, LazyTensor]:
        """``gain * scale - 1``; the gain is 1 where the model has none.

        Not through ``Rounding``: near 0 a relative error says nothing about the gain.
        """
        scale = 1.0
        if match := re.match(r"transformer\.blocks\.(\d+)\.(attn|ff)_norm(_out)?$", ours):
            plan = scheme.plan(int(match[1]) + 1, model.n_layers, match[2])
            scale = plan.branch_scale if match[3] else plan.norm_scale
        if (stored := weights.get(f"{ours}.weight")) is None:
            return {"weight": _constant(model, scale - 1.0, dtype)}

        def shifted(tensor: torch.Tensor) -> torch.Tensor:
            fold.check_finite(ours, tensor)
            return (tensor.double() * scale - 1.0).to(dtype)

        return {"weight": stored.map(shifted, dtype=dtype)}

    made = _renamed(model, weights, _GEMMA2_NORMS, gain)
    made["lm_head.weight"] = embedding if model.weight_tying else weights["transformer.ff_out.weight"]
    for name in [name for name in made if "norm" not in name]:
        factor = model.d_model**-0.5 if name == "model.embed_tokens.weight" else 1.0
        made[name] = options.rounding.folded(name, made[name], factor, options.dtype)
    config = common(model, _GEMMA2) | {
        "head_dim": model.head_dim,
        "query_pre_attn_scalar": model.head_dim,
        "hidden_activation": "silu",
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "layer_types": ["full_attention"] * model.n_layers,
        "rms_norm_eps": model.layer_norm_eps,
        "attention_bias": False,
        "tie_word_embeddings": False,
    }
    return config, made


def hooked_llama(model: Architecture, weights: Mapping[str, LazyTensor], *, scheme: Scheme) -> Any:
    """The model in fp32 with unfolded weights, the scheme applied to the outputs of norms and sub-layers.

    :param weights: OLMo's or transformers' names, a scheme's own among the former.
    :raises LNSConfigError: a scheme of another residual form.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    own = {name: tensor.load().float() for name, tensor in weights.items() if _OWN.search(name)}
    weights = {name: tensor for name, tensor in weights.items() if name not in own}
    if "transformer.wte.weight" in weights:
        weights = to_huggingface(model, weights)
    values = transformers_config(model)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    network = AutoModelForCausalLM.from_config(config, torch_dtype=torch.float32).eval()
    state = {name: tensor.load().float() for name, tensor in weights.items()}
    if model.weight_tying:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    network.load_state_dict(state, strict=True)
    for number, sub_layer, plan in scheme.plans(model.n_layers):
        hooked = Plan(branch=plan.branch, norm_scale=plan.norm_scale, branch_scale=plan.branch_scale, gate=plan.gate)
        if plan != hooked:
            raise LNSConfigError(f"no stock Llama with hooks computes {scheme.definition.title} ({scheme})")
        layer, prefix = network.model.layers[number - 1], f"transformer.blocks.{number - 1}.{sub_layer}_"
        attention = sub_layer == "attn"
        norm = layer.input_layernorm if attention else layer.post_attention_layernorm
        norm.register_forward_hook(lambda module, inputs, output, scale=plan.norm_scale: output * scale)
        parts = {name.removeprefix(prefix): value for name, value in own.items() if name.startswith(prefix)}
        branch = layer.self_attn if attention else layer.mlp
        branch.register_forward_hook(_branch_hook(plan, parts, model))
    return network


def _branch_hook(plan: Plan, parts: Mapping[str, torch.Tensor], model: Architecture) -> Any:
    """``gate * branch_scale * Norm(output)``, the norm written out."""

    def branch(h: torch.Tensor) -> torch.Tensor:
        if plan.branch:
            if model.base_norm == "default":
                h = h - h.mean(-1, keepdim=True)
            h = h / (h.pow(2).mean(-1, keepdim=True) + model.layer_norm_eps).sqrt()
            h = h * parts["norm_out.weight"] + parts.get("norm_out.bias", 0)
        return h * plan.branch_scale * parts.get("gate.weight", 1)

    def hook(module: Any, inputs: Any, output: Any) -> Any:
        return (branch(output[0]), *output[1:]) if isinstance(output, tuple) else branch(output)

    return hook
