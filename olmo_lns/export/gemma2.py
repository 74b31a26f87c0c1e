"""Sandwich-LN (Peri-LN) models as stock ``Gemma2ForCausalLM``, whose blocks have the same four norms.

What Gemma 2 does beside that is undone or switched off: it multiplies the embedding by sqrt(d),
its gains are stored minus one, its activation is set to SiLU and its soft-capping to none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Mapping

import torch

from olmo_lns.checkpoints.architecture import Architecture
from olmo_lns.checkpoints.tensors import LazyTensor
from olmo_lns.errors import LNSConfigError
from olmo_lns.export import huggingface
from olmo_lns.export.fold import Rounding, check_finite
from olmo_lns.export.options import Options
from olmo_lns.schemes import Plan, Scheme

__all__ = ["NAME", "has_form", "stock"]

NAME = "Gemma2ForCausalLM"
#: Our norms of a block -> Gemma 2's.
_NORMS = {
    "attn_norm": "input_layernorm",
    "attn_norm_out": "post_attention_layernorm",
    "ff_norm": "pre_feedforward_layernorm",
    "ff_norm_out": "post_feedforward_layernorm",
}


def has_form(scheme: Scheme, n_layers: int) -> bool:
    """Whether the scheme's blocks are Gemma 2's, up to factors that a gain can hold."""
    plans = [plan for _, _, plan in scheme.plans(n_layers)]
    return all(plan == Plan(branch=True, branch_scale=plan.branch_scale) for plan in plans)


def check(model: Architecture) -> None:
    """:raises LNSConfigError: Gemma 2 does not compute this model."""
    problems = huggingface.problems(model)
    problems += ["LayerNorm (Gemma 2 has RMSNorm)"] * (model.base_norm != "rms")
    problems += ["biases"] * (model.include_bias or model.norm_bias)
    problems += ["clip_qkv"] * bool(model.clip_qkv)
    if problems:
        raise LNSConfigError(
            f"no stock transformers class computes this model (nearest: {NAME}): {'; '.join(problems)}"
        )


def stock(
    model: Architecture,
    scheme: Scheme,
    weights: Mapping[str, LazyTensor],
    options: Options,
    tokenizer: str | None,
    beside: Path,
) -> huggingface.Stock:
    """:param weights: OLMo's names, the scheme's own among them.

    :raises LNSConfigError: Gemma 2 does not compute this model.
    """
    check(model)
    why = f"its blocks have the four norms of {scheme.definition.title}"
    made = _renamed(model, scheme, weights, options.rounding, options.dtype)
    return huggingface.Stock(_config(model), made, why, tokenizer, beside)


def _renamed(
    model: Architecture,
    scheme: Scheme,
    weights: Mapping[str, LazyTensor],
    rounding: Rounding,
    dtype: torch.dtype | None,
) -> dict[str, LazyTensor]:
    """OLMo's weights under transformers' names, gains minus one, the embedding over sqrt(d)."""
    embedding = weights["transformer.wte.weight"]
    wanted = dtype or embedding.dtype
    result = {
        "model.embed_tokens.weight": rounding.folded("transformer.wte.weight", embedding, model.d_model**-0.5, wanted)
    }
    for index in range(model.n_layers):
        block, layer = f"transformer.blocks.{index}", f"model.layers.{index}"
        for ours, theirs in _NORMS.items():
            plan = scheme.plan(index + 1, model.n_layers, ours.partition("_")[0])
            scale = plan.branch_scale if ours.endswith("_out") else plan.norm_scale
            result[f"{layer}.{theirs}.weight"] = _gain(model, weights, f"{block}.{ours}.weight", scale, wanted)
        for name, tensor in huggingface.projections(model, weights, index).items():
            result[f"{layer}.{name}"] = rounding.folded(f"{layer}.{name}", tensor, 1.0, dtype or tensor.dtype)
    result["model.norm.weight"] = _gain(model, weights, "transformer.ln_f.weight", 1.0, wanted)
    head = embedding if model.weight_tying else weights["transformer.ff_out.weight"]
    result["lm_head.weight"] = rounding.folded("lm_head.weight", head, 1.0, wanted)
    return result


def _gain(
    model: Architecture, weights: Mapping[str, LazyTensor], name: str, scale: float, dtype: torch.dtype
) -> LazyTensor:
    """``gain * scale - 1`` in ``dtype``; the gain is 1 where the model has none.

    Not through :class:`Rounding`: near 0 a relative error says nothing about the gain.
    """
    shape = (model.d_model,)
    if name not in weights:
        return LazyTensor(shape, dtype, lambda: torch.full(shape, scale - 1.0, dtype=torch.float64).to(dtype))

    def shifted(gain: torch.Tensor) -> torch.Tensor:
        check_finite(name, gain)
        return (gain.double() * scale - 1.0).to(dtype)

    return weights[name].map(shifted, dtype=dtype)


def _config(model: Architecture) -> dict[str, Any]:
    """Of a Gemma 2 without what only Gemma 2 has."""
    return {
        "architectures": [NAME],
        "model_type": "gemma2",
        "vocab_size": model.embeddings,
        "hidden_size": model.d_model,
        "intermediate_size": model.ff_out_inner,
        "num_hidden_layers": model.n_layers,
        "num_attention_heads": model.n_heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "query_pre_attn_scalar": model.head_dim,
        "hidden_activation": "silu",
        "hidden_act": "silu",
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "layer_types": ["full_attention"] * model.n_layers,
        "max_position_embeddings": model.max_sequence_length,
        "rms_norm_eps": model.layer_norm_eps,
        "rope_theta": float(model.rope_theta),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": model.init_std,
        "tie_word_embeddings": False,
        "use_cache": True,
        **huggingface.special_tokens(model.eos_token_id, model.pad_token_id, model.embeddings),
    }
