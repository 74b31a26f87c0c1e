"""Exports of transformers folders to stock models, and imports of OLMo checkpoints."""

import pytest
import torch
from support.exports import save_olmo
from support.olmo_models import tokens
from support.transformers_models import inputs, read_config, stock

from olmo_lns.cli import main
from olmo_lns.integrations.transformers import apply, register
from olmo_lns.schemes import parse

register()


@pytest.mark.parametrize("kind", ["llama", "olmo", "gpt2", "dinov2"])
def test_the_export_of_a_folder_with_a_scheme_is_a_stock_model(kind, tmp_path, capsys):
    import transformers

    model = apply(stock(kind), "lns:exponent=0.25", initialization="upstream")
    model.save_pretrained(tmp_path / "lns")
    assert main(["export", str(tmp_path / "lns"), str(tmp_path / "out"), "--exponent", "0.5"]) == 1
    assert main(["export", str(tmp_path / "lns"), str(tmp_path / "out"), "--format", "hf"]) == 0
    out = capsys.readouterr().out
    assert f"-> {type(stock(kind)).__name__}: lns folded into the weights" in out and "tensors changed" in out
    values = read_config(tmp_path / "out")
    assert values["model_type"] == kind and values["lns"] == "folded" and values["lns_record"]["folded"]
    assert "auto_map" not in values and not (tmp_path / "out" / "modeling_lns.py").exists()
    folded = getattr(transformers, type(stock(kind)).__name__).from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        expected = model(**inputs(kind)).logits
        assert (folded(**inputs(kind)).logits - expected).abs().max() <= 3e-6 * expected.abs().max()
    if kind == "llama":
        prompt = inputs(kind)["input_ids"][:, :4]
        options = dict(max_new_tokens=12, do_sample=False, attention_mask=torch.ones_like(prompt))
        assert torch.equal(folded.generate(prompt, **options), model.generate(prompt, **options))


@pytest.mark.parametrize(("kind", "dtype"), [("llama", "fp32"), ("llama", "bf16"), ("dinov2", "fp32"), ("vit", "bf16")])
def test_verify_passes_for_an_export_and_fails_against_another_exponent(kind, dtype, tmp_path, capsys):
    model = apply(stock(kind), initialization="upstream")
    model.save_pretrained(tmp_path / "lns")
    words = [str(tmp_path / "lns"), str(tmp_path / "out"), "--format", "hf", "--dtype", dtype]
    assert main(["export", *words]) == 0
    capsys.readouterr()
    command = ["verify", str(tmp_path / "lns"), str(tmp_path / "out"), "--length", "16"]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "PASS" in out and "files match" in out and ("perplexity" in out) == (kind == "llama")
    apply(stock(kind), "lns:exponent=0.3", initialization="upstream").save_pretrained(tmp_path / "other")
    assert main(["verify", str(tmp_path / "other"), *command[2:]]) == 1
    assert "FAIL" in capsys.readouterr().out


def test_an_export_keeps_dtypes_and_shards_and_refuses_a_folder_without_a_weight(tmp_path, capsys):
    """The shards have 20 kB. A weight that is missing is not drawn anew."""
    from safetensors.torch import load_file, save_file

    model = apply(stock("gpt2"), initialization="upstream")
    model.to(torch.bfloat16).save_pretrained(tmp_path / "lns", max_shard_size="20KB")
    export = ["export", str(tmp_path / "lns"), str(tmp_path / "out"), "--format", "hf", "--max-shard-size", "20KB"]
    assert main(export) == 0
    stored, folded = (
        {
            name: tensor
            for path in sorted((tmp_path / folder).glob("*.safetensors"))
            for name, tensor in load_file(path).items()
        }
        for folder in ("lns", "out")
    )
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1 and stored.keys() == folded.keys()
    for name, tensor in stored.items():
        block, norm = (name.split(".")[2], ".ln_" in name) if ".h." in name else ("0", False)
        factor = (int(block) + 1) ** -0.5 if norm else 1.0
        assert torch.equal(folded[name], (tensor.double() * factor).to(torch.bfloat16)), name
    values = read_config(tmp_path / "out")
    assert (
        values["architectures"] == ["GPT2LMHeadModel"] and values.get("dtype", values.get("torch_dtype")) == "bfloat16"
    )
    assert (tmp_path / "out" / "generation_config.json").is_file()

    model.save_pretrained(tmp_path / "whole")
    path = tmp_path / "whole" / "model.safetensors"
    weights = load_file(path)
    del weights["transformer.h.0.ln_1.bias"]
    save_file(weights, path, {"format": "pt"})
    assert main(["export", str(tmp_path / "whole"), str(tmp_path / "again"), "--format", "hf"]) == 1
    error = capsys.readouterr().err
    assert "lacks the weight transformer.h.0.ln_1.bias" in error and "another transformers saved" in error
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize(
    ("kind", "type_", "changes"),
    [
        ("llama", "lns_rms:exponent=0.25", {}),
        ("olmo", "lns_default", {"layer_norm_with_affine": False, "layer_norm_eps": 1e-5}),
        ("llama", "lnsafterbranch_rms", {}),
    ],
)
def test_an_olmo_checkpoint_is_imported_as_trained_and_a_folded_one_unfolded(kind, type_, changes, tmp_path, capsys):
    pytest.importorskip("olmo")
    import transformers

    scheme = "lns:exponent=0.25" if "exponent" in type_ else type_.partition("_")[0]
    model = save_olmo(tmp_path / "olmo", layer_norm_type=type_, **changes)
    assert main(["hf", "import", str(tmp_path / "olmo"), "-o", str(tmp_path / "model"), "--tokenizer", "none"]) == 0
    out = capsys.readouterr().out
    assert f"lns_{kind}: {parse(scheme).name}" in out and "as trained, factors outside the weights" in out
    assert main(["export", str(tmp_path / "olmo"), str(tmp_path / "folded")]) == 0
    assert main(["hf", "import", str(tmp_path / "folded"), "-o", str(tmp_path / "again"), "--tokenizer", "none"]) == 0
    assert "unfolded: the factors are outside again" in capsys.readouterr().out
    assert main(["verify", str(tmp_path / "olmo"), str(tmp_path / "again"), "--length", "16"]) == 0
    assert "PASS" in capsys.readouterr().out
    with torch.no_grad():
        expected = model(tokens()).logits
        for name in ("model", "again"):
            loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name).eval()
            assert type(loaded).__name__ == f"LNS{type(stock(kind)).__name__}"
            assert (loaded(tokens()).logits - expected).abs().max() <= 1e-5 * expected.abs().max()
            if scheme != "lnsafterbranch":
                factor = model.transformer.blocks[-1].attn_norm.lns_scale
                assert loaded.model.layers[-1].input_layernorm.lns_scale == factor
