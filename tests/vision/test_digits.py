"""The four vision arms: what each is, and one table and figure by one command."""

from __future__ import annotations

import json

import pytest
import torch

from olmo_lns.cli import main
from olmo_lns.schemes import names

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'olmo-lns[vision]'")
pytest.importorskip("sklearn", reason="scikit-learn is not installed: pip install 'olmo-lns[vision]'")

from olmo_lns.vision.arms import ARMS, build
from olmo_lns.vision.digits import block_variance, data

SHAPE = dict(image_size=8, patch_size=2, num_channels=1, hidden_size=32, num_hidden_layers=4, num_attention_heads=2, mlp_ratio=2, num_labels=10)  # fmt: skip
AVAILABLE = [name for name, arm in ARMS.items() if arm.scheme in names()]


def test_arms_differ_in_layer_scale_and_factor_only():
    torch.manual_seed(0)
    models = {}
    for name in AVAILABLE:
        torch.manual_seed(0)
        models[name] = build(ARMS[name], SHAPE)
    keys = {name: list(model.state_dict()) for name, model in models.items()}
    assert all(found == keys["none"] for found in keys.values())
    for name, model in models.items():
        for key, parameter in model.named_parameters():
            if "layer_scale" in key:
                assert parameter.requires_grad == (name == "layerscale")
                assert torch.equal(parameter, torch.full_like(parameter, 1e-4 if name == "layerscale" else 1.0))
            else:
                assert torch.equal(parameter, models["none"].get_parameter(key)), key


def test_variance_is_that_of_the_block_outputs():
    torch.manual_seed(0)
    model, (images, _) = build(ARMS["none"], SHAPE).eval(), data()
    with torch.no_grad():
        hidden = model.dinov2(pixel_values=images[:5], output_hidden_states=True).hidden_states
    expected = [states.double().var(-1, unbiased=False).mean().item() for states in hidden[1:]]
    # The last hidden state may be given after the final norm.
    assert block_variance(model, images[:5])[:-1] == pytest.approx(expected[:3], rel=1e-5)


@pytest.mark.slow
def test_one_command(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'olmo-lns[vision]'")
    small = ["--depth", "2", "--width", "32", "--epochs", "8", "--lr", "4e-3", "--arms"]
    assert main(["vision", "digits", "-o", str(tmp_path / "out"), *small, "none,lns"]) == 0
    out = capsys.readouterr().out
    assert "| LNS after the norm | " in out and "no evidence" in out and "66.43" in out
    results = json.loads((tmp_path / "out" / "results.json").read_text())["results"]
    assert all(result["accuracy"] > 30 and len(result["variance"]) == 2 for result in results.values())
    assert (tmp_path / "out" / "figure.png").stat().st_size > 1000


def test_an_unknown_arm(tmp_path, capsys):
    assert main(["vision", "digits", "-o", str(tmp_path), "--arms", "lnz"]) == 1
    assert "unknown 'lnz': expected some of none, layerscale, lns, lnsafterbranch" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("--batch-size=1438", "--batch-size 1438: there are 1437 images to train on"),
        ("--width=50", "--width 50: 3 heads of 16 channels each: expected a multiple of 16"),
    ],
)
def test_what_cannot_be_trained(argument, expected, tmp_path, capsys):
    assert main(["vision", "digits", "-o", str(tmp_path / "out"), argument]) == 1
    assert expected in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_results_of_other_settings_are_kept(tmp_path, capsys, monkeypatch):
    from olmo_lns.vision import digits

    monkeypatch.setattr(digits, "train", lambda arm, args: {"accuracy": 9.0, "loss": 1.0, "variance": [1.0, 2.0]})
    monkeypatch.setattr(digits, "_figure", lambda results, path: path)
    command = ["vision", "digits", "-o", str(tmp_path), "--arms", "none"]
    assert main(command) == 0 and main(command) == 0
    before = (tmp_path / "results.json").read_bytes()
    assert main([*command, "--epochs", "3"]) == 1
    assert "has a run of other settings: give another folder with -o" in capsys.readouterr().err
    assert (tmp_path / "results.json").read_bytes() == before
