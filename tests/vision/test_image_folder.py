"""`olmo-lns vision train` on a small folder of images made here; the shipped recipe's numbers."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
import yaml

from olmo_lns.cli import main
from olmo_lns.integrations.transformers.sites import blocks_of, known_family
from olmo_lns.schemes import names

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'olmo-lns[vision]'")
pytest.importorskip("datasets", reason="datasets is not installed: pip install 'olmo-lns[vision]'")
pytest.importorskip("PIL", reason="Pillow is not installed: pip install 'olmo-lns[vision]'")

from PIL import Image

from olmo_lns.vision.arms import ARMS, build
from olmo_lns.vision.augment import Mixing, held_out_view, normalised, train_view
from olmo_lns.vision.train import Recipe

RECIPE = Path(__file__).resolve().parents[2] / "configs" / "vision" / "imagenet.yaml"
COLOURS = {"blue": (40, 60, 200), "green": (40, 190, 60), "red": (200, 50, 40)}


def pictures(folder: Path, train: int = 24, held_out: int = 8) -> Path:
    """Noise around one colour a class, of several sizes."""
    rng = torch.Generator().manual_seed(0)
    for split, count in (("train", train), ("val", held_out)):
        for name, colour in COLOURS.items():
            place = folder / split / name
            place.mkdir(parents=True)
            for number in range(count):
                noise = torch.randn(20 + number % 3, 24, 3, generator=rng) * 30
                values = (torch.tensor(colour) + noise).clamp(0, 255).to(torch.uint8)
                Image.fromarray(values.numpy()).save(place / f"{number}.png")
    return folder


def small(folder: Path, **changes) -> Path:
    """The shipped recipe with a model and a length for a CPU."""
    values = yaml.safe_load(RECIPE.read_text())
    values["model"] |= {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 16, "patch_size": 4}  # fmt: skip
    short = {"num_train_epochs": 12, "per_device_train_batch_size": 24, "bf16": False, "use_cpu": True, "disable_tqdm": True, "dataloader_num_workers": 0, "learning_rate": 5e-3, "save_strategy": "no", "eval_strategy": "no"}  # fmt: skip
    values["training"] |= short | changes
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["layerscale", "lns"])
def test_one_command_trains_an_arm(arm, tmp_path, monkeypatch, capsys):
    import transformers

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    command = ["vision", "train", str(small(tmp_path)), "--data", str(pictures(tmp_path / "data"))]
    assert main([*command, "--arm", arm, "-o", str(tmp_path / "out"), "--resume"]) == 1
    assert "holds no checkpoint-*: leave it out to start" in capsys.readouterr().err
    assert main([*command, "--arm", arm, "-o", str(tmp_path / "out")]) == 0
    assert f"{ARMS[arm].label}: " in capsys.readouterr().out
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["accuracy"] > 80 and len(results["variance"]) == 3
    assert results["images"] == {"train": 72, "validation": 24}
    model = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "out")
    assert model.config.model_type == ("lns_dinov2" if arm == "lns" else "dinov2")
    assert model.config.id2label == {0: "blue", 1: "green", 2: "red"}


def test_a_view_has_the_size_and_colours_of_its_image():
    random.seed(0)
    image = Image.new("RGB", (40, 30), COLOURS["red"])
    kinds = set()
    for _ in range(30):
        view = train_view(image, 16, 0.0)
        assert view.size == (16, 16)
        kinds.add(view.getpixel((8, 8)))
    gray = round(0.299 * 200 + 0.587 * 50 + 0.114 * 40)
    assert kinds == {COLOURS["red"], (gray,) * 3, (255 - 200, 50, 40)}  # blurred, gray, solarized
    whole = Image.new("RGB", (48, 16))
    whole.paste((255, 255, 255), (16, 0, 32, 16))
    assert held_out_view(whole, 16).getextrema() == ((255, 255),) * 3
    tensor = normalised(Image.new("RGB", (2, 2), (124, 116, 104)))
    assert tensor.shape == (3, 2, 2) and tensor.abs().max() < 0.02


def test_mixtures_have_the_shares_that_their_targets_say():
    random.seed(1)
    images = torch.stack([torch.full((3, 16, 16), float(value)) for value in (0, 1)])
    labels = torch.tensor([0, 1])
    for mixing in (Mixing(0.8, 0.0, 0.0), Mixing(0.0, 1.0, 0.0)):
        for _ in range(20):
            mixed, targets = mixing(images, labels, 2)
            torch.testing.assert_close(mixed.mean((1, 2, 3)), targets[:, 1])
            assert (mixing.cutmix == 0) or set(mixed.unique().tolist()) <= {0.0, 1.0}
    untouched, targets = Mixing(0.0, 0.0, 0.1)(images, labels, 2)
    assert torch.equal(untouched, images)
    torch.testing.assert_close(targets, torch.tensor([[0.95, 0.05], [0.05, 0.95]]))


def test_the_recipe_is_of_the_shape_that_is_shipped_beside_it():
    recipe = Recipe(RECIPE)
    beside = json.loads((RECIPE.parent / "deit3-small-36" / "config.json").read_text())
    assert {name: beside[name] for name in recipe.model} == recipe.model
    if "lnsafterbranch" in names():
        with torch.device("meta"):
            model = build(ARMS["layerscale"], recipe.model)
        assert len(blocks_of(model, known_family(model))) == 36


def test_refusals(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    words = ["--data", str(tmp_path / "nowhere"), "-o", str(tmp_path / "out")]
    assert main(["vision", "train", str(RECIPE), *words, "--arm", "lnz"]) == 1
    assert "--arm: unknown 'lnz': expected one of none, layerscale" in capsys.readouterr().err
    assert main(["vision", "train", str(RECIPE), *words, "--arm", "none"]) == 1
    assert "nowhere: no folder of images" in capsys.readouterr().err
    (tmp_path / "odd.yaml").write_text("model: {}\n")
    assert main(["vision", "train", str(tmp_path / "odd.yaml"), *words, "--arm", "none"]) == 1
    assert "expected the sections model, augment, warmup_epochs, training" in capsys.readouterr().err


@pytest.mark.parametrize("given", [{"warmup_steps": 9}, {"warmup_ratio": 0.1}], ids=str)
def test_a_second_warm_up_is_refused(given, tmp_path, capsys):
    path = small(tmp_path, **given)
    assert main(["vision", "train", str(path), "--data", "x", "-o", str(tmp_path / "out"), "--arm", "none"]) == 1
    (name, value), *_ = given.items()
    assert (
        f"training: {name} is {value} beside warmup_epochs 5; the warm-up is given in epochs" in capsys.readouterr().err
    )
