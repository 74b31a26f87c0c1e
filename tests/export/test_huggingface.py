"""transformers' folders: ours, and stock ones that were trained with LNS elsewhere, become stock models."""

import json

import pytest
import torch
from support.exports import byte_tokenizer, export, refused, relative, verify
from support.transformers_models import VOCABULARY, hooked, inputs, stock

from olmo_lns.cli import main
from olmo_lns.export.open import open_model
from olmo_lns.integrations.transformers import apply, register

register()
transformers = pytest.importorskip("transformers")


def output(model, kind):
    with torch.no_grad():
        return model(**inputs(kind)).logits.double()


@pytest.mark.parametrize(
    ("kind", "dtype"), [("llama", "fp32"), ("llama", "bf16"), ("olmo", "fp32"), ("gpt2", "bf16"), ("dinov2", "fp32")]
)
def test_a_folder_of_ours_becomes_a_stock_model(kind, dtype, tmp_path, capsys):
    """Olmo's norms have no gain: the factor goes into the layers that read them. DINOv2 takes images."""
    plain = stock(kind)
    expected = output(hooked(kind, plain, exponent=0.25), kind)
    apply(plain, "lns:exponent=0.25", initialization="upstream").save_pretrained(tmp_path / "lns")
    assert export(tmp_path / "lns", tmp_path / "out", "--dtype", dtype) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == kind and not any("lns" in str(item) for item in config.items())
    made = getattr(transformers, type(stock(kind)).__name__).from_pretrained(tmp_path / "out").eval()
    assert relative(output(made, kind), expected) <= (1e-5 if dtype == "fp32" else 0.05)
    assert verify(tmp_path / "lns", tmp_path / "out") == 0
    apply(stock(kind), "lns:exponent=0.3", initialization="upstream").save_pretrained(tmp_path / "other")
    capsys.readouterr()
    assert verify(tmp_path / "other", tmp_path / "out") == 1
    assert "FAIL" in capsys.readouterr().out


def test_a_stock_llama_that_was_trained_with_lns_elsewhere(tmp_path, capsys):
    """The form of pengxiang/LNS_1B: config.json of a Llama, one pytorch_model.bin, RoPE's frequencies in it."""
    model, folder = stock("llama"), tmp_path / "LNS_1B"
    model.config.save_pretrained(folder)
    state = model.state_dict() | {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4) for i in range(3)}
    torch.save(state, folder / "pytorch_model.bin")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]}))
    expected = output(hooked("llama", model), "llama")
    assert "--scheme lns" in refused(capsys, folder, tmp_path / "out")
    assert export(folder, tmp_path / "out", "--scheme", "lns") == 0
    made = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert relative(output(made, "llama"), expected) <= 1e-5
    assert relative(output(open_model(folder, scheme="lns"), "llama"), expected) <= 1e-5
    assert verify(folder, tmp_path / "out", "--scheme", "lns") == 0
    assert verify(folder, tmp_path / "out") == 1  # Pre-LN is another model


def stale_index(model, folder):
    """An index of shards that are gone."""
    names = dict.fromkeys(model.state_dict(), "model-00001-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


SAVERS = {
    "single": lambda model, folder: model.save_pretrained(folder, max_shard_size="5GB"),
    "sharded": lambda model, folder: model.save_pretrained(folder, max_shard_size="20KB"),
    "pickled": lambda model, folder: torch.save(model.state_dict(), folder / "pytorch_model.bin"),
    "stale index": stale_index,
}


@pytest.mark.parametrize(
    ("first", "then"),
    [("sharded", "single"), ("single", "sharded"), ("sharded", "pickled"), ("single", "stale index")],
)  # fmt: skip
def test_of_a_folder_saved_twice_the_loader_of_transformers_decides(first, then, tmp_path):
    folder = tmp_path / "lns"
    SAVERS[first](apply(stock("llama", seed=0)), folder)
    contents = {path: path.read_bytes() for path in folder.iterdir()}
    SAVERS[then](apply(stock("llama", seed=1)), folder)
    for path, content in contents.items():  # transformers removes some
        path.exists() or path.write_bytes(content)
    expected = output(transformers.AutoModelForCausalLM.from_pretrained(folder).eval(), "llama")
    assert export(folder, tmp_path / "out") == 0
    made = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert relative(output(made, "llama"), expected) <= 1e-5


def test_what_cannot_be_exported_is_refused(tmp_path, capsys):
    from safetensors.torch import load_file, save_file

    apply(stock("gpt2"), initialization="upstream").save_pretrained(tmp_path / "lns")
    path, lost = tmp_path / "lns" / "model.safetensors", "transformer.h.0.ln_1.bias"
    weights = load_file(path)
    kept = weights.pop(lost)
    save_file(weights, path, {"format": "pt"})
    assert f"{lost} is missing" in refused(capsys, tmp_path / "lns", tmp_path / "out")
    save_file(weights | {lost: kept[:3].clone()}, path, {"format": "pt"})
    refused(capsys, tmp_path / "lns", tmp_path / "out")
    save_file(weights | {lost: torch.full_like(kept, 1e30)}, path, {"format": "pt"})
    assert "infinite" in refused(capsys, tmp_path / "lns", tmp_path / "out", "--dtype", "fp16")
    path.write_bytes(path.read_bytes()[:1000])
    assert "cannot be loaded" in refused(capsys, tmp_path / "lns", tmp_path / "out")
    path.unlink()
    stale_index(stock("gpt2"), tmp_path / "lns")
    assert "model-00001-of-00002" in refused(capsys, tmp_path / "lns", tmp_path / "out")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    assert "Merge it first" in refused(capsys, tmp_path / "adapter", tmp_path / "out")
    assert "is written as hf" in refused(capsys, tmp_path / "lns", tmp_path / "out", "--format", "olmo")
    assert "no such folder" in refused(capsys, tmp_path / "no" / "such", tmp_path / "out")


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_init_makes_a_model_to_train(kind, tmp_path, capsys):
    sizes = {"llama": ("num_hidden_layers", "hidden_size", "intermediate_size"), "gpt2": ("n_layer", "n_embd")}[kind]
    changes = [word for name in sizes for word in ("--set", f"{name}={6 if 'layer' in name else 48}")]
    heads = {"llama": "num_attention_heads", "gpt2": "n_head"}[kind]
    words = ["hf", "init", kind, *changes, "--set", f"{heads}=4", "--set", f"vocab_size={VOCABULARY}", "--scheme"]
    assert main([*words, "lns:exponent=0.25", "-o", str(tmp_path / "new"), "--seed", "3"]) == 0
    model = open_model(tmp_path / "new")
    assert model.config.model_type == f"lns_{kind}" and "lns:exponent=0.25" in capsys.readouterr().out
    scales = sorted({module.lns_scale for module in model.modules() if hasattr(module, "lns_scale")}, reverse=True)
    assert scales == [number**-0.25 for number in range(1, 7)]
    output_ = model.model.layers[5].mlp.down_proj if kind == "llama" else model.transformer.h[5].mlp.c_proj
    assert output_.weight.std().item() == pytest.approx(0.02, rel=0.1)  # GPT-2's own depth factor is taken off


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["lama"], "did you mean 'llama'"),
        (["llama", "--set", "hiden_size=3"], "did you mean 'hidden_size'"),
        (["llama", "--set", "num_hidden_layers=twelve"], "llama cannot be loaded"),
        (["llama", "--scheme", "preln"], "stock model"),
        (["vit"], "vit cannot be loaded"),
    ],
)
def test_init_names_what_is_wrong(words, reason, tmp_path, capsys):
    assert main(["hf", "init", *words, "-o", str(tmp_path / "new")]) == 1
    assert reason in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_init_takes_shape_and_tokenizer_of_a_folder(tmp_path):
    stock("llama").save_pretrained(tmp_path / "stock")
    transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(byte_tokenizer(tmp_path / "tokenizer.json")), eos_token="<eos>"
    ).save_pretrained(tmp_path / "stock")
    assert main(["hf", "init", str(tmp_path / "stock"), "-o", str(tmp_path / "new")]) == 0
    assert open_model(tmp_path / "new").config.hidden_size == stock("llama").config.hidden_size
    assert export(tmp_path / "new", tmp_path / "out") == 0
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").encode("AB") == [34, 35]
