"""A model leaves torchtitan by its own conversion to Hugging Face's format, then `olmo-lns export`."""

import json
import os
import runpy
import sys
from pathlib import Path

import pytest

pytest.importorskip("torchtitan.config.override", reason="needs torchtitan 0.3 (make test-torchtitan)")
pytest.importorskip("transformers", reason="the exported model runs in transformers")

import torch
import torch.distributed.checkpoint as dcp
import transformers
from safetensors.torch import save_file
from support import torchtitan_launch as launches
from support import torchtitan_models as titan

from olmo_lns import cli

TOKENS = torch.arange(16) * 7 % 100


def config_of(spec):
    """The config of transformers for torchtitan's debug model of Llama 3."""
    layer = spec.model.layers[0]
    return transformers.LlamaConfig(
        vocab_size=spec.model.vocab_size,
        hidden_size=spec.model.dim,
        intermediate_size=layer.feed_forward.w1.out_features,
        num_hidden_layers=len(spec.model.layers),
        num_attention_heads=layer.attention.n_heads,
        num_key_value_heads=layer.attention.n_kv_heads or layer.attention.n_heads,
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


def logits(folder):
    with torch.no_grad():
        return transformers.AutoModelForCausalLM.from_pretrained(folder)(TOKENS[None]).logits[0]


def folded(converted, spec):
    """Put the config beside converted weights, and fold them with the command of the guide; return the folder."""
    (converted / "config.json").write_text(json.dumps(config_of(spec).to_dict()))
    out = converted.with_name(f"{converted.name}-folded")
    assert not cli.main(["export", str(converted), str(out), "--scheme", "lns", "--tokenizer", "none"])
    return out


def test_a_converted_model_is_folded_and_has_the_logits_of_the_trained_one(tmp_path, monkeypatch):
    titan.eager_attention(monkeypatch)
    spec = titan.config("llama3")
    model = titan.with_weights(titan.build("llama3", titan.LNS, spec=spec))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):  # gains that a run has trained
                parameter.uniform_(0.5, 1.5)
    converted = tmp_path / "converted"
    converted.mkdir()
    state = spec.state_dict_adapter(spec.model, None).to_hf(model.state_dict())
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, converted / "model.safetensors")
    expected = titan.run(model)[0].reshape(16, -1)
    torch.testing.assert_close(logits(folded(converted, spec)), expected, rtol=1e-3, atol=1e-4)
    assert (logits(converted) - expected).abs().max() > 0.01


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Checkpoints of two equal runs under LNS: torchtitan's own, and weights in Hugging Face's format."""
    folder = launches.folder(tmp_path_factory.mktemp("export"))
    lns = ("--override.imports", titan.LNS, "--checkpoint.enable", "--checkpoint.interval", "10")
    hf = ("--checkpoint.last_save_in_hf", "--checkpoint.last_save_model_only")
    own, other = launches.run(folder, launches.Launch("own", lns), launches.Launch("hf", (*lns, *hf)))
    own.ok()
    step = other.ok().log
    assert "the Hugging Face format cannot name lns, and other software would run these weights as Pre-LN" in step
    return folder / "own" / "checkpoint" / "step-2", folder / "hf" / "checkpoint" / "step-2"


def trained(checkpoint):
    """The model of a run under LNS, with the weights of a checkpoint of torchtitan."""
    model = titan.with_weights(titan.build("llama3", titan.LNS))
    dcp.load(state := dict(model.state_dict()), checkpoint_id=checkpoint)
    model.load_state_dict(state)
    return model


@pytest.mark.slow
def test_weights_that_a_run_saves_in_hugging_faces_format_are_folded(run, monkeypatch):
    titan.eager_attention(monkeypatch)
    own, converted = run
    expected = titan.run(trained(own))[0].reshape(16, -1)
    torch.testing.assert_close(logits(folded(converted, titan.config("llama3"))), expected, rtol=1e-3, atol=1e-4)
    assert (logits(converted) - expected).abs().max() > 0.01


@pytest.mark.slow
def test_a_checkpoint_that_torchtitans_script_converts_is_folded(run, tmp_path, monkeypatch):
    script = Path(os.environ.get("TORCHTITAN_SRC") or "none", "scripts/checkpoint_conversion/convert_to_hf.py")
    if not script.is_file():
        pytest.skip("needs a checkout of torchtitan (TORCHTITAN_SRC); its wheel has no scripts")
    titan.eager_attention(monkeypatch)
    own, _ = run
    options = ["--model_flavor", "debugmodel", "--hf_assets_path", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [str(script), str(own), str(tmp_path / "converted"), *options])
    runpy.run_path(str(script), run_name="__main__")
    expected = titan.run(trained(own))[0].reshape(16, -1)
    found = logits(folded(tmp_path / "converted", titan.config("llama3")))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
