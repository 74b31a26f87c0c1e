import json

import numpy as np
import pytest
import yaml
from support.diagnostic_models import huggingface
from support.exports import save_olmo


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory):
    """Save a tokenizer of 97 entries: special tokens, then the words w4 ... w96."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {"[PAD]": 0, "[EOS]": 1, "[UNK]": 2, "[MASK]": 3} | {f"w{i}": i for i in range(4, 97)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory, tokenizer_file):
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("models") / "llama"
    huggingface("llama").save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_file=str(tokenizer_file), eos_token="[EOS]").save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def olmo_folder(tmp_path_factory, tokenizer_file):
    """Save an unsharded OLMo checkpoint with LNS."""
    folder = tmp_path_factory.mktemp("models") / "step4-unsharded"
    shape = {"vocab_size": 97, "max_sequence_length": 32, "eos_token_id": 1}
    save_olmo(folder, layer_norm_type="lns_rms", tokenizer=tokenizer_file, **shape)
    return folder


@pytest.fixture(scope="session")
def token_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "tokens.npy"
    np.random.default_rng(0).integers(4, 97, 600).astype(np.uint16).tofile(path)
    return path


@pytest.fixture(scope="session")
def task_folder(tmp_path_factory):
    """Write a local lm-evaluation-harness task that asks which of two words comes next."""
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'olmo-lns[eval]'")
    folder = tmp_path_factory.mktemp("tasks")
    numbers = np.random.default_rng(0).integers(4, 97, (24, 8)).tolist()
    documents = [
        {"question": " ".join(f"w{i}" for i in row[:6]), "choices": [f"w{i}" for i in row[6:]], "answer": row[0] % 2}
        for row in numbers
    ]
    (folder / "words.jsonl").write_text("\n".join(map(json.dumps, documents)))
    task = {
        "task": "local_words",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "words.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    (folder / "words.yaml").write_text(yaml.safe_dump(task))
    return folder
