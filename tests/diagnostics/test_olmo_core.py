"""Diagnostics of an OLMo-core checkpoint, as its checkpointer writes it."""

import json

import pytest

pytest.importorskip("olmo_core.nn", reason="needs ai2-olmo-core 2.5 to 3.0 (make test-olmo-core)")

import torch
from olmo_core.distributed.checkpoint import save_model_and_optim_state
from support import multiple_choice
from support import olmo_core_models as small

from olmo_lns.diagnostics.layer_drop import bypassed, harness_model, score_tasks
from olmo_lns.errors import LNSError
from olmo_lns.models.loading import load_model, load_tokenizer
from olmo_lns.record import Record
from olmo_lns.schemes import parse


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer_file):
    folder = tmp_path_factory.mktemp("models") / "step4"
    made = small.with_scheme(small.config(vocab_size=97))
    save_model_and_optim_state(folder / "model_and_optim", small.model(made))
    tokenizer = {"vocab_size": 97, "eos_token_id": 1, "pad_token_id": 0, "identifier": str(tokenizer_file)}
    config = {"model": made.as_config_dict(), "dataset": {"sequence_length": 32, "tokenizer": tokenizer}}
    (folder / "config.json").write_text(json.dumps(config))
    Record(parse("lns"), "rms", "plain").write(folder)
    return folder


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"device_map": "auto"}, "--device-map is for Hugging Face"),
        ({"blocks": "blocks"}, "--blocks is for models out"),
    ],
)
def test_an_option_for_other_models_is_refused(folder, given, message):
    with pytest.raises(LNSError, match=f"is an OLMo-core checkpoint: {message}"):
        load_model(str(folder), device="cpu", **given)


def test_task_scores_equal_those_of_the_logits(folder, task_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    loaded = load_model(str(folder), device="cpu")
    lm = harness_model(loaded, load_tokenizer(loaded.tokenizer_name, eos_token_id=loaded.eos_token_id), 8)
    scores = score_tasks(lm, loaded.blocks, ["local_words"], include_path=str(task_folder))["local_words"]
    documents = [json.loads(line) for line in (task_folder / "words.jsonl").read_text().splitlines()]
    with torch.no_grad():
        assert scores.baseline == pytest.approx(multiple_choice.accuracy(loaded.model, documents))
        for block, found in zip(loaded.blocks, scores.without, strict=True):
            with bypassed(block):
                assert found == pytest.approx(multiple_choice.accuracy(loaded.model, documents))
