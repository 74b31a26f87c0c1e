"""Layer removal in the two branches of vision-language models."""

from __future__ import annotations

import json

import pytest
import torch
from support.vision_language_models import (
    IMAGE,
    LANGUAGE_LAYERS,
    VISION_LAYERS,
    llava_folder,
    picture_records,
    qwen,
    qwen_batch,
)

from olmo_lns.cli import main
from olmo_lns.diagnostics.layer_drop import drop_layers
from olmo_lns.errors import LNSError
from olmo_lns.models.structure import find_blocks


@pytest.mark.parametrize(("branch", "count"), [("vision", VISION_LAYERS), ("language", LANGUAGE_LAYERS)])
def test_a_removed_block_of_qwen_is_one_whose_output_projections_are_zero(branch, count):
    model, batch = qwen(), qwen_batch()
    blocks = find_blocks(model, branch=branch)
    assert len(blocks) == count
    result = drop_layers(model, blocks, [batch])
    assert result.tokens == batch["input_ids"].numel() - 1 - 4  # four places of the image are not predicted

    def reference() -> float:
        ids = batch["input_ids"]
        with torch.no_grad():
            logits = model(**batch).logits[0, :-1].double()
        losses = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
        return losses[ids[0, 1:] != IMAGE].mean().item()

    assert result.baseline_loss == pytest.approx(reference(), rel=1e-5)
    for number, block in enumerate(blocks):
        saved = {name: p.clone() for name, p in block.named_parameters()}
        with torch.no_grad():
            for name, parameter in block.named_parameters():
                if any(part in name for part in ("attn.proj.", "o_proj", "down_proj")):
                    parameter.zero_()
        expected = reference()
        block.load_state_dict(saved, strict=False)
        assert result.loss[number] == pytest.approx(expected, rel=1e-5)
        assert abs(expected - result.baseline_loss) > 1e-6


def test_the_vision_branch_needs_images_and_the_model_a_branch():
    model, text = qwen(), {"input_ids": torch.randint(3, 80, (1, 9))}
    assert len(drop_layers(model, find_blocks(model, branch="language"), [text]).loss) == LANGUAGE_LAYERS
    with pytest.raises(LNSError, match="block 1 did not run on this data"):
        drop_layers(model, find_blocks(model, branch="vision"), [text])
    with pytest.raises(LNSError, match="say which with --branch vision or --branch language"):
        find_blocks(model)


def run(*words: str) -> int:
    return main(["analyze", "layer-drop", "--device", "cpu", "--quiet", *words])


def test_one_command_on_images_and_on_text(tmp_path, capsys):
    pytest.importorskip("PIL", reason="Pillow is not installed: pip install pillow")
    model, records = llava_folder(tmp_path / "llava"), picture_records(tmp_path / "data")
    how = {"vision": "", "language": "--image-field image", "text": "--branch language --sequence-length 16"}
    found = {}
    for name, more in how.items():
        options = ("--branch", name.replace("text", "language"), *more.split())
        output = tmp_path / f"{name}.json"
        assert run("--model", str(model), "--data", str(records), "-o", str(output), *options) == 0
        found[name] = json.loads(output.read_text())
    assert found["vision"]["settings"]["branch"] == "vision"
    results = {name: content["result"] for name, content in found.items()}
    assert len(results["vision"]["loss"]) == VISION_LAYERS and len(results["text"]["loss"]) == LANGUAGE_LAYERS
    assert results["vision"]["baseline_loss"] == pytest.approx(results["language"]["baseline_loss"], rel=1e-6)
    assert results["vision"]["tokens"] == results["language"]["tokens"] == 3 * 6
    assert results["text"]["baseline_loss"] != pytest.approx(results["language"]["baseline_loss"], rel=1e-3)
    assert all(loss != results["vision"]["baseline_loss"] for loss in results["vision"]["loss"])


def test_refusals(tmp_path, llama_folder, capsys):
    model, records = llava_folder(tmp_path / "llava"), picture_records(tmp_path / "data")
    assert run("--model", str(llama_folder), "--data", str(records), "--branch", "vision") == 1
    assert "is no vision-language model, it has one branch" in capsys.readouterr().err
    (tmp_path / "data" / "text.jsonl").write_text('{"text": "w5 w6"}\n')
    assert run("--model", str(model), "--data", str(tmp_path / "data" / "text.jsonl"), "--branch", "vision") == 1
    assert "found a record with ['text'], expected text in 'text'" in capsys.readouterr().err
    (tmp_path / "data" / "gone.jsonl").write_text('{"text": "w5 w6", "image": "gone.png"}\n')
    assert run("--model", str(model), "--data", str(tmp_path / "data" / "gone.jsonl"), "--branch", "vision") == 1
    assert "'image': not an image that can be read" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("branch", ["vision", "language"])
def test_a_multimodal_task_with_each_block_removed(branch, tmp_path, monkeypatch, capsys):
    """A generating task of the form of MMMU, by the harness's own multimodal model."""
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'olmo-lns[eval]'")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)  # a `pip list` that nothing reads
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    model, records = llava_folder(tmp_path / "llava"), picture_records(tmp_path / "data")
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    rows = [{"file": str(tmp_path / "data" / f"{i}.png"), "question": f"<image> w{i + 5}"} for i in range(3)]
    (tasks / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tasks / "pictures.py").write_text(
        "from PIL import Image\n"
        "def images(doc): return [Image.open(doc['file'])]\n"
        "def score(doc, results): return {'acc': float(len(results[0]) % 2)}\n"
    )
    (tasks / "pictures.yaml").write_text(
        f"""{{task: pictures, dataset_path: json, dataset_kwargs: {{data_files: {{test: {tasks / "rows.jsonl"}}}}},
test_split: test, output_type: generate_until, doc_to_image: !function pictures.images, doc_to_target: question,
doc_to_text: "{{{{question}}}}", process_results: !function pictures.score,
generation_kwargs: {{until: ["w96"], do_sample: false, max_gen_toks: 4}},
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]}}
"""
    )
    options = ["--tasks", "pictures", "--task-path", str(tasks), "--branch", branch, "-o", str(tmp_path / "r.json")]
    assert run("--model", str(model), "--data", str(records), *options, "--batch-size", "1") == 0
    scores = json.loads((tmp_path / "r.json").read_text())["result"]["tasks"]["pictures"]
    assert len(scores["without"]) == (VISION_LAYERS if branch == "vision" else LANGUAGE_LAYERS)
