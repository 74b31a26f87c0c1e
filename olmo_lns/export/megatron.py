"""Fold Megatron's distributed checkpoints (``torch_dist``) for stock Megatron, or open them as a Llama.

The rows of ``linear_qkv`` are grouped by key heads. Each group has its query heads, one key head and one value head, in
that order. The rows of ``linear_fc1`` are [gate, up]. :mod:`olmo_lns.export.torch_dist` reads and writes the files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from olmo_lns.errors import LNSConfigError
from olmo_lns.export import HF, MEGATRON, huggingface
from olmo_lns.export.checkpoint import OpenCheckpoint, reporting_load_errors
from olmo_lns.export.interface import Format
from olmo_lns.export.saved_weights import widest
from olmo_lns.export.torch_dist import TRACKER, Saved, read, write
from olmo_lns.folding import check_finite, multiplied
from olmo_lns.integrations.megatron.module_names import FUSED_NORM, LAYER
from olmo_lns.schemes import PRE_LN, Scheme

_ABSENT = (None, False, 0)
#: Argument -> the values that Llama can represent. An absent argument is accepted.
_LLAMA_VALUES: dict[str, tuple[Any, ...]] = {
    "normalization": ("RMSNorm",),
    "swiglu": (True,),
    "position_embedding_type": ("rope",),
    "rotary_percent": (1.0, None),
    "rotary_seq_len_interpolation_factor": (None, 1),
    "softmax_type": ("vanilla", None),
    **dict.fromkeys(("num_experts", "multi_latent_attention", "mtp_num_layers", "add_bias_linear"), _ABSENT),
    **dict.fromkeys(("rotary_interleaved", "use_rope_scaling", "no_rope_freq", "add_qkv_bias"), _ABSENT),
    **dict.fromkeys(("qk_layernorm", "qk_l2_norm", "attention_output_gate", "window_size", "use_mup"), _ABSENT),
    **dict.fromkeys(("apply_residual_connection_post_layernorm", "experimental_attention_variant"), _ABSENT),
    **dict.fromkeys(("heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json"), _ABSENT),
    **dict.fromkeys(("hybrid_override_pattern", "hybrid_layer_pattern", "glu_linear_offset"), _ABSENT),
    **dict.fromkeys(("activation_func_clamp_value", "quick_geglu"), _ABSENT),
}


def _llama_config(saved: Saved) -> dict[str, Any]:
    """Return the settings of the Llama config."""
    args = saved.args
    values = {name: getattr(args, name) for name in _LLAMA_VALUES if hasattr(args, name)}
    unsupported = [f"{name}={value!r}" for name, value in values.items() if value not in _LLAMA_VALUES[name]]
    if unsupported:
        raise LNSConfigError(f"{saved.folder}: stock Llama cannot represent this model: {', '.join(unsupported)}.")
    heads = int(args.num_attention_heads)
    groups = getattr(args, "num_query_groups", None) if getattr(args, "group_query_attention", True) else None
    return {
        "model_type": "llama",
        "vocab_size": saved.tensors["embedding.word_embeddings.weight"].size[0],  # padding included
        "hidden_size": int(args.hidden_size),
        "intermediate_size": int(args.ffn_hidden_size),
        "num_hidden_layers": int(args.num_layers),
        "num_attention_heads": heads,
        "num_key_value_heads": int(groups) if groups else heads,
        "head_dim": int(getattr(args, "kv_channels", None) or args.hidden_size // heads),
        "max_position_embeddings": int(args.max_position_embeddings),
        "rope_theta": float(getattr(args, "rotary_base", 10_000)),
        "rms_norm_eps": float(saved.argument("norm_epsilon", "layernorm_epsilon")),
        "initializer_range": float(getattr(args, "init_method_std", 0.02)),
        "tie_word_embeddings": not getattr(args, "untie_embeddings_and_output_weights", False),
        "attention_bias": False,
        "mlp_bias": False,
        # Megatron's arguments do not name the special tokens; the tokenizer does.
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }


_ATTN, _FF = LAYER["attn"], LAYER["ff"]
_QKV, _FC1 = f"{_ATTN.module}.{_ATTN.may_contain_norm[0]}", f"{_FF.module}.{_FF.may_contain_norm[0]}"
#: Megatron's names -> Llama's. The weights of ``_QKV`` and ``_FC1`` are split.
_NAMES = {
    "embedding.word_embeddings": "model.embed_tokens",
    "decoder.final_layernorm": "model.norm",
    "decoder.layers": "model.layers",
    "output_layer": "lm_head",
    f"{_QKV}.{FUSED_NORM}weight": "input_layernorm.weight",
    f"{_ATTN.module}.{_ATTN.output}": "self_attn.o_proj",
    _QKV: "self_attn.{}_proj",
    f"{_FC1}.{FUSED_NORM}weight": "post_attention_layernorm.weight",
    _FC1: "mlp.{}_proj",
    f"{_FF.module}.{_FF.output}": "mlp.down_proj",
}


def _llama_weights(saved: Saved, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the unfolded weights under Llama's names. A weight that Llama does not have keeps Megatron's name."""
    state: dict[str, torch.Tensor] = {}
    for megatron_name, tensor in saved.weights().items():
        is_stacked = megatron_name.startswith("decoder.layers.") and not megatron_name.split(".")[2].isdigit()
        for layer, weight in enumerate(tensor if is_stacked else [tensor]):
            numbered = f"decoder.layers.{layer}." if is_stacked else "decoder.layers."
            name = huggingface.renamed(megatron_name.replace("decoder.layers.", numbered), _NAMES)
            if megatron_name.endswith((f"{FUSED_NORM}weight", "layernorm.weight")):
                # The gain of a Llama is 1 plus a zero-centered one. fp32 holds the sum, so it is rounded only once, at
                # the end of the export.
                state[name] = weight.float() + saved.shift if saved.shift else weight
            elif megatron_name.endswith(f"{_QKV}.weight"):
                state |= {name.format(x): rows for x, rows in zip("qkv", _split_qkv(weight, config), strict=True)}
            elif megatron_name.endswith(f"{_FC1}.weight"):
                state |= {name.format(x): rows for x, rows in zip(("gate", "up"), weight.chunk(2), strict=True)}
            else:
                state[name] = weight
    return state


def _split_qkv(weight: torch.Tensor, config: dict[str, Any]) -> list[torch.Tensor]:
    """Split the rows of ``linear_qkv``, which are grouped by key head, into query, key and value."""
    groups, hidden_size = config["num_key_value_heads"], weight.shape[-1]
    heads_per_group = config["num_attention_heads"] // groups + 2
    grouped = weight.view(groups, heads_per_group, config["head_dim"], hidden_size)
    return [part.reshape(-1, hidden_size) for part in (grouped[:, :-2], grouped[:, -2], grouped[:, -1])]


class MegatronFormat(Format):
    """Megatron's format torch_dist. Megatron itself cannot run here, so a checkpoint is opened as a Llama."""

    name = MEGATRON
    outputs = (MEGATRON, HF)
    files = "an iter_* folder (Megatron)"

    def recognizes(self, folder: Path) -> bool:
        return any((folder / name).exists() for name in (TRACKER, ".metadata")) or any(folder.glob("iter_*"))

    def open(self, folder: Path, scheme: Scheme | None = None) -> OpenCheckpoint:
        """Open a checkpoint as a Llama under its scheme.

        :param scheme: scheme of a checkpoint whose arguments name none.
        :raises LNSConfigError: if Llama cannot represent this model, with the reasons, or if
            :func:`~olmo_lns.export.torch_dist.read` raises.
        """
        saved = read(folder)
        scheme = saved.scheme(scheme)
        with reporting_load_errors(folder):  # arguments of another type than the model needs
            values = _llama_config(saved)
            weights = _llama_weights(saved, values)
        model = huggingface.build(values, weights, folder)
        max_length = values["max_position_embeddings"]
        stock = OpenCheckpoint(model, MEGATRON, PRE_LN, folder, huggingface.settings(model), max_length=max_length)
        stock.dtype = widest(entry.properties.dtype for entry in saved.tensors.values())
        return huggingface.with_scheme(stock, scheme)

    def fold_tensors(self, folder: Path, out: Path, scheme: Scheme | None = None) -> str:
        """Fold a checkpoint, and write one that stock Megatron loads with ``--finetune``.

        :param scheme: scheme of a checkpoint whose arguments name none.
        :raises LNSConfigError: if there is nothing to fold, a value is not finite, or
            :func:`~olmo_lns.export.torch_dist.read` raises.
        """
        saved = read(folder)
        scheme = saved.scheme(scheme)
        if scheme.is_pre_ln:
            raise LNSConfigError(f"{folder} is Pre-LN, so there is nothing to fold. Use the checkpoint as it is.")
        tensors = saved.weights()
        for norm in saved.norm_parameters():
            numbers = range(1, saved.n_layers + 1) if norm.layer_number is None else [norm.layer_number]
            scales = [scheme.plan(number, saved.n_layers, norm.sub_layer).norm_scale for number in numbers]
            factor, shift = torch.tensor(scales, dtype=torch.float64), saved.shift if norm.is_weight else 0.0
            tensors[norm.name] = multiplied(tensors[norm.name], factor, None, shift)
        check_finite(tensors.items())
        write(saved, tensors, out)
        return (
            f"{saved.folder.name} was written in Megatron's format torch_dist. Load it with --finetune, without "
            "--layernorm-scaling."
        )

    def folded(self, opened: OpenCheckpoint, dtype: torch.dtype | None = None) -> OpenCheckpoint:
        """Fold the Llama as which a checkpoint was opened."""
        return huggingface.FORMAT.folded(opened, dtype)


FORMAT = MegatronFormat()
