"""A model, its config and its folder must agree on the scheme; otherwise saving or loading is refused."""

import copy
import json
import os
import sys

import pytest
import torch
from support import launch
from support.transformers_models import IN_FRONT, MODELS, environment, read_config, stock, trainer

from olmo_lns.errors import CheckpointMismatchError, LNSConfigError
from olmo_lns.integrations import norm_sites
from olmo_lns.integrations.transformers import apply, fold, register
from olmo_lns.integrations.transformers.models import record_of

register()
transformers = pytest.importorskip("transformers")


def saved(folder, kind="llama", scheme="lns", **options):
    """Save a model with a scheme; return the config that AutoConfig reads from the folder."""
    apply(stock(kind), scheme, **options).save_pretrained(folder)
    return transformers.AutoConfig.from_pretrained(folder)


def remote(folder, kind="llama"):
    """The config and the model class from the modeling file in the folder."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module as get

    names = (f"LNS{MODELS[kind][1]}", f"LNS{MODELS[kind][0]}")
    config, model = (get(f"modeling_lns.{name}", str(folder)) for name in names)
    return config.from_pretrained(folder), model


@pytest.mark.parametrize("kind", IN_FRONT)
def test_a_stock_class_refuses_every_config_with_a_scheme(kind, tmp_path):
    config, cls = saved(tmp_path, kind), getattr(transformers, MODELS[kind][0])
    for given in (config, copy.deepcopy(config), type(config)(**config.to_dict()), remote(tmp_path, kind)[0]):
        for build in (cls, cls._from_config):
            with pytest.raises(KeyError, match="needs olmo-lns and an Auto class"):
                build(given)
    with pytest.raises(CheckpointMismatchError, match="lns-to-preln"):
        cls.from_pretrained(tmp_path)


def test_a_config_hides_the_plain_activation_from_stock_classes(tmp_path):
    config = saved(tmp_path)
    config.hidden_act = "gelu"
    assert config.hidden_act.endswith(": gelu") and config.to_dict()["hidden_act"] == config.hidden_act
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert type(model.model.layers[0].mlp.act_fn).__name__ == "GELUActivation"
    assert fold(model).config.hidden_act == "gelu"


@pytest.mark.parametrize("server", ["vllm", "sglang"])
def test_a_server_with_norms_of_its_own_is_refused(server, tmp_path, monkeypatch):
    config = saved(tmp_path)
    functions = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS  # servers add their own to these
    monkeypatch.setitem(functions, server, functions["sdpa"])
    config._attn_implementation = server
    with pytest.raises(LNSConfigError, match=f"'{server}': this server replaces .* Serve the folded export"):
        transformers.AutoModelForCausalLM.from_config(config)
    given, cls = remote(tmp_path)
    given._attn_implementation = server
    with pytest.raises(ValueError, match=f"'{server}': this server replaces .* Serve the folded export"):
        cls(given)


@pytest.mark.parametrize(("asked", "std"), [("", 0.02), ("scaled", 0.02 / 6**0.5), ("upstream", 0.02 / 6**0.5)])
def test_remote_code_initializes_as_the_record_says(asked, std, tmp_path):
    model = stock("gpt2", large=False, n_embd=128)
    apply(model, initialization=asked).save_pretrained(tmp_path)
    config, cls = remote(tmp_path, "gpt2")
    for drawn in (cls(config), transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path))):  # fmt: skip
        for block in drawn.transformer.h:
            for projection in (block.attn.c_proj, block.mlp.c_proj):
                assert projection.weight.std().item() == pytest.approx(std, rel=0.05)
    loaded = cls.from_pretrained(tmp_path)
    assert torch.equal(loaded.transformer.h[1].mlp.c_proj.weight, model.transformer.h[1].mlp.c_proj.weight)


def test_a_scheme_that_contradicts_the_record_is_refused(tmp_path):
    saved(tmp_path)
    made = transformers.AutoConfig.for_model("lns_llama", lns="lns:exponent=0.25")
    assert made.lns_record["parameters"] == {"exponent": 0.25}
    values = read_config(tmp_path)
    with pytest.raises(CheckpointMismatchError, match="lns says lns:exponent=0.25, lns_record lns"):
        transformers.AutoConfig.for_model("lns_llama", lns="lns:exponent=0.25", lns_record=values["lns_record"])
    with pytest.raises(CheckpointMismatchError, match="lns says"):
        transformers.AutoConfig.from_pretrained(tmp_path, lns="lns:exponent=0.25")
    (tmp_path / "config.json").write_text(json.dumps(values | {"lns": "lns:exponent=0.25"}))
    with pytest.raises(CheckpointMismatchError, match="lns says"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


def test_models_built_from_one_config_do_not_affect_each_other(tmp_path):
    """Two arms of a study share a config. A change to one model must not reach the other or the config."""
    auto, config = transformers.AutoModelForCausalLM, stock("llama").config
    pre, lns = auto.from_config(config), apply(auto.from_config(config))
    pre.save_pretrained(tmp_path / "pre")
    assert read_config(tmp_path / "pre")["model_type"] == "llama" and type(config) is transformers.LlamaConfig
    assert type(transformers.LlamaForCausalLM(config)) is type(auto.from_config(config)) is type(pre)
    assert type(auto.from_config(lns.config)) is type(lns) and lns.model.config is lns.config
    one, two = auto.from_config(lns.config), auto.from_config(lns.config)
    fold(one)
    two.save_pretrained(tmp_path / "two")
    assert read_config(tmp_path / "two")["lns"] == "lns" and type(auto.from_pretrained(tmp_path / "two")) is type(lns)
    two.config.lns_record["folded"] = True
    with pytest.raises(CheckpointMismatchError, match="has blocks under a scheme and a config without one"):
        two.save_pretrained(tmp_path / "three")


def test_a_stock_model_around_blocks_under_a_scheme_is_saved_only_after_a_fold(tmp_path):
    model = apply(stock("llama"))
    head = transformers.LlamaForSequenceClassification(stock("llama").config)
    for change in (lambda: setattr(head, "model", model.model), lambda: setattr(head.model, "layers", model.model.layers)):  # fmt: skip
        change()
        with pytest.raises(CheckpointMismatchError, match="LlamaForSequenceClassification has blocks under a scheme"):
            head.save_pretrained(tmp_path / "head")
        head.model = transformers.LlamaModel(stock("llama").config)
    assert not (tmp_path / "head").exists()
    head.model = fold(model).model
    head.save_pretrained(tmp_path / "head")


@pytest.mark.parametrize("start", ["config", "apply"])
def test_a_composite_model_is_saved_only_if_its_config_has_the_scheme_of_its_blocks(start, tmp_path):
    text = saved(tmp_path / "text") if start == "config" else stock("llama").config
    vision = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=8)  # fmt: skip
    llava = transformers.LlavaForConditionalGeneration
    model = llava(transformers.LlavaConfig(vision_config=transformers.CLIPVisionConfig(**vision), text_config=text))
    inner = next(each for each in model.modules() if type(each).__name__.removeprefix("LNS").startswith("Llama"))
    if start == "apply":
        apply(inner, "lns:exponent=0.25")
        with pytest.raises(
            CheckpointMismatchError, match="blocks under a scheme and a config without one.*text_config"
        ):
            model.save_pretrained(tmp_path / "out")
        model.config.text_config = inner.config
    model.save_pretrained(tmp_path / "out")
    loaded = llava.from_pretrained(tmp_path / "out")
    assert str(norm_sites.read_back(loaded)) == ("lns" if start == "config" else "lns:exponent=0.25")
    block = inner.base_model.layers[1]
    kept, block.input_layernorm = block.input_layernorm, stock("llama", 1).model.layers[1].input_layernorm
    with pytest.raises(CheckpointMismatchError, match="is not what its config says"):
        model.save_pretrained(tmp_path / "changed")
    block.input_layernorm = kept
    fold(inner)
    with pytest.raises(CheckpointMismatchError, match="models: none; config: lns"):
        model.save_pretrained(tmp_path / "changed")
    assert not (tmp_path / "changed").exists()


def test_a_folder_is_marked_as_folded_only_if_its_weights_were_folded(tmp_path):
    """A fresh model may have the config of a folded folder; it is saved and resumed as Pre-LN."""
    auto, folded = transformers.AutoModelForCausalLM, fold(apply(stock("llama")))
    folded.save_pretrained(tmp_path / "folded")
    stock("llama").save_pretrained(tmp_path / "stock")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "folded")
    for name, model in {
        "fresh": auto.from_config(config),
        "stock": auto.from_pretrained(tmp_path / "stock", config=config),
        "loaded": auto.from_pretrained(tmp_path / "folded"),
        "copied": copy.deepcopy(folded),
        "base": transformers.AutoModel.from_pretrained(tmp_path / "folded"),
    }.items():
        model.save_pretrained(tmp_path / name)
        written = read_config(tmp_path / name)
        assert ("lns_record" in written) == ("lns" in written) == (name not in ("fresh", "stock"))
    assert record_of(config).folded  # other models share this config
    trainer(auto.from_config(config), tmp_path / "run", max_steps=3).train()
    trainer(auto.from_config(config), tmp_path / "run").train(resume_from_checkpoint=True)
    with pytest.raises(CheckpointMismatchError, match="folded"):
        apply(auto.from_config(config))
    apply(auto.from_config(config), "lns:exponent=0.25", trained=False).save_pretrained(tmp_path / "lns")
    assert str(norm_sites.read_back(auto.from_pretrained(tmp_path / "lns"))) == "lns:exponent=0.25"


def _fewer(model):
    del model.model.layers[1]
    model.config.num_hidden_layers -= 1


def _more(model):
    model.model.layers = torch.nn.ModuleList([*model.model.layers, copy.deepcopy(model.model.layers[-1])])
    model.config.num_hidden_layers += 1


def _other_norms(model, blocks=(0, 1, 2), norms=("input_layernorm", "post_attention_layernorm")):
    for block in blocks:
        for norm in norms:
            setattr(model.model.layers[block], norm, getattr(stock("llama", 1).model.layers[block], norm))


CHANGES = {
    "a block pruned": lambda model: model.model.layers.__delitem__(1),
    "the last block pruned": lambda model: model.model.layers.__delitem__(-1),
    "a block pruned, and the config says so": _fewer,
    "a block added, and the config says so": _more,
    "a stock block": lambda model: model.model.layers.__setitem__(1, stock("llama", 1).model.layers[1]),
    "a stock norm": lambda model: _other_norms(model, (1,), ("input_layernorm",)),
    "all norms stock": _other_norms,
    "another exponent in the record": lambda model: model.config.lns_record["parameters"].update(exponent=0.25),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_was_changed_after_apply_is_not_saved(change, tmp_path):
    model = apply(stock("llama"))
    CHANGES[change](model)
    with pytest.raises(CheckpointMismatchError, match="is not what its config says .* Fold the model before"):
        model.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_is_not_loaded_with_a_config_of_another_scheme(tmp_path, monkeypatch):
    ours, other = saved(tmp_path / "lns"), saved(tmp_path / "other", scheme="lns:exponent=0.25")
    stock("llama").save_pretrained(tmp_path / "stock")
    plain = transformers.LlamaConfig.from_pretrained(tmp_path / "stock")
    auto, llama = transformers.AutoModelForCausalLM, transformers.LlamaForCausalLM
    for cls, folder, config, difference in (
        (llama, "lns", plain, "lns-to-preln"),
        (auto, "lns", plain, "lns-to-preln"),
        (auto, "stock", ours, "preln-to-lns"),
        (auto, "lns", other, "exponent"),
        (type(auto.from_config(ours)), "stock", None, "preln-to-lns"),
    ):
        with pytest.raises(CheckpointMismatchError, match=f"OLMO_LNS_ALLOW_MISMATCH={difference}"):
            cls.from_pretrained(tmp_path / folder, **({} if config is None else {"config": config}))
    with pytest.raises(CheckpointMismatchError, match="lns-to-preln"):
        llama.from_pretrained(tmp_path / "lns", hidden_act="silu")
    cls = type(auto.from_config(ours))
    assert type(cls.from_pretrained(tmp_path / "lns", config=str(tmp_path / "lns"))) is cls
    monkeypatch.setenv("OLMO_LNS_ALLOW_MISMATCH", "preln-to-lns")
    assert type(auto.from_pretrained(tmp_path / "stock", config=ours)).__name__ == "LNSLlamaForCausalLM"
    fold(auto.from_pretrained(tmp_path / "lns")).save_pretrained(tmp_path / "folded")
    assert type(llama.from_pretrained(tmp_path / "folded", config=plain)) is llama


@pytest.mark.parametrize("resume", [True, "checkpoint-3"])
def test_a_trainer_resumes_only_under_the_scheme_of_its_checkpoint(resume, tmp_path):
    made = {"lns": lambda: apply(stock("llama")), "stock": lambda: stock("llama")}
    made["other"] = lambda: apply(stock("llama"), "lns:exponent=0.25")
    for was, now, difference in (
        ("lns", "stock", "lns-to-preln"),
        ("stock", "lns", "preln-to-lns"),
        ("other", "lns", "exponent"),
    ):
        folder = tmp_path / was
        if not folder.exists():
            trainer(made[was](), folder, max_steps=3).train()
        with pytest.raises(CheckpointMismatchError, match=difference):
            trainer(made[now](), folder).train(resume_from_checkpoint=resume if resume is True else str(folder / resume))  # fmt: skip
    trainer(made["stock"](), tmp_path / "stock").train(resume_from_checkpoint=True)


def test_a_trainer_keeps_and_compares_the_record_beside_sharded_weights(tmp_path, caplog):
    """FSDP's sharded checkpoints have no config.json: a Trainer that saves no model stands for them here."""

    def sharded(model, steps):
        found = trainer(model, tmp_path, max_steps=steps)
        found.save_model = lambda folder, **_: os.makedirs(folder, exist_ok=True)
        return found

    sharded(apply(stock("llama")), 3).train()
    assert (tmp_path / "checkpoint-3" / "lns.json").is_file()
    with pytest.raises(CheckpointMismatchError, match="lns-to-preln"):
        sharded(stock("llama"), 6).train(resume_from_checkpoint=True)
    (tmp_path / "checkpoint-3" / "lns.json").unlink()
    with pytest.raises((ValueError, OSError)):  # from transformers: this checkpoint holds no weights
        sharded(apply(stock("llama")), 6).train(resume_from_checkpoint=True)
    assert "no config.json and no lns.json: nothing is compared" in caplog.text


@pytest.mark.parametrize("first", ["Trainer", "AutoConfig"])
def test_the_guards_are_on_whatever_is_imported_first(first, tmp_path):
    program = (
        f"from transformers import {first}; from transformers import Trainer, PreTrainedModel;"
        "print(hasattr(Trainer.train, '__olmo_lns_patched__'), hasattr(PreTrainedModel.from_pretrained, '__olmo_lns_patched__'))"
    )
    done = launch.run([sys.executable, "-c", program], cwd=tmp_path, env=environment())
    assert done.last_line() == "True True", done.text
