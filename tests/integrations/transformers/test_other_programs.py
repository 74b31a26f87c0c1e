"""lm-eval, sentence-transformers and optimum: a model under a scheme does what a stock model with hooks does."""

import json

import pytest
import torch
from support.hooked import hooked as with_hooks
from support.transformers_models import LLAMA_NORMS, blocks, hooked, inputs, read_config, stock, tokenizer
from torch.utils._pytree import tree_leaves

from olmo_lns.integrations.transformers import apply, fold, register

register()
transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Saved models with a tokenizer: stock, and under LNS."""
    root = tmp_path_factory.mktemp("models")
    models = {"stock": stock("llama"), "lns": apply(stock("llama"), initialization="upstream", trained=True)}
    for name, model in models.items():
        model.save_pretrained(root / name)
        tokenizer().save_pretrained(root / name)
    return root


# --- lm-eval --------------------------------------------------------------------------------------------------------------


def evaluated(model, folder):
    """Run a task of each kind with lm-eval. :returns: metrics, and the response to every request."""
    lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'olmo-lns[eval]'")
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    data = {"data_files": {"test": str(folder / "rows.jsonl")}}
    lines = [
        {"q": q, "a": a, "choices": ["w3", "w4 w5"]} for q, a in (("w5 w6", "w7"), ("w8", "w9 w3"), ("w2 w4", "w6"))
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    task = dict(dataset_path="json", dataset_kwargs=data, test_split="test", doc_to_text="{{q}}", doc_to_target="{{a}}")
    rolling = dict(doc_to_text="", doc_to_target="{{q}} {{a}}", metric_list=[{"metric": "word_perplexity"}])
    tasks = {
        "multiple_choice": dict(doc_to_choice="{{choices}}", doc_to_target=0, metric_list=[{"metric": "acc"}]),
        "loglikelihood_rolling": rolling,
        "generate_until": dict(
            generation_kwargs={"until": ["."], "max_gen_toks": 4}, metric_list=[{"metric": "exact_match"}]
        ),
    }
    options = {} if isinstance(model, str) else {"tokenizer": tokenizer()}
    program = HFLM(pretrained=model, batch_size=2, device="cpu", max_length=32, **options)
    built = [
        ConfigurableTask(config=task | options | {"task": kind, "output_type": kind}) for kind, options in tasks.items()
    ]
    manager = TaskManager(include_defaults=False)  # else lm-eval reads the thousands of files of its own tasks
    results = lm_eval.simple_evaluate(program, tasks=built, bootstrap_iters=0, task_manager=manager)
    metrics = [
        value for kind in tasks for key, value in sorted(results["results"][kind].items()) if key.endswith(",none")
    ]
    return metrics, [sample["resps"] for kind in tasks for sample in results["samples"][kind]]


@pytest.mark.slow
def test_lm_eval_gives_the_results_of_hooks_for_a_model_and_for_its_folder(folders, tmp_path):
    expected = evaluated(hooked("llama", stock("llama")), tmp_path)
    assert evaluated(stock("llama"), tmp_path) != expected
    model = apply(stock("llama"), trained=True)
    for each in (model, str(folders / "lns"), fold(model)):
        found = evaluated(each, tmp_path)
        for one, other in zip(tree_leaves(found), tree_leaves(expected), strict=True):
            assert one == (pytest.approx(other, rel=1e-4) if isinstance(other, float) else other)


@pytest.mark.slow
def test_lm_eval_fails_for_a_damaged_folder_as_for_a_stock_one(folders, tmp_path):
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'olmo-lns[eval]'")
    from lm_eval.models.huggingface import HFLM

    errors = []
    for name in ("stock", "lns"):
        (folder := tmp_path / name).mkdir()
        for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            (folder / file).write_bytes((folders / name / file).read_bytes())
        with pytest.raises(OSError, match="no file named") as caught:
            HFLM(pretrained=str(folder), device="cpu")
        errors.append(str(caught.value).replace(str(folder), ""))
    assert errors[0] == errors[1]


# --- sentence-transformers ------------------------------------------------------------------------------------------------

TEXTS = ["w5 w6 w7", "w8 w9", "w3"]


def embeddings(model):
    return model.encode(TEXTS, convert_to_tensor=True)


def test_sentence_transformers_embeds_as_with_hooks_trains_and_saves(folders, tmp_path):
    package = pytest.importorskip("sentence_transformers", reason="pip install sentence-transformers")
    reference = package.SentenceTransformer(str(folders / "stock"), device="cpu")
    plain = embeddings(reference)
    layers = reference[0].auto_model.layers
    reference[0].auto_model = with_hooks(reference[0].auto_model, layers, LLAMA_NORMS, 0.5)
    model = package.SentenceTransformer(str(folders / "lns"), device="cpu")
    assert [type(each).__name__ for each in model] == [type(each).__name__ for each in reference]
    assert type(model[0].auto_model).__name__ == "LlamaModel"
    expected = embeddings(reference)
    torch.testing.assert_close(embeddings(model), expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(plain, expected, rtol=1e-2)

    gradients = []
    for each in (reference, model):  # one step of a loss of one's own
        features = each.tokenize(TEXTS) if hasattr(each, "tokenize") else each.preprocess(TEXTS)
        each(features)["sentence_embedding"].square().sum().backward()
        gradients.append([p.grad for p in each.parameters() if p.grad is not None])
    for found, wanted in zip(*reversed(gradients), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4 * float(wanted.abs().max()))

    model.save_pretrained(str(tmp_path / "saved"))
    assert read_config(tmp_path / "saved")["model_type"] == "lns_llama"
    again = package.SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    assert torch.equal(embeddings(again), embeddings(model))


# --- optimum --------------------------------------------------------------------------------------------------------------


def test_optimum_infers_and_loads_as_for_a_stock_model_and_refuses_by_model_type(folders):
    pytest.importorskip("optimum.exporters.tasks", reason="pip install optimum")
    from optimum.exporters.tasks import TasksManager
    from optimum.utils import NormalizedConfigManager

    plain, model = stock("llama"), apply(stock("llama"), trained=True)
    for infer in (TasksManager.infer_task_from_model, TasksManager.infer_library_from_model):
        assert infer(model) == infer(plain)
    loaded = TasksManager.get_model_from_task("text-generation", str(folders / "lns"), library_name="transformers")
    with torch.no_grad():
        assert torch.equal(loaded(**inputs("llama")).logits, model(**inputs("llama")).logits)
    NormalizedConfigManager.get_normalized_config_class(plain.config.model_type)
    with pytest.raises(KeyError, match="lns_llama model type is not supported"):
        NormalizedConfigManager.get_normalized_config_class(model.config.model_type)
    folded = fold(model)
    assert NormalizedConfigManager.get_normalized_config_class(folded.config.model_type)(folded.config).num_layers == 3


def test_optimum_finds_the_blocks_that_it_quantizes_as_in_a_stock_model():
    utils = pytest.importorskip("optimum.gptq.utils", reason="pip install optimum")
    pairs = [
        (utils.get_block_name_with_pattern(each), sorted(utils.get_layers(each)), utils.get_seqlen(each))
        for each in (stock("llama"), apply(stock("llama"), trained=True))
    ]
    assert pairs[0] == pairs[1] and len(blocks("llama", stock("llama"))) == 3
