"""Folders with a scheme are loaded with the package, without it, with trust_remote_code, and by a stock class."""

import json
import sys
from pathlib import Path

import pytest
import torch
from support import launch
from support.transformers_models import IN_FRONT, MODELS, environment, inputs, read_config, same, schemes, stock  # noqa: F401

from olmo_lns.cli import main
from olmo_lns.errors import CheckpointMismatchError
from olmo_lns.integrations.transformers import apply, fold, register

register()

AUTO = {"vit": "AutoModelForImageClassification", "dinov2": "AutoModelForImageClassification"}
#: Loads the model in a folder, prints its class, and saves its logits on the inputs of a file.
PROGRAM = """
import sys, json, torch, transformers
folder, file, auto, trust = sys.argv[1:5]
model = getattr(transformers, auto).from_pretrained(folder, **({"trust_remote_code": True} if trust == "1" else {}))
print("CLASS", type(model).__module__, type(model).__name__)
print("OURS", "olmo_lns.integrations.transformers" in sys.modules)
torch.save(model(**torch.load(file)).logits.detach(), file + ".out")
"""


def run(folder, kind, *, trust=False, package=True, auto=""):
    """Load the folder in a new process; return its output and the logits, or None where it failed."""
    file = folder.parent / f"{folder.name}-{trust}-{package}.pt"
    torch.save(inputs(kind), file)
    more = {"HF_MODULES_CACHE": str(folder.parent / "modules"), "OLMO_LNS_DISABLE": None if package else "1"}
    loader = auto or AUTO.get(kind, "AutoModelForCausalLM")
    command = [sys.executable, "-c", PROGRAM, folder, file, loader, str(int(trust))]
    # Outside the repository, so that Python finds the installed package.
    done = launch.run(command, cwd=folder.parent, env=environment(**more))
    return done.text, torch.load(f"{file}.out") if done.code == 0 else None


@pytest.mark.parametrize("kind", IN_FRONT)
def test_a_saved_model_is_loaded_with_its_scheme_and_the_same_logits(kind, tmp_path):
    import transformers

    model = apply(stock(kind), "lns:exponent=0.25")
    model.save_pretrained(tmp_path)
    written = read_config(tmp_path)
    assert written["model_type"] == f"lns_{kind}" and written["lns"] == "lns:exponent=0.25"
    assert written["architectures"] == [f"LNS{MODELS[kind][0]}"]
    loaded = getattr(transformers, AUTO.get(kind, "AutoModelForCausalLM")).from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    saved, again = model.config.to_diff_dict(), loaded.config.to_diff_dict()
    assert {key: again[key] for key in saved} == saved
    same(kind, loaded.eval(), model, tolerance=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "scheme"), [("llama", "lns"), pytest.param("vit", "lnsafterff", marks=pytest.mark.exhaustive)]
)
def test_another_process_needs_the_package_or_trust_remote_code(kind, scheme, tmp_path, schemes):  # noqa: F811
    model = apply(stock(kind), scheme, initialization="upstream")
    model.save_pretrained(folder := tmp_path / scheme)
    with torch.no_grad():
        expected = model(**inputs(kind)).logits
    if scheme == "lns":  # the other scheme may exist in this test's fixture only
        text, logits = run(folder, kind)
        assert "CLASS olmo_lns.integrations.transformers.models" in text and "LayerNorm Scaling on: 6 norms" in text
        assert torch.equal(logits, expected)
        text, logits = run(folder, kind, package=False)
        assert logits is None and ("trust_remote_code=True" in text or f"lns_{kind}" in text)
        text, logits = run(folder, kind, package=False, auto=MODELS[kind][0])
        assert logits is None and "needs olmo-lns and an Auto class" in text
    text, logits = run(folder, kind, package=False, trust=True)
    assert "CLASS transformers_modules" in text and "OURS False" in text, text
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_factors_may_differ_in_their_last_digit_only(tmp_path):
    """The math library of another machine may compute the powers differently."""
    import transformers

    apply(stock("llama")).save_pretrained(tmp_path)
    written = read_config(tmp_path)
    for factor, accepted in ((1 + 2**-52, True), (1 - 2**-52, True), (1 + 1e-12, False)):
        values = json.loads(json.dumps(written))
        norms = values["lns_factors"]["norm"]
        norms["attn"] = [value * factor for value in norms["attn"]]
        assert norms["attn"] != written["lns_factors"]["norm"]["attn"]
        (tmp_path / "config.json").write_text(json.dumps(values))
        if accepted:
            assert transformers.AutoConfig.from_pretrained(tmp_path).lns_record == written["lns_record"]
        else:
            with pytest.raises(CheckpointMismatchError, match="lns_factors are not those of"):
                transformers.AutoConfig.from_pretrained(tmp_path)
    for norms in ({"attn": [1.0]}, {"attn": None, "ff": None}, [], None):
        (tmp_path / "config.json").write_text(json.dumps(written | {"lns_factors": {"norm": norms, "branch": {}}}))
        with pytest.raises(CheckpointMismatchError, match="lns_factors are not those of"):
            transformers.AutoConfig.from_pretrained(tmp_path)


def test_other_heads_and_the_base_model_load_under_the_scheme(tmp_path):
    import transformers

    model = apply(stock("llama"))
    model.save_pretrained(tmp_path)
    base = transformers.AutoModel.from_pretrained(tmp_path)
    assert type(base).__name__ == "LNSLlamaModel"
    reward = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=1)
    assert type(reward).__name__ == "LNSLlamaForSequenceClassification"
    with torch.no_grad():
        expected = model.model(**inputs("llama")).last_hidden_state
        assert torch.equal(base.eval()(**inputs("llama")).last_hidden_state, expected)
        assert torch.equal(reward.eval().model(**inputs("llama")).last_hidden_state, expected)


SHAPE = [f"--set={text}" for text in ("num_hidden_layers=3", "hidden_size=32", "intermediate_size=64", "vocab_size=97", "num_attention_heads=4")]  # fmt: skip


def test_hf_init_makes_a_model_from_a_model_type_and_from_a_folder(tmp_path, capsys):
    import transformers

    assert main(["hf", "init", "llama", *SHAPE, "--scheme", "lns:exponent=0.25", "-o", str(tmp_path / "one")]) == 0
    out = capsys.readouterr().out
    assert "lns_llama: lns:exponent=0.25 (initialization plain)" in out and "LNSLlamaForCausalLM: 37,152" in out
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "one")
    torch.manual_seed(0)
    fresh = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{k: getattr(model.config, k) for k in ("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size", "num_attention_heads")}))  # fmt: skip
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), fresh.parameters(), strict=True))
    stock("gpt2").config.save_pretrained(tmp_path / "stock")
    assert main(["hf", "init", str(tmp_path / "stock"), "-o", str(tmp_path / "two"), "--seed", "1"]) == 0
    assert "no tokenizer: " in capsys.readouterr().out and not list((tmp_path / "two").glob("tokenizer*"))
    gpt2 = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "two")
    blocks = gpt2.transformer.h
    assert blocks[2].ln_1.lns_scale == 3**-0.5
    assert blocks[0].mlp.c_proj.weight.std().item() == pytest.approx(0.02, rel=0.1)


def test_hf_init_takes_a_folded_folder_and_refuses_preln_and_a_folder_with_a_scheme(tmp_path, capsys):
    fold(apply(stock("llama"))).save_pretrained(tmp_path / "folded")
    assert main(["hf", "init", str(tmp_path / "folded"), "-o", str(tmp_path / "lns")]) == 0
    for words, message in (
        ([str(tmp_path / "lns")], "already: start from the stock config that it was made from"),
        (["llama", "--scheme", "preln"], "the stock model"),
    ):
        assert main(["hf", "init", *words, "-o", str(tmp_path / "out")]) == 1
        assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("folder", "head", "parameters"),
    [
        ("qwen/qwen2.5-0.5b", "CausalLM", 494_032_768),
        ("qwen/llama-in-qwen-shape", "CausalLM", 448_244_608),
        ("vision/deit3-small-36", "ImageClassification", 64_282_370),
    ],
)
def test_the_shipped_configs_have_their_number_of_parameters(folder, head, parameters, tmp_path):
    import transformers

    source = Path(__file__).resolve().parents[3] / "configs" / folder
    assert main(["hf", "init", str(source), "--head", head, "--no-weights", "-o", str(tmp_path / "out")]) == 0
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    with torch.device("meta"):
        model = getattr(transformers, f"AutoModelFor{head}").from_config(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
