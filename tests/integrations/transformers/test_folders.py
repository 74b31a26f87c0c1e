"""Folders with a scheme: saved, loaded with and without the package, by another head, by a stock class, in a Trainer."""

import json
import os

import pytest
import torch
from support import forked
from support.transformers_models import MODELS, hooked, inputs, read_config, same, stock, trainer

from olmo_lns.errors import CheckpointMismatchError, MeasurementError
from olmo_lns.integrations.transformers import apply, register

register()
transformers = pytest.importorskip("transformers")
AUTO = {"vit": "AutoModelForImageClassification"}
#: Loads the model in a folder by the auto class, and a pickled one, and saves the logits on the inputs of a file.
LOADS = """
import sys, torch, transformers
folder, pickled, file = sys.argv[1:]
for model in (transformers.AutoModelForCausalLM.from_pretrained(folder), torch.load(pickled, weights_only=False)):
    print("CLASS", type(model).__name__, type(model.config).__name__)
    torch.save(model(**torch.load(file)).logits.detach(), file + ".out")
    pickled, file = file, pickled + ".in"
"""
#: Without the package: refused by the auto class, loaded by a stock class with a warning.
STOCK = """
import sys, transformers
try:
    transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
except (ValueError, KeyError) as error:
    print("REFUSED", error)
print("CLASS", type(transformers.LlamaForCausalLM.from_pretrained(sys.argv[1])).__name__)
"""


@pytest.mark.parametrize("kind", ["llama", "gpt2", "vit"])
def test_a_saved_model_is_loaded_with_its_scheme_and_the_same_logits(kind, tmp_path, capfd):
    model = apply(stock(kind), "lns:exponent=0.25", trained=True)
    model.save_pretrained(tmp_path)
    written = read_config(tmp_path)
    assert written["model_type"] == f"lns_{kind}" and written["lns"] == "lns:exponent=0.25" and written["lns_norms"]
    assert type(model).__name__ == MODELS[kind][0] and written["architectures"] == [f"LNS{MODELS[kind][0]}"]
    capfd.readouterr()
    loaded = getattr(transformers, AUTO.get(kind, "AutoModelForCausalLM")).from_pretrained(tmp_path)
    assert type(loaded) is type(model) and "measured: sites, output, gradient" in capfd.readouterr().err
    same(kind, loaded.eval(), model, tolerance=0)
    saved, again = model.config.to_diff_dict(), loaded.config.to_diff_dict()
    assert {key: again[key] for key in saved} == saved


@pytest.mark.slow
def test_another_process_needs_the_package(tmp_path):
    model = apply(stock("llama"), trained=True)
    model.save_pretrained(folder := tmp_path / "lns")
    for content, name in ((inputs("llama"), "inputs"), (inputs("llama"), "model.pt.in"), (model, "model.pt")):
        torch.save(content, tmp_path / name)
    done = forked.run(LOADS, folder, tmp_path / "model.pt", tmp_path / "inputs")
    text = done.stdout + done.stderr
    assert text.count("CLASS LlamaForCausalLM LNSLlamaConfig") == 2 and "LayerNorm Scaling on: 6 norms" in text, text
    with torch.no_grad():
        for name in ("inputs.out", "model.pt.in.out"):
            assert torch.equal(torch.load(tmp_path / name), model(**inputs("llama")).logits)
    done = forked.run(STOCK, folder, OLMO_LNS_DISABLE="1")
    text = done.stdout + done.stderr
    assert "REFUSED" in text and "lns_llama" in text, text
    assert "CLASS LlamaForCausalLM" in text and "to instantiate a model of type" in text


def test_other_heads_and_the_base_model_load_under_the_scheme(tmp_path):
    model = apply(stock("llama"), trained=True)
    model.save_pretrained(tmp_path)
    base = transformers.AutoModel.from_pretrained(tmp_path)
    reward = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=1)
    assert type(base).lns_made_of is transformers.LlamaModel
    assert type(reward).lns_made_of is transformers.LlamaForSequenceClassification
    with torch.no_grad():
        expected = model.model(**inputs("llama")).last_hidden_state
        assert torch.equal(base.eval()(**inputs("llama")).last_hidden_state, expected)
        assert torch.equal(reward.eval().model(**inputs("llama")).last_hidden_state, expected)
    base.save_pretrained(tmp_path / "base")  # the list of blocks has another path there
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert again.model.layers[2].input_layernorm.lns_scale == 3**-0.5


def test_a_model_type_of_any_family_is_made_by_its_prefix():
    config = transformers.AutoConfig.for_model("lns_mixtral", lns="lns:exponent=0.25", **MODELS["llama"][2])
    assert "lns_mixtral" in transformers.CONFIG_MAPPING and "lns_mixtral" not in list(transformers.CONFIG_MAPPING)
    assert type(config).__name__ == "LNSMixtralConfig" and isinstance(config, transformers.MixtralConfig)
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert model.model.layers[1].input_layernorm.lns_scale == 2**-0.25
    assert model.config.lns_norms == {"layers": ["input_layernorm", "post_attention_layernorm"]}
    for unknown in ("lns_unknown", "lns_lns_llama"):
        with pytest.raises((ValueError, KeyError)):
            transformers.AutoConfig.for_model(unknown)


@pytest.mark.parametrize("named", [False, True])
def test_on_the_meta_device_the_config_names_the_norms_or_a_shadow_finds_them(named):
    config = transformers.AutoConfig.for_model("lns_llama", **MODELS["llama"][2])
    if named:
        config = transformers.AutoModelForCausalLM.from_config(config).config
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert model.config.lns_norms == {"layers": ["input_layernorm", "post_attention_layernorm"]}
    model.to_empty(device="cpu")
    model.load_state_dict(stock("llama").state_dict())
    model.model.rotary_emb = stock("llama").model.rotary_emb
    same("llama", model.eval(), hooked("llama", stock("llama")))


def test_norms_that_are_not_where_the_config_says_are_an_error(tmp_path):
    apply(stock("llama"), trained=True).save_pretrained(tmp_path)
    values = read_config(tmp_path)
    values["lns_norms"] = {"layers": ["post_attention_layernorm", "input_layernorm"]}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(MeasurementError, match="its config names"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


def test_weights_of_another_scheme_are_not_loaded_by_a_class_of_ours(tmp_path, monkeypatch):
    model = apply(stock("llama"), trained=True)
    stock("llama").save_pretrained(tmp_path / "stock")
    apply(stock("llama"), "lns:exponent=0.25", trained=True).save_pretrained(tmp_path / "other")
    for folder in ("stock", "other"):
        with pytest.raises(CheckpointMismatchError, match="its config says"):
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder, config=model.config)
    with pytest.raises(CheckpointMismatchError, match="its config says lns:exponent=0.25"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "other", config=stock("llama").config)
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "stock", config=stock("llama").config)
    monkeypatch.setenv("OLMO_LNS_ALLOW_MISMATCH", "1")
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "stock", config=model.config)


def test_a_trainer_resumes_only_under_the_scheme_of_its_checkpoint(tmp_path):
    made = {"lns": lambda: apply(stock("llama"), trained=True), "stock": lambda: stock("llama")}
    made["other"] = lambda: apply(stock("llama"), "lns:exponent=0.25", trained=True)
    for was, now in (("lns", "stock"), ("stock", "lns"), ("other", "lns")):
        trainer(made[was](), folder := tmp_path / was, max_steps=3).train()
        for checkpoint in (True, str(folder / "checkpoint-3")):
            with pytest.raises(CheckpointMismatchError, match="but this run has"):
                trainer(made[now](), folder).train(resume_from_checkpoint=checkpoint)
    trainer(made["stock"](), tmp_path / "stock").train(resume_from_checkpoint=True)


def test_a_trainer_writes_the_config_beside_sharded_weights(tmp_path):
    """FSDP's sharded checkpoints have no config.json: a Trainer that saves no model stands for them here."""

    def sharded(model, steps):
        found = trainer(model, tmp_path, max_steps=steps)
        found.save_model = lambda folder, **_: os.makedirs(folder, exist_ok=True)
        return found

    sharded(apply(stock("llama"), trained=True), 3).train()
    assert read_config(tmp_path / "checkpoint-3")["lns"] == "lns"
    with pytest.raises(CheckpointMismatchError, match="but this run has"):
        sharded(stock("llama"), 6).train(resume_from_checkpoint=True)
    (tmp_path / "checkpoint-3" / "config.json").unlink()
    with pytest.raises(CheckpointMismatchError, match="no config was found beside its weights"):
        sharded(apply(stock("llama"), trained=True), 6).train(resume_from_checkpoint=True)


@pytest.mark.skipif(transformers.__version__ >= "5", reason="of transformers 4, which does not read rope_parameters")
def test_a_folder_of_transformers_5_has_its_rotary_base(tmp_path):
    model = apply(stock("llama", rope_theta=5e5), trained=True)
    model.save_pretrained(tmp_path)
    values = read_config(tmp_path)
    del values["rope_theta"]
    values.pop("rope_scaling", None)
    # As 5.23.0 wrote it for this model.
    values["rope_parameters"] = {"rope_theta": 500000.0, "rope_type": "default"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    same("llama", transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval(), model, tolerance=0)
