"""``verify`` finds a wrong weight, a missing one, a wrong setting; it refuses what is not folded."""

import json
import shutil

import pytest

pytest.importorskip("olmo.model", reason="ai2-olmo is not installed")

import torch
from safetensors.torch import load_file, save_file
from support.exports import export, save_olmo, verify


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """A checkpoint with exports in fp32 and bf16 for transformers, and one for OLMo."""
    place = tmp_path_factory.mktemp("verify")
    save_olmo(place / "run", layer_norm_type="lns_rms")
    assert export(place / "run", place / "fp32", "--format", "hf", "--tokenizer", "none") == 0
    assert export(place / "run", place / "bf16", "--format", "hf", "--tokenizer", "none", "--dtype", "bf16") == 0
    assert export(place / "run", place / "olmo") == 0
    return place


NORM = "model.layers.2.post_attention_layernorm.weight"


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("change", ["thousandth", "nan", "missing", "unfolded"])
def test_a_wrong_weight_is_found(exports, dtype, change, tmp_path, capsys):
    shutil.copytree(exports / dtype, tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    weights = load_file(path)
    if change == "missing":
        del weights[NORM]
    elif change == "unfolded":
        weights[NORM] *= 3**0.5
    else:
        weights[NORM][5] = torch.nan if change == "nan" else weights[NORM][5].float() * 1.02
    save_file(weights, path, {"format": "pt"})
    assert verify(exports / "run", tmp_path / "out") == 1
    printed = capsys.readouterr()
    assert NORM in printed.out + printed.err and "PASS" not in printed.out


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("rms_norm_eps", 2e-6),
        ("rope_theta", 5e3),
        ("hidden_act", "gelu"),
        ("sliding_window", 4),
        ("max_position_embeddings", 8),
    ],
)
def test_a_wrong_setting_is_found(exports, setting, value, tmp_path, capsys):
    """A window or a limit changes nothing within a short prompt, so that only the config tells."""
    shutil.copytree(exports / "fp32", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    if setting == "rope_theta" and "rope_parameters" in config:
        config["rope_parameters"]["rope_theta"] = value
    config[setting] = value
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    assert verify(exports / "run", tmp_path / "out") == 1
    assert f"{setting} is {value!r}" in capsys.readouterr().out


def test_what_is_no_pair_is_refused(exports, capsys):
    for one, other, reason in (
        (exports / "olmo", exports / "run", "is not folded"),
        (exports / "fp32", exports / "olmo", "is never exported as"),
        (exports / "run", "nothing/relative", "no such folder"),  # no name of the hub
    ):
        assert verify(one, other) == 1
        assert reason in capsys.readouterr().err
