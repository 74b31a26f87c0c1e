"""Commonsense170K's JSON as prompts and completions, the seven tasks, and `trl sft` on both."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from olmo_lns.cli import main
from olmo_lns.finetune.evaluate import PUBLISHED, TASKS, score, table

REPOSITORY = Path(__file__).resolve().parents[2]


def examples(count: int = 24) -> list[dict[str, str]]:
    """In the form of LLM-Adapters' file."""
    return [
        {
            "instruction": f"Please answer the following question with true or false, question: is {i} even?",
            "input": "",
            "output": f"the correct answer is {'false' if i % 2 else 'true'}",
            "answer": "false" if i % 2 else "true",
        }
        for i in range(count)
    ]


def convert(tmp_path: Path, content: object, *more: str) -> int:
    source = tmp_path / "commonsense_170k.json"
    source.write_text(json.dumps(content))
    return main(["data", "commonsense", str(source), "-o", str(tmp_path / "data"), *more])


def test_every_example_is_one_line(tmp_path, capsys):
    assert convert(tmp_path, examples(), "--held-out", "4") == 0
    assert "20 examples in train, 4 examples in test" in capsys.readouterr().out
    lines = {n: [json.loads(x) for x in (tmp_path / "data" / f"{n}.jsonl").open()] for n in ("train", "test")}
    pairs = {(row["prompt"], row["completion"]) for rows in lines.values() for row in rows}
    assert len(pairs) == 24
    for example in examples():
        prompts = [prompt for prompt, completion in pairs if f"\n{example['instruction']}\n" in prompt]
        assert len(prompts) == 1 and prompts[0].endswith("### Response:\n")
        assert (prompts[0], example["output"]) in pairs


def test_an_input_follows_the_instruction(tmp_path):
    rows = [{"instruction": "Sort.", "input": "b a", "output": " a b ", "answer": "x"}]
    assert convert(tmp_path, rows, "--template", "plain") == 0
    row = json.loads((tmp_path / "data" / "train.jsonl").read_text())
    assert row == {"prompt": "Sort.\nb a\n\n", "completion": "a b"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"a": 1}, "expected a JSON array of examples, found dict"),
        ([{"instruction": "x", "output": "y"}, {"instruction": "x"}], "example 2: expected texts"),
        (examples(2), "--held-out 9: .* has 2 examples"),
    ],
)
def test_refused(content, message, tmp_path, capsys):
    import re

    assert convert(tmp_path, content, "--held-out", "9") == 1
    assert re.search(message, capsys.readouterr().err)


def test_published_rows_are_over_seven_tasks():
    averages = {"250M Pre-LN": 36.93, "250M LNS": 43.14, "1B Pre-LN": 43.01, "1B LNS": 44.87, "250M Post-LN": 32.54}
    for name, average in averages.items():
        assert len(PUBLISHED[name]) == len(TASKS) == 7
        assert sum(PUBLISHED[name]) / 7 == pytest.approx(average, abs=0.006)
    text = table({"mine": dict.fromkeys(TASKS, 50.0)}, ["1B LNS"])
    assert (
        "| mine | " + " | ".join(["50.00"] * 8) + " |" in text
        and "| paper: 1B LNS | 28.69 |" in text
        and "| 44.87 |" in text
    )


def model_folder(folder: Path) -> Path:
    """A tiny LNS model with a byte tokenizer, made by `olmo-lns hf init`."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = ["<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")
    fast.save_pretrained(folder / "stock")
    shape = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, eos_token_id=0)
    config = transformers.LlamaConfig(vocab_size=257, max_position_embeddings=512, bos_token_id=0, **shape)
    config.save_pretrained(folder / "stock")
    assert main(["hf", "init", str(folder / "stock"), "-o", str(folder / "model")]) == 0
    return folder / "model"


@pytest.mark.slow
def test_the_seven_tasks_offline(tmp_path, capsys, monkeypatch):
    """Stand-ins of the same names, two choices each, by the real harness on a real model."""
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'olmo-lns[sft]'")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    model, tasks = model_folder(tmp_path), tmp_path / "tasks"
    tasks.mkdir()
    rows = [{"question": f"is {i} even?", "choices": ["true", "false"], "answer": i % 2} for i in range(6)]
    (tasks / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in TASKS.values():
        content = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(tasks / "rows.jsonl")}},
            "test_split": "test",
            "output_type": "multiple_choice",
            "doc_to_text": "{{question}}",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "{{answer}}",
            "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        }
        (tasks / f"{name}.yaml").write_text(yaml.safe_dump(content))
    capsys.readouterr()
    arguments = ["--task-path", str(tasks), "--few-shot", "0", "--device", "cpu", "--size", "1B"]
    assert main(["evaluate", str(model), *arguments, "-o", str(tmp_path / "scores.json")]) == 0
    out = capsys.readouterr().out
    assert f"| {model} | " in out and "paper: 1B LNS" in out and "paper: 250M" not in out
    scores = json.loads((tmp_path / "scores.json").read_text())["scores"][str(model)]
    assert list(scores) == list(TASKS) and all(value * 6 / 100 == pytest.approx(round(value * 6 / 100)) for value in scores.values())  # fmt: skip


def trl(folder: Path, command: str, model: Path, *more: str) -> subprocess.Popen[str]:
    """The unmodified program with the shipped config, on a CPU, in a process of its own."""
    pytest.importorskip("trl", reason="trl is not installed: pip install 'olmo-lns[sft]'")
    program = shutil.which("trl", path=str(Path(sys.executable).parent))
    config = REPOSITORY / "configs" / {"sft": "sft/commonsense170k.yaml", "dpo": "dpo/ultrafeedback.yaml"}[command]
    options = f"--config {config} --dataset_name data --use_cpu true --bf16 false --logging_steps 1 "
    options += "--per_device_train_batch_size 2"
    return subprocess.Popen(
        [str(program), command, "--model_name_or_path", str(model), *options.split(), *more],
        cwd=folder,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "home")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # the program starts another: both are killed
    )


def finished(process: subprocess.Popen[str]) -> str:
    text, _ = process.communicate(timeout=600)
    assert process.returncode == 0, text[-3000:]
    assert "LayerNorm Scaling on: 4 norms (LlamaRMSNorm)" in text
    return text


@pytest.mark.trl
@pytest.mark.slow
def test_trl_dpo_on_local_pairs(tmp_path):
    model = model_folder(tmp_path)
    (tmp_path / "data").mkdir()
    rows = [{"prompt": f"{i}?", "chosen": " yes", "rejected": " no"} for i in range(24)]
    (tmp_path / "data" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    finished(trl(tmp_path, "dpo", model, "--max_steps", "3", "--output_dir", "out"))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "lns_llama"


@pytest.mark.trl
@pytest.mark.slow
def test_trl_sft_saves_an_lns_model(tmp_path):
    model = model_folder(tmp_path)
    assert convert(tmp_path, examples()) == 0
    finished(trl(tmp_path, "sft", model, "--max_steps", "3", "--output_dir", "out"))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "lns_llama"


@pytest.mark.exhaustive
@pytest.mark.slow
def test_trl_sft_killed_and_resumed_is_as_never_stopped(tmp_path):
    model = model_folder(tmp_path)
    assert convert(tmp_path, examples()) == 0
    steps = ["--max_steps", "120", "--save_strategy", "steps", "--save_steps", "20"]
    finished(trl(tmp_path, "sft", model, *steps, "--output_dir", "whole"))
    killed = trl(tmp_path, "sft", model, *steps, "--output_dir", "cut")
    try:
        deadline = time.monotonic() + 300
        while not (tmp_path / "cut" / "checkpoint-20" / "trainer_state.json").is_file():
            assert killed.poll() is None and time.monotonic() < deadline, killed.communicate()[0][-3000:]
            time.sleep(0.01)
    finally:
        os.killpg(killed.pid, signal.SIGKILL)
        killed.communicate()
    assert not (tmp_path / "cut" / "model.safetensors").is_file(), "it came to its end before it was killed"
    start = tmp_path / "cut" / "checkpoint-20"
    finished(trl(tmp_path, "sft", model, *steps, "--output_dir", "cut", "--resume_from_checkpoint", str(start)))
    for name in ("model.safetensors", "config.json", "modeling_lns.py"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    assert json.loads((tmp_path / "cut" / "config.json").read_text())["model_type"] == "lns_llama"


@pytest.mark.parametrize(
    ("there", "asked", "taken"),
    [(False, None, "cpu"), (True, None, "cuda"), (True, "cpu", "cpu"), (False, "mps", "mps")],
)
def test_without_a_device_it_is_cuda_only_where_there_is_one(there, asked, taken, monkeypatch):
    """The harness makes ``cuda`` of no device, on every machine."""
    pytest.importorskip("transformers")
    seen = {}

    def simple_evaluate(**given):
        seen.update(given)
        return {"results": {task: {"acc,none": 0.5} for task in TASKS.values()}}

    harness, tasks = ModuleType("lm_eval"), ModuleType("lm_eval.tasks")
    harness.simple_evaluate, tasks.TaskManager = simple_evaluate, lambda **given: None
    monkeypatch.setitem(sys.modules, "lm_eval", harness)
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", tasks)
    monkeypatch.setattr("torch.cuda.is_available", lambda: there)
    assert set(score("model", device=asked).values()) == {50.0}
    assert seen["device"] == taken
