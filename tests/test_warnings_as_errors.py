"""With `python -W error`, the package does what stock software does there: a warning of its own would stop a launch."""

import subprocess
import sys

import pytest
import torch
from support.other_models import IDS, Model

import olmo_lns

pytest.importorskip("transformers")

#: Builds a tiny Llama. Stock software must get through this first.
BUILD = """
import sys, torch, transformers
sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4)
model, ids = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)), torch.arange(8)[None]
"""
TRANSFORMERS = """
import olmo_lns
olmo_lns.plain_initialization(olmo_lns.apply(model))
model(input_ids=ids, labels=ids).loss.backward()
model.save_pretrained(sys.argv[1])
transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
olmo_lns.fold(model)
"""
ANY_MODEL = """
layer = torch.nn.TransformerEncoderLayer(32, 4, 48, norm_first=True, batch_first=True)
encoder, x = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), torch.randn(2, 8, 32)
olmo_lns.apply(encoder, example=x)
encoder(x).sum().backward()
record = olmo_lns.record(encoder)
olmo_lns.require(encoder, record)
olmo_lns.fold(encoder, example=x)
"""
COMMANDS = """
from olmo_lns.cli import main
assert main(["export", sys.argv[1], sys.argv[1] + "-folded"]) == 0
assert main(["verify", sys.argv[1], sys.argv[1] + "-folded"]) == 0
main(["doctor"])
"""


def run(code, folder):
    command = [sys.executable, "-W", "error", "-c", code, str(folder / "model")]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_nothing_of_the_package_warns(tmp_path):
    done = run(BUILD + TRANSFORMERS + ANY_MODEL + COMMANDS, tmp_path)
    if done.returncode and (stock := run(BUILD, tmp_path)).returncode:
        pytest.skip(f"stock transformers does not run with -W error here: {stock.stderr.splitlines()[-1:]}")
    assert done.returncode == 0 and "Warning" not in done.stderr, done.stdout[-1000:] + done.stderr[-3000:]
    assert "PASS" in done.stdout


def built_olmo():
    pytest.importorskip("olmo", reason="needs ai2-olmo")
    from support import olmo_models

    return olmo_models.build(perturb=False, layer_norm_type="rms"), olmo_models.tokens()


def built_gpt2():
    import transformers

    sizes = dict(vocab_size=64, n_embd=32, n_layer=3, n_head=4, n_positions=16)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)), torch.arange(8)[None]


def built_with_weight_norm():
    """A parametrized matrix is computed anew at each access, with a gradient."""
    model = Model()
    torch.nn.utils.parametrizations.weight_norm(model.layers["1"].up)
    return model, IDS


@pytest.mark.filterwarnings("error", "ignore:register_new_resolver:UserWarning")  # of stock OLMo
@pytest.mark.parametrize("build", [built_olmo, built_gpt2, built_with_weight_norm])
def test_a_model_whose_weights_require_a_gradient_is_scaled_and_folded_without_a_warning(build):
    model, example = build()
    assert all(parameter.requires_grad for parameter in model.parameters())
    olmo_lns.apply(model, example=example)
    olmo_lns.require(model, olmo_lns.record(model))
    olmo_lns.fold(model, example=example)
