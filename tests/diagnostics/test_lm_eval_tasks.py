"""One local, offline task of lm-evaluation-harness, against accuracies computed here from the logits."""

import importlib.util
import json
import math
import shutil

import pytest
import torch
from support import multiple_choice

from olmo_lns import cli
from olmo_lns.diagnostics.layer_drop import bypassed, output_lengths, score_tasks
from olmo_lns.errors import LNSError
from olmo_lns.models.loading import load_model, load_tokenizer

pytest.importorskip("lm_eval")


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))


def accuracy(model, documents):
    return multiple_choice.accuracy(lambda ids: model(ids).logits, documents)


@pytest.mark.parametrize("folder", ["llama_folder", "olmo_folder"])
def test_scores_with_each_block_removed(folder, task_folder, request):
    loaded = load_model(str(request.getfixturevalue(folder)), device="cpu")
    documents = [json.loads(line) for line in (task_folder / "words.jsonl").read_text().splitlines()]
    tokenizer = load_tokenizer(loaded.tokenizer_name, loaded.eos_token_id)
    scores = score_tasks(loaded, tokenizer, ["local_words"], include_path=str(task_folder))["local_words"]
    assert scores.metric == "acc"
    with torch.no_grad():
        assert scores.baseline == pytest.approx(accuracy(loaded.model, documents))
        with output_lengths(loaded.blocks) as lengths:
            accuracy(loaded.model, documents)
        for block, length, found, drop in zip(loaded.blocks, lengths, scores.without, scores.drop, strict=True):
            with bypassed(block, length):
                assert found == pytest.approx(accuracy(loaded.model, documents))
            assert drop == pytest.approx(scores.baseline - found)
    for score, stderr in zip(scores.without, scores.without_stderr, strict=True):
        assert stderr == pytest.approx(math.sqrt(score * (1 - score) / 23))
    assert len({scores.baseline, *scores.without}) > 1, "removing a block must be seen"


@pytest.mark.exhaustive
@pytest.mark.slow  # indexes the harness's own tasks
def test_unknown_task(llama_folder, task_folder):
    loaded = load_model(str(llama_folder), device="cpu")
    with pytest.raises(LNSError, match="lm-eval knows no task nothing_like_it"):
        score_tasks(loaded, load_tokenizer(loaded.tokenizer_name), ["nothing_like_it"], include_path=str(task_folder))


def test_unknown_metric_and_no_document_end(llama_folder, task_folder, tokenizer_file):
    loaded = load_model(str(llama_folder), device="cpu")
    tokenizer = load_tokenizer(loaded.tokenizer_name)
    with pytest.raises(LNSError, match="end-of-text token: found none"):
        score_tasks(loaded, load_tokenizer(str(tokenizer_file)), ["local_words"], include_path=str(task_folder))
    with pytest.raises(LNSError, match="task local_words reports acc,none, expected f1"):
        score_tasks(loaded, tokenizer, ["local_words"], include_path=str(task_folder), metric="f1", limit=2)


def test_without_the_harness_the_model_is_not_loaded(monkeypatch, tmp_path, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "lm_eval" else find(name, *more)
    )
    (tmp_path / "text.txt").write_text("words")
    words = ["analyze", "layer-drop", "--model", "nowhere", "--data", str(tmp_path / "text.txt"), "--tasks", "a"]
    assert cli.main([*words, "-o", str(tmp_path / "out.json")]) == 1
    assert "needs lm_eval, which is not installed: " in capsys.readouterr().err


def test_data_that_cannot_be_had_is_said_before_the_losses(
    llama_folder, task_folder, token_file, tmp_path, capsys, monkeypatch
):
    """The task's file is gone; nothing else was computed until then."""
    from olmo_lns.diagnostics import layer_drop

    monkeypatch.setattr(layer_drop, "drop_layers", lambda *_, **__: pytest.fail("the losses came first"))
    shutil.copytree(task_folder, tmp_path / "tasks")
    for path in (tmp_path / "tasks").glob("*.yaml"):
        path.write_text(path.read_text().replace("words.jsonl", "gone.jsonl"))
    words = f"analyze layer-drop --model {llama_folder} --data {token_file} --quiet --tasks local_words"
    words += f" --task-path {tmp_path / 'tasks'} -o {tmp_path / 'out.json'}"
    assert cli.main(words.split()) == 1
    assert "--tasks local_words: their data cannot be loaded (" in capsys.readouterr().err
