"""The files decide, not the config: the dtype of an export, and whether its head is tied."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.exports import export, refused, relative, verify
from support.transformers_models import hooked, inputs, stock

from olmo_lns.integrations.transformers import apply, register

register()
transformers = pytest.importorskip("transformers")

EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


def save(folder, **changes):
    """Save a Llama under LNS; returns the reference with hooks."""
    model = stock("llama", **changes)
    reference = hooked("llama", model)
    apply(model, initialization="upstream", trained=True).save_pretrained(folder)
    return reference


def set_config(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def set_weights(folder, change):
    path = folder / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path, {"format": "pt"})


def round_some(weights, keep):
    for name, tensor in weights.items():
        if not keep(name):
            weights[name] = tensor.bfloat16()


def exported(folder):
    return load_file(folder / "model.safetensors")


def output(model):
    with torch.no_grad():
        return model(**inputs("llama")).logits.double()


@pytest.mark.parametrize("asked", ["keep", "fp32"])
def test_fp32_weights_beside_a_config_that_says_bfloat16(asked, tmp_path):
    """accelerate's save_model writes the weights of an autocast run in fp32; config.json keeps the loaded dtype."""
    accelerate = pytest.importorskip("accelerate")
    model = apply(stock("llama"), initialization="upstream", trained=True)
    expected = output(model)
    accelerate.Accelerator(cpu=True).save_model(model, tmp_path / "lns")
    model.config.save_pretrained(tmp_path / "lns")
    set_config(tmp_path / "lns", dtype="bfloat16", torch_dtype="bfloat16", architectures=["LNSLlamaForCausalLM"])
    assert export(tmp_path / "lns", tmp_path / "out", "--dtype", asked) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config.get("dtype", config.get("torch_dtype")) == "float32"
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert loaded.dtype == torch.float32 and relative(output(loaded), expected) <= 1e-6
    assert verify(tmp_path / "lns", tmp_path / "out") == 0


@pytest.mark.parametrize(
    ("keep", "dtype"),
    [
        (lambda name: "norm" in name, torch.float32),  # norms in fp32, matrices in bf16
        (lambda name: name == EMBEDDING, torch.float32),  # the first tensor of the file alone
        (lambda name: False, torch.bfloat16),  # all in bf16, config.json says float32
    ],
)
def test_an_export_has_the_widest_dtype_of_the_files(keep, dtype, tmp_path):
    save(tmp_path / "lns")
    set_weights(tmp_path / "lns", lambda weights: round_some(weights, keep))
    source = exported(tmp_path / "lns")
    assert export(tmp_path / "lns", tmp_path / "out") == 0
    weights = exported(tmp_path / "out")
    assert {weight.dtype for weight in weights.values()} == {dtype}
    for name, weight in weights.items():
        if "layernorm" not in name:  # the others have a factor
            assert torch.equal(weight, source[name].to(dtype)), name


@pytest.mark.parametrize("file", ["shards", "pickle"])
def test_sharded_and_pickled_weights_keep_their_dtype(file, tmp_path):
    save(tmp_path / "lns")
    weights = exported(tmp_path / "lns")
    (tmp_path / "lns" / "model.safetensors").unlink()
    if file == "pickle":
        torch.save(weights, tmp_path / "lns" / "pytorch_model.bin")
    else:  # a shard in bf16, the other in fp32
        parts = {"model-00001-of-00002.safetensors": [], "model-00002-of-00002.safetensors": []}
        for name in sorted(weights):
            parts[f"model-0000{1 + ('norm' in name)}-of-00002.safetensors"].append(name)
        for name, keys in parts.items():
            tensors = {key: weights[key] if "norm" in key else weights[key].bfloat16() for key in keys}
            save_file(tensors, tmp_path / "lns" / name, {"format": "pt"})
        index = {"metadata": {}, "weight_map": {key: name for name, keys in parts.items() for key in keys}}
        (tmp_path / "lns" / "model.safetensors.index.json").write_text(json.dumps(index))
    set_config(tmp_path / "lns", dtype="bfloat16", torch_dtype="bfloat16")
    assert export(tmp_path / "lns", tmp_path / "out") == 0
    assert torch.equal(exported(tmp_path / "out")[NORM], weights[NORM])


def test_a_tied_config_with_another_head_is_refused(tmp_path, capsys):
    save(tmp_path / "lns")
    set_config(tmp_path / "lns", tie_word_embeddings=True)
    line = refused(capsys, tmp_path / "lns", tmp_path / "out")
    assert "tie_word_embeddings=true" in line and HEAD in line
    set_weights(tmp_path / "lns", lambda weights: weights.update({HEAD: weights[HEAD][:10].clone()}))
    refused(capsys, tmp_path / "lns", tmp_path / "out")


@pytest.mark.parametrize("saved_names", [(EMBEDDING,), (EMBEDDING, HEAD)])
def test_a_tied_head_is_exported_whether_saved_once_or_twice(saved_names, tmp_path):
    """torch.save writes both names of a shared tensor, save_pretrained one."""
    reference = save(tmp_path / "lns", tie_word_embeddings=True)

    def change(weights):
        shared = weights.pop(EMBEDDING, None)
        shared = weights.pop(HEAD) if shared is None else shared
        weights.update({name: shared.clone() for name in saved_names})

    set_weights(tmp_path / "lns", change)
    assert export(tmp_path / "lns", tmp_path / "out") == 0
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert relative(output(loaded), output(reference)) <= 1e-5


@pytest.mark.parametrize(("tied", "lost"), [(False, (HEAD,)), (True, (EMBEDDING, HEAD))])
def test_a_missing_head_or_embedding_is_refused(tied, lost, tmp_path, capsys):
    save(tmp_path / "lns", tie_word_embeddings=tied)
    set_weights(tmp_path / "lns", lambda weights: [weights.pop(name, None) for name in lost])
    assert "is missing" in refused(capsys, tmp_path / "lns", tmp_path / "out")
