"""The fine-tuning recipe of docs/recipes.md: its data, `trl`, and the seven tasks by `lm_eval`."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support import forked

import olmo_lns

REPOSITORY = Path(__file__).resolve().parents[2]


def examples(count=24):
    """Return examples in the form of LLM-Adapters' file."""
    answers = [("true", "false")[i % 2] for i in range(count)]
    return [
        {"instruction": f"is {i} even?", "input": "", "output": f"the correct answer is {answer}", "answer": answer}
        for i, answer in enumerate(answers)
    ]


def converted(tmp_path, content):
    """Run the script of the recipe as the guide does, and return its rows."""
    (tmp_path / "commonsense_170k.json").write_text(json.dumps(content))
    script = REPOSITORY / "configs" / "sft" / "commonsense.py"
    words = [sys.executable, str(script), "commonsense_170k.json", "data"]
    subprocess.run(words, cwd=tmp_path, env=offline(tmp_path), check=True, capture_output=True)
    return [json.loads(line) for line in (tmp_path / "data" / "train.jsonl").open()]


def offline(folder):
    return {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "home")}


def test_every_example_becomes_one_line_with_prompt_and_completion(tmp_path):
    pytest.importorskip("datasets", reason="datasets is not installed: pip install 'olmo-lns[sft]'")
    sort = {"instruction": "Sort.", "input": "b a", "output": " a b ", "answer": "x"}
    rows = converted(tmp_path, [*examples(), sort])
    assert len(rows) == 25 and rows[-1]["completion"] == "a b" and "\nSort.\nb a\n" in rows[-1]["prompt"]
    for row, example in zip(rows, examples(), strict=False):
        assert f"\n{example['instruction']}\n" in row["prompt"] and row["prompt"].endswith("### Response:\n")
        assert row["completion"] == example["output"]


def model_folder(folder):
    """Make a tiny LNS model with a byte tokenizer, as docs/transformers.md does."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = ["<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")
    fast.save_pretrained(folder / "model")
    shape = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, eos_token_id=0)
    config = transformers.LlamaConfig(vocab_size=257, max_position_embeddings=512, bos_token_id=0, **shape)
    olmo_lns.apply(transformers.AutoModelForCausalLM.from_config(config)).save_pretrained(folder / "model")
    return folder / "model"


@pytest.mark.slow
def test_the_printed_command_runs_the_seven_tasks(tmp_path):
    """The unmodified program runs stand-ins of the same names, with two choices each, on a real model."""
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'olmo-lns[sft]'")
    model, tasks = model_folder(tmp_path), tmp_path / "tasks"
    tasks.mkdir()
    rows = [{"question": f"is {i} even?", "choices": ["true", "false"], "answer": i % 2} for i in range(6)]
    (tasks / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = (REPOSITORY / "docs" / "recipes.md").read_text(encoding="utf-8").replace("\\\n", "")
    (line,) = [line for line in page.splitlines() if line.startswith("lm_eval ")]
    words = shlex.split(line.replace("pretrained=tuned", f"pretrained={model}"))
    names = words[words.index("--tasks") + 1].split(",")
    for name in names:
        content = {"task": name, "dataset_path": "json", "test_split": "test", "output_type": "multiple_choice"}
        content |= {"dataset_kwargs": {"data_files": {"test": str(tasks / "rows.jsonl")}}}
        content |= {"doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}"}
        content |= {"metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}]}
        (tasks / f"{name}.yaml").write_text(yaml.safe_dump(content))
    words[0] = str(shutil.which("lm_eval", path=str(Path(sys.executable).parent)))
    words += ["--include_path", str(tasks), "--device", "cpu"]
    done = subprocess.run(words, cwd=tmp_path, env=offline(tmp_path), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "LayerNorm Scaling on: 4 norms (LlamaRMSNorm)" in done.stdout + done.stderr
    (written,) = (tmp_path / "scores").rglob("results_*.json")
    results = json.loads(written.read_text())["results"]
    assert len(names) == 7 and all(0 <= results[name]["acc,none"] <= 1 for name in names)


@pytest.mark.trl
@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "config"), [("sft", "sft/commonsense170k.yaml"), ("dpo", "dpo/ultrafeedback.yaml")]
)
def test_trl_saves_an_lns_model(command, config, tmp_path):
    """The unmodified programs run with the shipped configs, on a CPU, each in a process of its own.

    `trl sft` imports TRL in the process of its launcher and in the one that trains. DPO's script runs without a launcher.
    """
    pytest.importorskip("trl", reason="trl is not installed: pip install 'olmo-lns[sft]'")
    model = model_folder(tmp_path)
    if command == "sft":
        assert len(converted(tmp_path, examples())) == 24
    else:
        (tmp_path / "data").mkdir()
        rows = [{"prompt": f"{i}?", "chosen": " yes", "rejected": " no"} for i in range(24)]
        (tmp_path / "data" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--model_name_or_path", str(model), "--config", str(REPOSITORY / "configs" / config)]
    words += ["--dataset_name", "data", "--output_dir", "out", "--use_cpu", "true", "--bf16", "false"]
    words += ["--logging_steps", "1", "--per_device_train_batch_size", "2", "--max_steps", "3"]
    if command == "sft":
        program = [str(shutil.which("trl", path=str(Path(sys.executable).parent))), command]
        options = {"env": offline(tmp_path), "capture_output": True, "text": True, "timeout": 600}
        done = subprocess.run([*program, *words], cwd=tmp_path, **options)
    else:
        code = f"import runpy; runpy.run_module('trl.scripts.{command}', run_name='__main__', alter_sys=True)"
        done = forked.run(code, *words, cwd=tmp_path, **offline(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "LayerNorm Scaling on: 4 norms (LlamaRMSNorm)" in done.stdout + done.stderr
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "lns_llama"
