"""Megatron Bridge from PyPI: its providers, its checkpoints, its loader of Megatron-LM checkpoints, its exports.

test_te.py runs this file, since the Bridge imports Transformer Engine.
"""

import argparse
import dataclasses
import functools
import importlib.util
from unittest import mock

import pytest
from support import te_python

for _name in ("megatron.bridge", "modelopt"):
    if importlib.util.find_spec(_name) is None:
        pytest.skip(
            f"{_name} is not installed: pip install --no-deps megatron-bridge==0.3.1 nvidia-modelopt pulp triton "
            "'transformers<5' 'tokenizers<0.23' 'huggingface_hub<1'",
            allow_module_level=True,
        )
try:
    te_python.install()
except te_python.Unavailable as reason:
    pytest.skip(str(reason), allow_module_level=True)

import torch  # noqa: E402
from support import megatron_tiny as tiny  # noqa: E402

from olmo_lns.errors import CheckpointMismatchError, LNSConfigError  # noqa: E402
from olmo_lns.integrations.megatron import apply, layer_spec  # noqa: E402


def provider():
    from megatron.bridge.models.gpt_provider import GPTModelProvider

    return GPTModelProvider(
        num_layers=tiny.LAYERS, hidden_size=tiny.HIDDEN, num_attention_heads=4, ffn_hidden_size=64, seq_length=16,
        normalization="RMSNorm", add_bias_linear=False, gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, vocab_size=tiny.VOCAB, position_embedding_type="rope",
        use_cpu_initialization=True, init_method_std=0.2, gradient_accumulation_fusion=False,
        hidden_dropout=0.0, attention_dropout=0.0, apply_rope_fusion=False, masked_softmax_fusion=False,
        transformer_layer_spec=tiny.local_spec,  # run_config.yaml names it
    )  # fmt: skip


def built(cfg):
    cfg.finalize()
    torch.manual_seed(1)
    return cfg.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True)


def loss(model):
    return float(tiny.loss_of(model[0], tiny.batch()).detach())


def test_a_provider_under_apply_or_layer_spec_equals_the_hooked_model():
    applied, wrapped, plain = provider(), provider(), provider()
    apply(applied)
    wrapped.transformer_layer_spec = functools.partial(layer_spec, spec=tiny.local_spec)
    plain.finalize()
    plain.output_layer_init_method = plain.init_method
    reference = built(plain)
    tiny.hook_reference(reference[0])
    expected = pytest.approx(loss(reference), rel=1e-6)
    assert loss(built(applied)) == expected and loss(built(wrapped)) == expected
    assert loss(built(provider())) != pytest.approx(loss(reference), rel=1e-4)


def test_run_config_restores_the_scheme_and_weights_of_another_are_refused(tmp_path):
    from megatron.bridge.training.checkpointing import _load_model_weights_from_checkpoint
    from megatron.bridge.training.model_load_save import load_megatron_model, save_megatron_model

    cfg = provider()
    apply(cfg, scheme="sandwich_depth:exponent=0.25")
    model = built(cfg)
    save_megatron_model(model, tmp_path)
    (saved,) = tmp_path.glob("iter_*")
    assert loss(load_megatron_model(str(saved), use_cpu_init=True)) == loss(model)
    with pytest.raises(CheckpointMismatchError, match="was saved with sandwich_depth:exponent=0.25"):
        _load_model_weights_from_checkpoint(str(saved), built(provider()))


def test_a_checkpoint_of_megatron_lm_keeps_its_scheme(tmp_path):
    """The Bridge's loader reads a checkpoint of ``pretrain_gpt.py --layernorm-scaling``."""
    from megatron.bridge.training import model_load_save
    from megatron.core import dist_checkpointing

    cfg = tiny.config(init_method_std=0.2)
    apply(cfg)
    model = tiny.build(cfg)
    # What Megatron-LM 0.15 saves, as far as the Bridge asks for it.
    values = {f.name: getattr(cfg, f.name) for f in dataclasses.fields(tiny.config())}
    values = {k: v for k, v in values.items() if isinstance(v, (bool, int, float, str, torch.dtype, type(None)))}
    values |= dict.fromkeys(
        ("heterogeneous_layers_config_path", "decoder_first_pipeline_num_layers", "num_experts", "spec",
         "decoder_last_pipeline_num_layers", "mtp_num_layers", "rope_scaling_factor",
         "rotary_seq_len_interpolation_factor")
    ) | dict.fromkeys(
        ("multi_latent_attention", "apply_layernorm_1p", "overlap_p2p_comm", "fp8_param_gather", "squared_relu",
         "no_persist_layer_norm", "init_method_xavier_uniform", "group_query_attention", "is_hybrid_model", "qk_l2_norm",
         "use_legacy_models", "record_memory_history", "moe_use_legacy_grouped_gemm", "use_kitchen", "fp16_lm_cross_entropy",
         "use_rope_scaling", "bias_gelu_fusion", "bias_swiglu_fusion", "init_model_with_meta_device"), False,
    ) | dict(
        swiglu=True, norm_epsilon=cfg.layernorm_epsilon, cp_comm_type=["p2p"], rotary_percent=1.0, rotary_base=10000,
        transformer_impl="local", padded_vocab_size=tiny.VOCAB, position_embedding_type="rope", config_logger_dir="",
        max_position_embeddings=16, untie_embeddings_and_output_weights=True, make_vocab_size_divisible_by=128,
        tokenizer_type="NullTokenizer", vocab_size=tiny.VOCAB - 1, layernorm_scaling=True,
        layernorm_scaling_exponent=0.5,
    )  # fmt: skip
    saved = tmp_path / "iter_0000001"
    saved.mkdir()
    state = {"args": argparse.Namespace(**values), "iteration": 1, "model": model.sharded_state_dict()}
    dist_checkpointing.save(state, str(saved))
    with mock.patch.object(model_load_save, "build_tokenizer", lambda cfg: mock.Mock(vocab_size=tiny.VOCAB)):
        loaded = model_load_save.load_megatron_model(str(saved), model_type="gpt", use_cpu_init=True)
    assert loss(loaded) == loss([model])


def test_exports_to_and_imports_from_stock_classes_are_refused_under_lns(tmp_path):
    from megatron.bridge import AutoBridge
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, intermediate_size=64,
        vocab_size=128, architectures=["LlamaForCausalLM"], torch_dtype="float32",
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    auto = AutoBridge.from_hf_pretrained(str(tmp_path))
    models = []
    for scheme in ("", "lns"):
        cfg = auto.to_megatron_provider(load_weights=False)
        cfg.transformer_layer_spec, cfg.gradient_accumulation_fusion = tiny.local_spec, False
        cfg.apply_rope_fusion = cfg.masked_softmax_fusion = False
        if scheme:
            apply(cfg)
        models.append(built(cfg))
    stock, lns = models
    assert len(list(auto.export_hf_weights(stock))) > 10
    auto.load_hf_weights(stock)
    with pytest.raises(LNSConfigError, match="for a class without lns"):
        list(auto.export_hf_weights(lns))
    with pytest.raises(CheckpointMismatchError, match="saved with Pre-LN"):
        auto.load_hf_weights(lns)
