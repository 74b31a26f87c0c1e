"""Programs that look at the name of a class, at ``architectures`` or at ``auto_map``: a scheme is treated as stock."""

import copy
import functools
import json

import pytest
import torch
from support import forked
from support.transformers_models import (
    MODELS,
    config,
    hooked,
    inputs,
    read_config,
    rows,
    same,
    stock,
    tokenizer,
    trainer,
)

from olmo_lns.errors import CheckpointMismatchError, LNSConfigError
from olmo_lns.integrations.transformers import apply, fold, register

register()
transformers = pytest.importorskip("transformers")
SFT = "pip install 'olmo-lns[sft]'"
REMOTE = {
    "configuration_mini.py": """
from transformers import LlamaConfig
class MiniConfig(LlamaConfig):
    model_type = "mini"
""",
    "modeling_mini.py": """
from transformers import LlamaForCausalLM
from .configuration_mini import MiniConfig
class MiniForCausalLM(LlamaForCausalLM):
    config_class = MiniConfig
""",
}
#: Loads a folder of remote code and saves its logits on the inputs of a file.
LOADS = """
import sys, torch, transformers
folder, file = sys.argv[1:]
model = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
torch.save(model(**torch.load(file)).logits.detach(), file + ".out")
"""


def smoothed(model, factor):
    """Label smoothing of the next token, written out: each token's loss and the mean over the vocabulary."""
    ids = torch.stack([row["input_ids"] for row in rows()])
    with torch.no_grad():
        log_p = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
    loss = -log_p.gather(-1, ids[:, 1:, None]).squeeze(-1)
    return ((1 - factor) * loss - factor * log_p.mean(-1)).mean().item()


@pytest.mark.parametrize("lora", [False, pytest.param(True, marks=pytest.mark.trl)])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_label_smoothing_trains_and_evaluates_the_next_token(kind, lora, tmp_path):
    model, reference = apply(stock(kind), trained=True), hooked(kind, stock(kind))
    expected = smoothed(reference, 0.1)
    pair = [model, reference]
    if lora:
        peft = pytest.importorskip("peft", reason=SFT)
        pair = []
        for each in (model, reference):
            torch.manual_seed(3)
            pair.append(peft.get_peft_model(each, peft.LoraConfig(task_type="CAUSAL_LM", r=4)))
    losses = []
    for number, each in enumerate(pair):
        run = trainer(each, tmp_path / str(number), max_steps=2, label_smoothing_factor=0.1, save_strategy="no")
        run.eval_dataset = rows()
        assert run.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-4)
        run.train()
        losses.append([line["loss"] for line in run.state.log_history if "loss" in line])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def with_head(name):
    """A stock Llama with another head, whose matrices are large enough that its blocks do something."""
    torch.manual_seed(0)
    model = getattr(transformers, f"Llama{name}")(config("llama", num_labels=3))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    return model.eval()


def answers(output, row):
    """The mean loss of the first and the last token of an answer, which transformers does not smooth."""
    starts, ends = (each.log_softmax(-1) for each in (output.start_logits, output.end_logits))
    both = zip(starts, ends, row["start_positions"], row["end_positions"], strict=True)
    return -torch.stack([start[first] + end[last] for start, end, first, last in both]).mean().item() / 2


def classes(output, row):
    """Smoothed with 0.1, each class at its own place."""
    log_p = output.logits.log_softmax(-1).flatten(0, -2)
    loss = -log_p.gather(-1, row["labels"].reshape(-1, 1)).squeeze(-1)
    return (0.9 * loss - 0.1 * log_p.mean(-1)).mean().item()


@pytest.mark.parametrize(
    ("head", "labels", "loss"),
    [
        ("ForQuestionAnswering", {"start_positions": (4,), "end_positions": (4,)}, answers),
        ("ForSequenceClassification", {"labels": (4,)}, classes),
        ("ForTokenClassification", {"labels": (4, 8)}, classes),
    ],
)
def test_a_trainer_finds_the_labels_of_another_head_and_shifts_none(head, labels, loss, tmp_path):
    """It finds the names of labels by ``QuestionAnswering`` in the name of the class, too."""
    row = {name: torch.randint(0, 3, shape) for name, shape in labels.items()}
    row["input_ids"] = torch.randint(2, 97, (4, 8))
    reference = hooked("llama", with_head(head))
    with torch.no_grad():
        expected = loss(reference(input_ids=row["input_ids"]), row)
    run = trainer(apply(with_head(head), trained=True), tmp_path, label_smoothing_factor=0.1)
    run.eval_dataset = [{name: value[number] for name, value in row.items()} for number in range(4)]
    assert run.label_names == [*labels]
    assert run.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-4)


def test_a_pipeline_generates_without_a_message_and_takes_a_folder(tmp_path, capfd):
    model = apply(stock("llama"), trained=True)
    model.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    options = dict(tokenizer=tokenizer(), device="cpu")
    texts, messages = [], []
    for each in (hooked("llama", stock("llama")), model):
        capfd.readouterr()
        pipeline = transformers.pipeline("text-generation", model=each, **options)
        messages.append(capfd.readouterr().err)
        texts.append(pipeline("w5 w6", max_new_tokens=4, do_sample=False))
    assert messages[0] == messages[1] and "not supported" not in messages[1]
    texts.append(transformers.pipeline("text-generation", str(tmp_path))("w5 w6", max_new_tokens=4, do_sample=False))
    assert texts[0] == texts[1] == texts[2] and "not supported" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("task", "name"),
    [
        ("feature-extraction", "Model"),
        ("text-classification", "ForSequenceClassification"),
        ("token-classification", "ForTokenClassification"),
    ],
)
def test_pipelines_of_other_tasks_infer_without_a_message(task, name, capfd):
    results, messages = [], []
    for model in (hooked("llama", with_head(name)), apply(with_head(name), trained=True)):
        capfd.readouterr()
        pipeline = transformers.pipeline(task, model=model, tokenizer=tokenizer(), device="cpu")
        results.append(pipeline("w5 w6 w7"))
        messages.append(capfd.readouterr().err)
    assert messages[0] == messages[1] and "not supported" not in messages[1]
    if task == "feature-extraction":
        results = [torch.tensor(result) for result in results]
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    else:
        scores = [[float(row.pop("score")) for row in result] for result in results]
        assert results[0] == results[1] and results[0] and scores[1] == pytest.approx(scores[0], rel=1e-4)


def test_the_stock_class_stays_in_transformers_and_saved_names_are_those_of_the_scheme(tmp_path):
    made = transformers.LlamaForCausalLM
    config = transformers.LlamaConfig(**MODELS["llama"][2], architectures=["LlamaForCausalLM"])
    model = apply(made(config))
    assert (type(model).__name__, type(model).__qualname__) == ("LlamaForCausalLM", "LlamaForCausalLM")
    assert transformers.LlamaForCausalLM is transformers.models.llama.modeling_llama.LlamaForCausalLM is made
    model.config.save_pretrained(tmp_path / "config")  # as beside sharded weights
    model.save_pretrained(tmp_path / "model")
    for name in ("config", "model"):
        assert read_config(tmp_path / name)["architectures"] == ["LNSLlamaForCausalLM"]
    fold(model).config.save_pretrained(tmp_path / "folded")
    assert read_config(tmp_path / "folded")["architectures"] == ["LlamaForCausalLM"]


def test_a_stock_class_refuses_the_folder_of_a_scheme(tmp_path, monkeypatch):
    apply(stock("llama"), trained=True).save_pretrained(tmp_path)
    for stock_class in (transformers.LlamaForCausalLM, transformers.LlamaModel, transformers.LlamaConfig):
        with pytest.raises(CheckpointMismatchError, match="its config says lns"):
            stock_class.from_pretrained(tmp_path)
    monkeypatch.setenv("OLMO_LNS_ALLOW_MISMATCH", "1")
    assert type(transformers.LlamaForCausalLM.from_pretrained(tmp_path)) is transformers.LlamaForCausalLM


def test_a_class_that_has_the_saved_name_of_another_is_refused(monkeypatch):
    module = transformers.models.llama.modeling_llama
    net = type("Net", (transformers.LlamaForCausalLM,), {"__module__": module.__name__})
    monkeypatch.setattr(module, "LNSNet", transformers.LlamaForCausalLM, raising=False)
    model = net(transformers.LlamaConfig(**MODELS["llama"][2]))
    with pytest.raises(LNSConfigError, match="defines Net and LNSNet"):
        apply(model)
    assert type(model) is net and type(model.config) is transformers.LlamaConfig
    same("llama", model, copy.deepcopy(model), tolerance=0)


def test_a_stock_class_refuses_the_config_of_a_scheme_but_a_head_on_an_auto_class_takes_it(tmp_path):
    model = apply(stock("llama"), trained=True)
    model.save_pretrained(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)

    class Reward(transformers.LlamaPreTrainedModel):
        def __init__(self, config):
            super().__init__(config)
            self.model = transformers.LlamaModel(config)

    for stock_class in (transformers.LlamaForCausalLM, Reward):
        with pytest.raises(CheckpointMismatchError, match="its config says lns"):
            stock_class(config)
    with pytest.raises(CheckpointMismatchError, match="its config says lns"):
        transformers.LlamaForCausalLM.from_pretrained(tmp_path, config=config)
    head = transformers.LlamaForSequenceClassification.from_pretrained(tmp_path, config=config)  # its base: AutoModel
    with torch.no_grad():
        expected = model.model(**inputs("llama")).last_hidden_state
        assert torch.equal(head.eval().model(**inputs("llama")).last_hidden_state, expected)


@pytest.mark.trl
def test_an_adapter_without_a_task_names_a_stock_class_which_refuses_its_base(tmp_path):
    peft = pytest.importorskip("peft", reason=SFT)
    apply(stock("llama"), trained=True).save_pretrained(tmp_path / "base")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    tuned = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)).eval()
    tuned.save_pretrained(tmp_path / "adapter")
    with pytest.raises(CheckpointMismatchError, match="its config says lns"):
        peft.AutoPeftModel.from_pretrained(tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter"
    )
    with torch.no_grad():
        assert torch.equal(loaded.eval()(**inputs("llama")).logits, tuned(**inputs("llama")).logits)


@pytest.mark.trl
def test_no_program_takes_the_stock_folder_for_the_model_that_was_loaded_from_it(tmp_path):
    peft = pytest.importorskip("peft", reason=SFT)
    from trl.trainer import utils as trl

    stock("llama").save_pretrained(tmp_path / "stock")
    model = apply(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "stock"), trained=True)
    with pytest.raises(
        OSError, match="Repo id|Can't load the configuration of ''"
    ):  # as for a model that was built from a config
        trl.create_model_from_path(trl.get_config_model_id(model.config))
    model.save_pretrained(tmp_path / "lns")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "lns")
    reference = trl.create_model_from_path(trl.get_config_model_id(loaded.config))
    same("llama", reference.float().eval(), model, tolerance=0)
    for base, is_known in ((model, False), (loaded, True)):
        tuned = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights=False)).eval()
        tuned.save_pretrained(adapter := tmp_path / f"adapter-{is_known}")
        if not is_known:
            with pytest.raises((OSError, TypeError, ValueError)):
                peft.AutoPeftModelForCausalLM.from_pretrained(adapter)
            continue
        with torch.no_grad():
            again = peft.AutoPeftModelForCausalLM.from_pretrained(adapter).eval()(**inputs("llama")).logits
            assert torch.equal(again, tuned(**inputs("llama")).logits)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_layers_are_wrapped_and_placed_as_those_of_a_stock_model(kind):
    accelerate = pytest.importorskip("accelerate")
    found = []
    for model in (stock(kind), apply(stock(kind), trained=True)):
        plugin = accelerate.FullyShardedDataParallelPlugin(auto_wrap_policy="transformer_based_wrap")
        plugin.set_auto_wrap_policy(model)
        memory = {"cpu": int(0.8 * model.get_memory_footprint()), "disk": 10**9}
        places = accelerate.infer_auto_device_map(model, memory, no_split_module_classes=model._no_split_modules)
        assert set(places.values()) == {"cpu", "disk"}
        found.append((plugin.auto_wrap_policy.keywords["transformer_layer_cls"], model._no_split_modules, places))
    assert found[0] == found[1] and found[0][0]


@pytest.mark.slow
def test_remote_code_is_saved_loaded_and_folded(tmp_path, monkeypatch):
    modules = str(tmp_path / "modules")
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", modules)
    monkeypatch.syspath_prepend(modules)
    stock("llama").save_pretrained(source := tmp_path / "source")
    values = read_config(source) | {"model_type": "mini", "architectures": ["MiniForCausalLM"]}
    classes = {"AutoConfig": "configuration_mini.MiniConfig", "AutoModelForCausalLM": "modeling_mini.MiniForCausalLM"}
    (source / "config.json").write_text(json.dumps(values | {"auto_map": classes}))
    for name, code in REMOTE.items():
        (source / name).write_text(code)
    load = functools.partial(transformers.AutoModelForCausalLM.from_pretrained, trust_remote_code=True)

    model = apply(load(source), trained=True).eval()
    expected = hooked("llama", stock("llama"))
    same("llama", model, expected)
    load(source).save_pretrained(tmp_path / "stock")

    def save(model, place):
        model.save_pretrained(place)
        for name, code in REMOTE.items():  # transformers 4.48 saves a model without its code
            assert (place / name).exists() == (tmp_path / "stock" / name).exists()
            (place / name).write_text(code)

    save(model, folder := tmp_path / "lns")
    written = read_config(folder)
    assert written["model_type"] == "lns_mini" and written["architectures"] == ["LNSMiniForCausalLM"]
    assert written["auto_map"]["AutoModelForCausalLM"] == "modeling_mini.LNSMiniForCausalLM"
    same("llama", load(folder).eval(), model, tolerance=0)
    built = transformers.AutoModelForCausalLM.from_config(load(folder).config, trust_remote_code=True)
    assert built.model.layers[1].input_layernorm.lns_scale == 2**-0.5

    torch.save(inputs("llama"), tmp_path / "inputs")
    done = forked.run(LOADS, folder, tmp_path / "inputs", HF_MODULES_CACHE=str(tmp_path / "other"))
    assert done.returncode == 0, done.stdout + done.stderr
    with torch.no_grad():
        assert torch.equal(torch.load(tmp_path / "inputs.out"), model(**inputs("llama")).logits)
    done = forked.run(LOADS, folder, tmp_path / "inputs", OLMO_LNS_DISABLE="1")
    assert done.returncode != 0 and "LNSMiniConfig" in done.stdout + done.stderr

    save(fold(copy.deepcopy(model)), folded := tmp_path / "folded")
    assert read_config(folded)["auto_map"] == classes
    assert type(load(folded)).__name__ == "MiniForCausalLM" and not hasattr(load(folded), "lns_made_of")
    with torch.no_grad():  # folding changes the gradients of the gains
        found, wanted = (each(**inputs("llama")).logits for each in (load(folded).eval(), expected))
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()


@pytest.mark.parametrize("place", ["", "code of another folder"])
def test_remote_code_with_the_stock_config_is_saved_loaded_and_folded(place, tmp_path, monkeypatch):
    modules, auto = str(tmp_path / "modules"), "AutoModelForCausalLM"
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", modules)
    monkeypatch.syspath_prepend(modules)
    code = "import transformers\nclass MiniForCausalLM(transformers.LlamaForCausalLM): pass\n"
    reference = f"{tmp_path / place}--modeling_mini.MiniForCausalLM" if place else "modeling_mini.MiniForCausalLM"
    load = functools.partial(transformers.AutoModelForCausalLM.from_pretrained, trust_remote_code=True)

    def add_code(folder):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "modeling_mini.py").write_text(code)

    stock("llama").save_pretrained(source := tmp_path / "source")
    values = read_config(source) | {"architectures": ["MiniForCausalLM"], "auto_map": {auto: reference}}
    (source / "config.json").write_text(json.dumps(values))
    add_code(place or "source")
    apply(load(source), trained=True).save_pretrained(tmp_path / "lns")
    is_copied = (tmp_path / "lns" / "modeling_mini.py").exists()  # transformers 4.48 saves a model without its code
    add_code("lns")
    model = load(tmp_path / "lns").eval()
    assert type(model).__name__ == "MiniForCausalLM" and hasattr(model, "lns_made_of")
    same("llama", model, hooked("llama", stock("llama")))
    with torch.no_grad():
        expected = model(**inputs("llama")).logits
    fold(model).save_pretrained(tmp_path / "folded")
    assert (tmp_path / "folded" / "modeling_mini.py").exists() == is_copied
    add_code("folded")
    folded = load(tmp_path / "folded").eval()
    assert type(folded).__name__ == "MiniForCausalLM" and not hasattr(folded, "lns_made_of")
    with torch.no_grad():
        assert (folded(**inputs("llama")).logits - expected).abs().max() <= 1e-5 * expected.abs().max()
