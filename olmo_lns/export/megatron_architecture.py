"""Which of Megatron's arguments describe a model that OLMo and Llama can hold too."""

from __future__ import annotations

from typing import Any

from olmo_lns.errors import LNSConfigError
from olmo_lns.export.architecture import Architecture

__all__ = ["architecture"]

#: Argument -> the values under which the model is a plain decoder; an argument that is absent is fine.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "num_experts": (None,),
    "multi_latent_attention": (False, None),
    "mtp_num_layers": (None, 0),
    "swiglu": (True,),
    "position_embedding_type": ("rope",),
    "rotary_percent": (1.0, None),
    "rotary_interleaved": (False, None),
    "rotary_seq_len_interpolation_factor": (None, 1),
    "use_rope_scaling": (False, None),
    "no_rope_freq": (None, 0),
    "add_bias_linear": (False,),
    "add_qkv_bias": (False, None),
    "qk_layernorm": (False, None),
    "qk_l2_norm": (False, None),
    "attention_output_gate": (False, None),
    "apply_residual_connection_post_layernorm": (False, None),
    "window_size": (None,),
    "softmax_type": ("vanilla", None),
    "heterogeneous_layers_config_path": (None,),
    "heterogeneous_layers_config_encoded_json": (None,),
    "hybrid_override_pattern": (None,),
    "hybrid_layer_pattern": (None,),
    "experimental_attention_variant": (None,),
    "use_mup": (False, None),
    "glu_linear_offset": (0.0, None),
    "activation_func_clamp_value": (None,),
    "quick_geglu": (False, None),
}


def architecture(args: Any, embeddings: int, source: object) -> Architecture:
    """The same model in OLMo's terms.

    :param embeddings: rows of the embedding, padding included.
    :raises LNSConfigError: an argument without equivalent, with all that stand in the way.
    """
    problems = [
        f"{name}={getattr(args, name)!r}"
        for name, values in _PLAIN.items()
        if hasattr(args, name) and getattr(args, name) not in values
    ]
    norm = str(getattr(args, "normalization", "LayerNorm"))
    if norm not in ("RMSNorm", "LayerNorm"):
        problems.append(f"normalization={norm!r}")
    heads = int(args.num_attention_heads)
    if (channels := getattr(args, "kv_channels", None)) not in (None, args.hidden_size // heads):
        problems.append(f"kv_channels={channels}")
    if problems:
        raise LNSConfigError(
            f"{source}: no stock transformers class computes exactly this model: {', '.join(problems)}"
        )
    groups = getattr(args, "num_query_groups", None) if getattr(args, "group_query_attention", True) else None
    epsilon = getattr(args, "norm_epsilon", None)
    return Architecture(
        d_model=int(args.hidden_size),
        n_heads=heads,
        n_kv_heads=int(groups) if groups else heads,
        n_layers=int(args.num_layers),
        mlp_hidden_size=2 * int(args.ffn_hidden_size),
        rope=True,
        rope_theta=float(getattr(args, "rotary_base", 10_000)),
        layer_norm_type="rms" if norm == "RMSNorm" else "default",
        layer_norm_eps=float(epsilon if epsilon is not None else args.layernorm_epsilon),
        max_sequence_length=int(args.max_position_embeddings),
        include_bias=False,
        bias_for_layer_norm=norm == "LayerNorm",
        vocab_size=embeddings,
        embedding_size=embeddings,
        weight_tying=not getattr(args, "untie_embeddings_and_output_weights", False),
        # Megatron's arguments do not name them; the tokenizer does.
        eos_token_id=-1,
        pad_token_id=-1,
        init_std=float(getattr(args, "init_method_std", 0.02)),
    )
