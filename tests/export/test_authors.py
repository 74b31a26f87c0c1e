"""LLaMA checkpoints in the layout of the paper's authors are folded, or refused with a reason."""

import json
import shutil

import pytest
import torch
from support.exports import export, greedy, load_hf, logits, relative, save_olmo
from support.olmo_models import tokens

from olmo_lns.cli import main
from olmo_lns.errors import LNSConfigError
from olmo_lns.export.comparison import differences
from olmo_lns.export.model_folder import Authors

IDS = tokens(batch=2, length=16)
#: The keys of the authors' configs/llama_130m.json, with smaller values.
CONFIG = json.loads("""{
    "architectures": ["LLaMAForCausalLM"], "bos_token_id": 0, "eos_token_id": 1, "hidden_act": "silu", "hidden_size": 32,
    "intermediate_size": 88, "initializer_range": 0.02, "max_sequence_length": 1024, "model_type": "llama",
    "num_attention_heads": 4, "num_hidden_layers": 5, "pad_token_id": -1, "rms_norm_eps": 1e-06,
    "transformers_version": "4.28.1", "use_cache": true, "vocab_size": 64
}""")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """(folder as the authors' script saves it, logits with the factor, the model with the factor).

    The factor is applied as in their modeling_llama: the norm's output times 1/sqrt(index + 1).
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("authors") / "model_100"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    torch.manual_seed(0)
    usable = {k: v for k, v in CONFIG.items() if k not in ("architectures", "model_type", "transformers_version")}
    model = LlamaForCausalLM(LlamaConfig(**usable | {"pad_token_id": None})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    state = dict(model.state_dict())
    for index in range(CONFIG["num_hidden_layers"]):  # transformers 4.31 saved RoPE's frequencies too
        state[f"model.layers.{index}.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    torch.save(state, folder / "pytorch_model.bin")
    torch.save({"update_step": 100}, folder / "optimizer.pt")
    for index, layer in enumerate(model.model.layers):
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.register_forward_hook(lambda m, i, output, number=index + 1: output / number**0.5)
    return folder, logits(model, IDS), model


def test_a_checkpoint_of_the_authors_folds_into_a_stock_llama(checkpoint, tmp_path, capsys):
    folder, expected, model = checkpoint
    out = tmp_path / "out"
    assert export(folder, out, "--format", "hf", "--source", "authors") == 0
    assert "taken on your word" in capsys.readouterr().out
    stock = load_hf(out)
    assert relative(logits(stock, IDS), expected) <= 1e-5
    assert greedy(stock, IDS[:, :4]) == greedy(model, IDS[:, :4])
    config = json.loads((out / "config.json").read_text())
    said = [config[key] for key in ("lns", "bos_token_id", "eos_token_id", "pad_token_id")]
    assert said == ["folded", 0, 1, None]
    assert main(["verify", str(folder), str(out), "--source", "authors", "--length", "16"]) == 0


def test_the_exponent_that_the_command_gives_is_folded_and_verified(checkpoint, tmp_path):
    """Newer transformers saves safetensors; only the command gives the exponent, and verify reads it in the record."""
    from safetensors.torch import load_file, save_file

    copy, out = shutil.copytree(checkpoint[0], tmp_path / "copy"), tmp_path / "out"
    state = torch.load(copy / "pytorch_model.bin", weights_only=True)
    save_file(state, copy / "model.safetensors")
    (copy / "pytorch_model.bin").unlink()
    assert export(copy, out, "--source", "authors", "--exponent", "0.25") == 0
    name = "model.layers.3.input_layernorm.weight"
    torch.testing.assert_close(load_file(out / "model.safetensors")[name], state[name] * 4**-0.25)
    assert main(["verify", str(copy), str(out), "--source", "authors", "--length", "16"]) == 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "gpt2"}, "not the config of a Llama"),
        ({"num_hidden_layers": 6}, "lacks the weight model.layers.5"),
        ({"num_hidden_layers": 10**7}, "says 10000000 layers, but it holds only"),
        ({"hidden_size": None}, "missing or wrong value"),
        ({"lns": "folded"}, "the factor is inside the weights already"),
    ],
)
def test_a_wrong_config_is_refused(checkpoint, tmp_path, capsys, change, reason):
    copy = shutil.copytree(checkpoint[0], tmp_path / "copy")
    (copy / "config.json").write_text(json.dumps(CONFIG | change))
    assert export(copy, tmp_path / "out", "--format", "hf", "--source", "authors") == 1
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_of_the_authors_needs_its_option_and_the_format_hf(checkpoint, tmp_path, capsys):
    assert export(checkpoint[0], tmp_path / "out", "--format", "hf") == 1
    assert "say --source authors" in capsys.readouterr().err
    assert export(checkpoint[0], tmp_path / "out", "--source", "authors", "--format", "olmo") == 1
    assert "is the paper's LLaMA, which is written as hf" in capsys.readouterr().err
    save_olmo(tmp_path / "olmo", layer_norm_type="lns_rms")
    with pytest.raises(LNSConfigError, match="the paper's LLaMA is not written as olmo: it is the export of something"):
        differences(Authors(), checkpoint[0], tmp_path / "olmo", None)
