"""Which of Megatron's arguments describe a model that OLMo and Llama can hold too."""

from __future__ import annotations

from typing import Any

from olmo_lns.checkpoints.architecture import Architecture
from olmo_lns.errors import LNSConfigError
from olmo_lns.integrations.megatron.settings import ZERO_CENTRED
from olmo_lns.integrations.olmo import types
from olmo_lns.schemes import PRE_LN, Scheme

__all__ = ["architecture", "gain_shift"]

#: ``--norm-epsilon``, likewise.
_EPSILON = ("norm_epsilon", "layernorm_epsilon")

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


def architecture(args: Any, embeddings: int, source: object, scheme: Scheme = PRE_LN) -> Architecture:
    """The same model in OLMo's terms.

    :param embeddings: rows of the embedding, padding included. :param scheme: of blocks that have more than a
        Pre-LN model's weights.
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
    if (channels := getattr(args, "kv_channels", None)) not in (None, args.hidden_size // max(heads, 1)):
        problems.append(f"kv_channels={channels}")
    if problems:
        raise LNSConfigError(
            f"{source}: no stock transformers class computes exactly this model: {', '.join(problems)}"
        )
    base = "rms" if norm == "RMSNorm" else "default"
    groups = getattr(args, "num_query_groups", None) if getattr(args, "group_query_attention", True) else None
    return Architecture(
        d_model=int(args.hidden_size),
        n_heads=heads,
        n_kv_heads=int(groups) if groups else heads,
        n_layers=int(args.num_layers),
        mlp_hidden_size=2 * int(args.ffn_hidden_size),
        rope=True,
        rope_theta=float(getattr(args, "rotary_base", 10_000)),
        layer_norm_type=base if scheme.is_pre_ln else types.spell(scheme, base),
        layer_norm_eps=float(_given(args, _EPSILON, source)[0]),
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
    ).checked(source)


def gain_shift(args: Any, source: object) -> float:
    """What is added to a stored gain: 1 where the saved arguments say that gains are zero-centred.

    :raises LNSConfigError: they do not say it.
    """
    return 1.0 if any(_given(args, ZERO_CENTRED, source)) else 0.0


def _given(args: Any, names: tuple[str, ...], source: object) -> list[Any]:
    """The values of an argument that has had several names. A default in its place would be a guess."""
    found = [getattr(args, name) for name in names if getattr(args, name, None) is not None]
    if not found:
        raise LNSConfigError(
            f"{source}: the saved arguments hold neither {' nor '.join(names)}: expected one of them from "
            "every supported Megatron; this version's are not known to the exporter"
        )
    return found
