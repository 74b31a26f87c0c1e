"""Megatron Bridge on a CPU, over Transformer Engine's Python; prints one JSON object.

PYTHONOPTIMIZE=1 python -m support.bridge_worker FOLDER      (TE asserts that there is a GPU)
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import traceback
from pathlib import Path
from typing import Any, Callable

from support import te_python
from support.megatron_cpu import single_process

te_python.install()

import torch  # noqa: E402

from support import megatron_tiny as tiny  # noqa: E402


def local_spec(config: Any) -> Any:
    """Of Megatron's local layers: a module-level function, which ``run_config.yaml`` can name."""
    return tiny.local_spec(config)


def provider(**changes: Any) -> Any:
    from megatron.bridge.models.gpt_provider import GPTModelProvider

    return GPTModelProvider(
        num_layers=tiny.LAYERS, hidden_size=tiny.HIDDEN, num_attention_heads=4, ffn_hidden_size=64, seq_length=16,
        normalization="RMSNorm", add_bias_linear=False, gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, vocab_size=tiny.VOCAB, position_embedding_type="rope",
        use_cpu_initialization=True, init_method_std=0.2, gradient_accumulation_fusion=False,
        hidden_dropout=0.0, attention_dropout=0.0, apply_rope_fusion=False, masked_softmax_fusion=False,
        transformer_layer_spec=local_spec, **changes,
    )  # fmt: skip


def built(cfg: Any) -> Any:
    cfg.finalize()
    torch.manual_seed(1)
    return cfg.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True)


def loss(model: list[Any]) -> float:
    return float(tiny.loss_of(model[0], tiny.batch()).detach())


def hooked() -> list[Any]:
    """Stock, drawn without scaled initialization, with hooks: shares nothing with the plugin."""
    cfg = provider()
    cfg.finalize()
    cfg.output_layer_init_method = cfg.init_method
    model = built(cfg)
    tiny.hook_reference(model[0])
    return model


def routes(folder: Path) -> dict[str, Any]:
    """The config and the spec, each against hooks."""
    from olmo_lns.integrations.megatron import apply, layer_spec

    applied, wrapped, stock = provider(), provider(), built(provider())
    apply(applied)
    wrapped.transformer_layer_spec = functools.partial(layer_spec, spec=local_spec)
    found = {"reference": loss(hooked()), "stock": loss(stock)}
    return found | {"apply": loss(built(applied)), "layer_spec": loss(built(wrapped))}


def round_trip(folder: Path) -> dict[str, Any]:
    """The Bridge's own checkpoint: its run_config.yaml and its weights, and what other providers are told."""
    from megatron.bridge.training.checkpointing import _load_model_weights_from_checkpoint
    from megatron.bridge.training.model_load_save import load_megatron_model, save_megatron_model

    from olmo_lns.integrations.megatron import apply

    cfg = provider()
    apply(cfg, scheme="sandwich_depth:exponent=0.25")
    model = built(cfg)
    save_megatron_model(model, folder / "bridge")
    (saved,) = (folder / "bridge").glob("iter_*")
    loaded = load_megatron_model(str(saved), use_cpu_init=True)
    return {
        "saved": loss(model),
        "loaded": loss(loaded),
        "refused": refusal(lambda: _load_model_weights_from_checkpoint(str(saved), built(provider()))),
    }


def of_megatron_lm(folder: Path) -> dict[str, Any]:
    """A checkpoint of ``pretrain_gpt.py --layernorm-scaling`` through the Bridge's loader."""
    import dataclasses
    from unittest import mock

    from megatron.bridge.training import model_load_save
    from megatron.core import dist_checkpointing

    from olmo_lns.integrations.megatron import apply

    cfg = tiny.config(init_method_std=0.2)
    apply(cfg)
    model = tiny.build(cfg)
    # What Megatron-LM 0.15 saves, as far as the Bridge asks for it.
    values = {f.name: getattr(cfg, f.name) for f in dataclasses.fields(tiny.config())}
    values = {k: v for k, v in values.items() if isinstance(v, (bool, int, float, str, torch.dtype, type(None)))}
    values |= dict.fromkeys(
        ("heterogeneous_layers_config_path", "decoder_first_pipeline_num_layers", "num_experts", "spec",
         "decoder_last_pipeline_num_layers", "mtp_num_layers", "rope_scaling_factor")
    ) | dict.fromkeys(
        ("multi_latent_attention", "apply_layernorm_1p", "overlap_p2p_comm", "fp8_param_gather", "squared_relu",
         "no_persist_layer_norm", "init_method_xavier_uniform", "group_query_attention", "is_hybrid_model", "qk_l2_norm",
         "use_legacy_models", "record_memory_history", "moe_use_legacy_grouped_gemm", "use_kitchen", "fp16_lm_cross_entropy",
         "use_rope_scaling", "bias_gelu_fusion", "bias_swiglu_fusion", "init_model_with_meta_device"), False,
    )  # fmt: skip
    values |= {"swiglu": True, "norm_epsilon": cfg.layernorm_epsilon, "cp_comm_type": ["p2p"], "rotary_percent": 1.0}
    values |= {"transformer_impl": "local", "padded_vocab_size": tiny.VOCAB, "position_embedding_type": "rope"}
    values |= {
        "config_logger_dir": "",
        "max_position_embeddings": 16,
        "untie_embeddings_and_output_weights": True,
        "rotary_base": 10000,
    }
    values |= {"make_vocab_size_divisible_by": 128, "tokenizer_type": "NullTokenizer", "vocab_size": tiny.VOCAB - 1}
    values |= {
        "layernorm_scaling": True,
        "layernorm_scaling_exponent": 0.5,
        "rotary_seq_len_interpolation_factor": None,
    }
    saved = folder / "lm" / "iter_0000001"
    saved.mkdir(parents=True)
    state = {"args": argparse.Namespace(**values), "iteration": 1, "model": model.sharded_state_dict()}
    dist_checkpointing.save(state, str(saved))
    tokenizer = mock.Mock(vocab_size=tiny.VOCAB)
    with mock.patch.object(model_load_save, "build_tokenizer", lambda cfg: tokenizer):
        loaded = model_load_save.load_megatron_model(str(saved), model_type="gpt", use_cpu_init=True)
    return {"saved": loss([model]), "loaded": loss(loaded)}


def hugging_face(folder: Path) -> dict[str, Any]:
    """Into and out of transformers' classes, which know no factor."""
    from megatron.bridge import AutoBridge
    from transformers import LlamaConfig, LlamaForCausalLM

    from olmo_lns.integrations.megatron import apply

    config = LlamaConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, intermediate_size=64,
        vocab_size=128, architectures=["LlamaForCausalLM"], torch_dtype="float32",
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "llama")
    auto = AutoBridge.from_hf_pretrained(str(folder / "llama"))
    found: dict[str, Any] = {}
    for name in ("stock", "lns"):
        cfg = auto.to_megatron_provider(load_weights=False)
        cfg.transformer_layer_spec, cfg.gradient_accumulation_fusion, cfg.apply_rope_fusion = local_spec, False, False
        cfg.masked_softmax_fusion = False
        if name == "lns":
            apply(cfg)
        model = built(cfg)
        found[f"export, {name}"] = refusal(lambda model=model: list(auto.export_hf_weights(model)))
        found[f"import, {name}"] = refusal(lambda model=model: auto.load_hf_weights(model))
    return found


def refusal(call: Callable[[], Any]) -> str:
    from olmo_lns.errors import LNSError

    try:
        call()
    except LNSError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> int:
    from olmo_lns.integrations.megatron import register

    register()
    results: dict[str, Any] = {}
    with single_process():
        for case in (routes, round_trip, of_megatron_lm, hugging_face):
            try:
                results[case.__name__] = case(Path(sys.argv[1]))
            except Exception:
                results[case.__name__] = {"failed": traceback.format_exc()}
    print("RESULTS " + json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
