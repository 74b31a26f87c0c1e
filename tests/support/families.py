"""Every causal-LM family of transformers as a tiny model, and the form of its blocks.

families.json holds for each family a label, the list of blocks, and the paths of a block's norms in the order of their calls. It
was read off the additions of a real forward, without code of the package:

    pre        each branch reads the stream through a norm; two branches, one after the other
    parallel   the same, and the branches read one stream
    sandwich   each branch reads the stream through a norm, and one ends in another norm
    branch     each branch reads the stream itself and ends in a norm
    post       a norm's output is the stream that goes on
    other      anything else, with a note
"""

from pathlib import Path

import torch

FAMILIES_FILE = Path(__file__).with_name("families.json")
VOCABULARY, WIDTH, LAYERS, LENGTH = 96, 32, 3, 6

#: Value -> the fields of a config that get it. What a family does not have is left out.
_SIZES = {
    WIDTH: "hidden_size d_model n_embd dim embedding_size word_embed_proj_dim lru_width attention_hidden_size dim_model "
    "embedding_dim hidden_dim decoder_hidden_size",
    64: "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim n_inner ffn_hidden_size d_inner dim_ff d_ff dff "
    "feed_forward_size moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size max_seq_len "
    "max_position_embeddings n_positions n_ctx max_target_positions block_ff_dim intermediate_size_mlp expert_ffn_hidden_size "
    "moe_shared_expert_intermediate_size mamba_intermediate feedforward_size dense_intermediate_size",
    VOCABULARY: "vocab_size vocab_size_per_layer_input decoder_vocab_size",
    LAYERS: "num_hidden_layers num_layers n_layer n_layers decoder_layers encoder_layers num_decoder_layers "
    "num_encoder_layers num_blocks",
    4: "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads num_experts "
    "num_local_experts n_routed_experts num_decoder_attention_heads num_encoder_attention_heads "
    "index_n_heads mamba_n_heads moe_num_experts",
    2: "num_key_value_heads num_experts_per_tok moe_topk moe_k top_k_experts first_k_dense_replace_limit n_groups",
    8: "head_dim kv_channels attention_head_size v_head_dim qk_rope_head_dim qk_nope_head_dim rotary_dim",
    16: "index_head_dim kv_lora_rank q_lora_rank sliding_window chunk_size state_size mamba_d_state ssm_state_size",
    1: "n_group topk_group n_shared_experts moe_num_shared_experts mamba_n_groups pad_token_id bos_token_id eos_token_id "
    "decoder_start_token_id",
}  # fmt: skip
SIZES = {name: value for value, names in _SIZES.items() for name in names.split()}
#: Family -> fields that the table above gets wrong or does not know.
OVERRIDES: dict[str, dict] = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "gemma3n_text": {
        "intermediate_size": [64] * LAYERS,
        "num_kv_shared_layers": 0,
        "activation_sparsity_pattern": [0.0] * LAYERS,
    },
    "gpt_neo": {"attention_types": [[["global", "local", "global"], 1]]},
    "dots3_note_text": {"per_layer_config": {}, "num_key_value_heads": 4, "head_dim": 16},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "musicgen": {"decoder": {"num_codebooks": 1}},
    "musicgen_melody": {"decoder": {"num_codebooks": 1}},
    "longcat_flash": {"head_dim": 8},
    "zamba": {
        "layers_block_type": ["hybrid", "mamba", "hybrid"],
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "nemotron": {"num_key_value_heads": 2},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention", "full_attention"]},
    "reformer": {"axial_pos_shape": [2, 3], "axial_pos_embds_dim": [16, 16], "attn_layers": ["local", "lsh", "local"]},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
    "zamba2": {
        "layer_types": ["mamba", "hybrid", "mamba"],
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "n_mamba_heads": 4,
        "mamba_headdim": 16,
    },
}


def shrink(config, overrides=None):
    """A config of the same class whose sizes are tiny."""
    overrides, inner = overrides or {}, getattr(config, "sub_configs", {})
    mapped = getattr(config, "attribute_map", {})
    found = config.to_dict() | {name: getattr(config, name) for name in mapped if hasattr(config, name)}
    changes = {}
    for name, value in found.items():
        if name in inner and value is not None:
            changes[name] = shrink(getattr(config, name), overrides.get(name)).to_dict()
        elif name in SIZES and (type(value) is int or (value is None and name == "head_dim")):
            changes[name] = SIZES[name]
    if "kv_lora_rank" in found:  # latent attention: as many heads of keys as of queries
        changes["num_key_value_heads"] = 4
        changes.pop("head_dim", None)
    changes |= {name: value for name, value in overrides.items() if name not in inner}
    return type(config)(**{name: value for name, value in changes.items() if mapped.get(name) not in changes})


def families():
    """model_type -> class of the causal LM."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def config_of(model_type):
    """A tiny config of a family, of the class that its causal LM takes."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = shrink(CONFIG_MAPPING[model_type](), OVERRIDES.get(model_type))
    config._attn_implementation = "eager"
    if not isinstance(config, getattr(transformers, families()[model_type]).config_class):
        config = config.get_text_config(decoder=True)
    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    return config


def tiny(model_type, seed=0):
    """A tiny random model of a family in evaluation mode, and ids of shape (1, 6) that it takes."""
    import transformers

    torch.manual_seed(seed)
    model = getattr(transformers, families()[model_type])(config_of(model_type)).eval().float()
    with torch.no_grad():  # away from the near-identity of the initial state
        for parameter in model.parameters():
            parameter.mul_(4.0) if parameter.dim() > 1 else parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model, torch.randint(3, VOCABULARY, (1, LENGTH), generator=torch.Generator().manual_seed(1))


def forward(model, ids):
    """Logits of shape (1, 6, vocabulary)."""
    cache = {"use_cache": False} if "use_cache" in model.config.get_text_config(decoder=True).to_dict() else {}
    return model(input_ids=ids, **cache).logits
