"""The vision recipes: the arms, the views and mixtures of images, and the scripts as the guide calls them."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pandas
import pytest
import torch
import yaml

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'olmo-lns[vision]'")
pytest.importorskip("PIL", reason="Pillow is not installed: pip install 'olmo-lns[vision]'")

from PIL import Image
from support.vision_language_models import LANGUAGE_LAYERS, VISION_LAYERS, llava_folder

FOLDER = Path(__file__).resolve().parents[2] / "configs" / "vision"
SHAPE = dict(image_size=8, patch_size=2, num_channels=1, hidden_size=32, num_hidden_layers=4, num_attention_heads=2, mlp_ratio=2, num_labels=10)  # fmt: skip
COLORS = {"blue": (40, 60, 200), "green": (40, 190, 60), "red": (200, 50, 40)}
spec = importlib.util.spec_from_file_location("vision_recipe", FOLDER / "train.py")
recipe = importlib.util.module_from_spec(spec)
spec.loader.exec_module(recipe)


def pictures(folder):
    """Save images of several sizes, with noise around one color for each class."""
    rng = torch.Generator().manual_seed(0)
    for split, count in (("train", 24), ("val", 8)):
        for name, color in COLORS.items():
            place = folder / split / name
            place.mkdir(parents=True)
            for number in range(count):
                noise = torch.randn(20 + number % 3, 24, 3, generator=rng) * 30
                values = (torch.tensor(color) + noise).clamp(0, 255).to(torch.uint8)
                Image.fromarray(values.numpy()).save(place / f"{number}.png")
    return folder


def small(folder):
    """Write the shipped recipe with a model and a length of training for a CPU."""
    values = yaml.safe_load((FOLDER / "imagenet.yaml").read_text())
    values["model"] |= {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 16, "patch_size": 4}  # fmt: skip
    values["training"] |= {"num_train_epochs": 12, "per_device_train_batch_size": 24, "bf16": False, "use_cpu": True, "disable_tqdm": True, "dataloader_num_workers": 0, "learning_rate": 5e-3, "save_strategy": "no", "eval_strategy": "no"}  # fmt: skip
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def script(*words, folder, name="train.py"):
    env = {**os.environ, "HF_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, str(FOLDER / name), *map(str, words)], env=env, capture_output=True, text=True
    )


@pytest.mark.slow
@pytest.mark.parametrize("arm", [pytest.param("layerscale", marks=[pytest.mark.exhaustive]), "lns"])
def test_the_recipe_learns_a_folder_of_images(arm, tmp_path):
    pytest.importorskip("datasets", reason="datasets is not installed: pip install 'olmo-lns[vision]'")
    words = [small(tmp_path), "--data", pictures(tmp_path / "data"), "--arm", arm, "-o", tmp_path / "out"]
    done = script(*words, folder=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"{arm}: " in done.stdout and ("LayerNorm Scaling on: 6 norms" in done.stderr) == (arm == "lns")
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["accuracy"] > 80 and len(results["variance"]) == 3
    from transformers import AutoModelForImageClassification

    model = AutoModelForImageClassification.from_pretrained(tmp_path / "out")
    assert model.config.model_type == ("lns_dinov2" if arm == "lns" else "dinov2")
    assert model.config.id2label == {0: "blue", 1: "green", 2: "red"}


def test_arms_differ_in_layer_scale_and_factor_only():
    models = {}
    for name in recipe.ARMS:
        torch.manual_seed(0)
        models[name] = recipe.build(name, SHAPE)
    for name, model in models.items():
        assert list(model.state_dict()) == list(models["none"].state_dict())
        factors = {module.lns_scale for module in model.modules() if hasattr(module, "lns_scale")}
        assert factors == ({n**-0.5 for n in range(1, 5)} if name == "lns" else set())
        for key, parameter in model.named_parameters():
            if "layer_scale" in key:
                assert parameter.requires_grad == (name == "layerscale")
                number = int(re.findall(r"layers?\.(\d+)\.", key)[0]) + 1
                value = {"layerscale": 1e-4, "lnsafterbranch": number**-0.5}.get(name, 1.0)
                assert torch.equal(parameter, torch.full_like(parameter, value))
            else:
                assert torch.equal(parameter, models["none"].get_parameter(key)), key


@pytest.mark.slow
@pytest.mark.parametrize(
    ("blocks", "count"),
    [
        ("model.vision_tower.encoder.layers", VISION_LAYERS),
        pytest.param("model.language_model.layers", LANGUAGE_LAYERS, marks=pytest.mark.exhaustive),
    ],
)
def test_the_blocks_of_both_branches_of_a_vision_language_model_are_removed(blocks, count, tmp_path):
    """The harness's multimodal model answers a task like MMMU. The score is the sum of the answer's character codes."""
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'olmo-lns[eval]'")
    model, tasks = llava_folder(tmp_path / "llava"), tmp_path / "tasks"
    tasks.mkdir()
    files = sorted(map(str, pictures(tmp_path / "data").glob("train/*/0.png")))
    rows = [{"file": file, "question": f"<image> w{5 + n}"} for n, file in enumerate(files)]
    (tasks / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tasks / "pictures.py").write_text(
        "from PIL import Image\n"
        "def images(doc): return [Image.open(doc['file'])]\n"
        "def score(doc, results): return {'acc': float(sum(map(ord, results[0])))}\n"
    )
    (tasks / "pictures.yaml").write_text(
        f"""{{task: pictures, dataset_path: json, dataset_kwargs: {{data_files: {{test: {tasks / "rows.jsonl"}}}}},
test_split: test, output_type: generate_until, doc_to_image: !function pictures.images, doc_to_target: question,
doc_to_text: "{{{{question}}}}", process_results: !function pictures.score,
generation_kwargs: {{until: ["w96"], do_sample: false, max_gen_toks: 4}},
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]}}
"""
    )
    options = ["--tasks", "pictures", "--no-chat-template", "--device", "cpu", "--dtype", "float32"]
    words = [model, "--blocks", blocks, "--task-path", tasks, *options, "-o", tmp_path / "out.csv"]
    done = script(*words, folder=tmp_path, name="removal.py")
    assert done.returncode == 0, done.stderr[-3000:]
    table = pandas.read_csv(tmp_path / "out.csv")
    assert list(table["block"]) == list(range(count + 1)) and table["pictures:acc"].nunique() > 1, table
