"""A model leaves torchtitan by its own conversion to Hugging Face's format, then `olmo-lns export`."""

import json

import pytest

pytest.importorskip("torchtitan.config.override", reason="needs torchtitan 0.3 (make test-torchtitan)")
pytest.importorskip("transformers", reason="the exported model runs in transformers")

import torch
import transformers
from safetensors.torch import save_file
from support import torchtitan_models as titan

from olmo_lns import cli


def test_a_converted_model_is_folded_and_has_the_logits_of_the_trained_one(tmp_path, monkeypatch):
    titan.eager_attention(monkeypatch)
    spec = titan.config("llama3")
    model = titan.with_weights(titan.build("llama3", titan.LNS, spec=spec))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):  # gains that a run has trained
                parameter.uniform_(0.5, 1.5)
    attention = spec.model.layers[0].attention
    config = transformers.LlamaConfig(
        vocab_size=spec.model.vocab_size,
        hidden_size=spec.model.dim,
        intermediate_size=model.layers["0"].feed_forward.w1.out_features,
        num_hidden_layers=len(model.layers),
        num_attention_heads=attention.n_heads,
        num_key_value_heads=attention.n_kv_heads or attention.n_heads,
        rms_norm_eps=1e-5,
        max_position_embeddings=131072,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            **{"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
            "original_max_position_embeddings": 8192,
        },
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
        dtype="float32",
    )
    converted = tmp_path / "converted"
    converted.mkdir()
    state = spec.state_dict_adapter(spec.model, None).to_hf(model.state_dict())
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, converted / "model.safetensors")
    (converted / "config.json").write_text(json.dumps(config.to_dict()))

    assert cli.main(["export", str(converted), str(tmp_path / "folded"), "--scheme", "lns", "--tokenizer", "none"]) in (
        0,
        None,
    )
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folded")
    tokens = (torch.arange(16) * 7 % 100)[None]
    expected, _ = titan.run(model)
    with torch.no_grad():
        torch.testing.assert_close(exported(tokens).logits[0], expected.reshape(16, -1), rtol=1e-3, atol=1e-4)
        stock = transformers.AutoModelForCausalLM.from_pretrained(converted)
        assert (stock(tokens).logits[0] - expected.reshape(16, -1)).abs().max() > 0.01
