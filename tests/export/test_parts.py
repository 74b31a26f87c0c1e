"""The pieces under the exports: rounding, what is refused, tokenizers, config."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from support.exports import byte_tokenizer, export, load_hf, save_olmo

from olmo_lns.checkpoints.architecture import Architecture
from olmo_lns.checkpoints.tensors import LazyTensor
from olmo_lns.errors import LNSConfigError
from olmo_lns.export import fold
from olmo_lns.export.cli import byte_size
from olmo_lns.export.fold import Rounding
from olmo_lns.export.huggingface import choose_class
from olmo_lns.record import Record

Capture = pytest.CaptureFixture[str]


def lazy(tensor: torch.Tensor) -> LazyTensor:
    return LazyTensor(tuple(tensor.shape), tensor.dtype, tensor.clone)


# --- rounding ------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), number=st.integers(1, 64))
def test_the_result_is_the_nearest_number(source: torch.dtype, dtype: torch.dtype, seed: int, number: int) -> None:
    """Of every dtype that weights may have; ``number`` 1 only changes the dtype."""
    weight = torch.randn(500, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(source)
    rounding = Rounding()
    found = rounding.scale("w", weight, number**-0.5, dtype)
    exact = weight.double() / math.sqrt(number)
    info = torch.finfo(dtype)
    unit = torch.exp2(torch.floor(torch.log2(exact.abs().clamp(min=info.smallest_normal)))) * info.eps
    assert ((found.double() - exact).abs() <= unit * (0.5 + 1e-4)).all()
    assert rounding.worst == pytest.approx(((found.double() - exact) / exact).abs().max().item(), rel=1e-6)
    if exact.abs().min() >= info.smallest_normal:
        assert rounding.worst <= info.eps / 2 * (1 + 1e-4)


@pytest.mark.parametrize("factor", [1.0, 3**-0.5])
def test_double_precision_stays(factor: float) -> None:
    weight = torch.randn(500, dtype=torch.float64)
    rounding = Rounding()
    torch.testing.assert_close(rounding.scale("w", weight, factor, torch.float64), weight * factor, rtol=1e-15, atol=0)
    assert rounding.worst == 0  # the product is taken for exact


def test_chunks_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(7, 13)
    whole = Rounding().scale("w", weight, 0.3, torch.bfloat16)
    monkeypatch.setattr(fold, "_CHUNK", 10)
    assert torch.equal(Rounding().scale("w", weight, 0.3, torch.bfloat16), whole)


def test_zeros_and_zero_centred_gains() -> None:
    rounding = Rounding()
    assert torch.equal(rounding.scale("z", torch.zeros(3), 0.5, torch.float32), torch.zeros(3))
    assert rounding.worst == 0
    assert torch.equal(rounding.scale("g", torch.tensor([0.0, 1.0]), 0.5, torch.float32, 1.0), torch.tensor([0.5, 1.0]))


def test_overflow_is_refused() -> None:
    with pytest.raises(LNSConfigError, match=r"overflow torch\.float16"):
        Rounding().scale("w", torch.tensor([1e6]), 1.0, torch.float16)


# --- what the config says ------------------------------------------------------------------------


def test_architecture_knows_olmos_settings_and_defaults() -> None:
    from olmo.config import ModelConfig

    theirs = {f.name: f.default for f in dataclasses.fields(ModelConfig)}
    ours = {f.name: f.default for f in dataclasses.fields(Architecture)}
    assert set(theirs) <= set(ours), "OLMo has a new model setting"
    assert {name: str(value) for name, value in theirs.items()} == {name: str(ours[name]) for name in theirs}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"n_kv_heads": 2},
        {"block_type": "llama", "include_bias": True},
        {"layer_norm_with_affine": False, "weight_tying": True},
        {"attention_layer_norm": True, "n_kv_heads": 2, "bias_for_layer_norm": True},
        {"rope": False, "embedding_layer_norm": True},
        {"activation_type": "gelu"},
    ],
)
def test_shapes_are_those_of_olmos_model(changes: dict[str, Any]) -> None:
    from support.olmo_models import build

    model = build(layer_norm_type="default", **changes)
    config = {k: str(v) if isinstance(v, str) else v for k, v in model.config.asdict().items()}
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert Architecture.from_config(config, "here").shapes() == expected


RMS = Architecture(
    layer_norm_type="lns_rms", rope=True, include_bias=False, bias_for_layer_norm=False, weight_tying=False
)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"clip_qkv": 8.0}, "clip_qkv"),
        ({"bias_for_layer_norm": True}, "biases in RMSNorm"),
        ({"include_bias": True}, "a bias in the output layer"),
        ({"alibi": True}, "ALiBi"),
        ({"rope": False}, "learned position embeddings"),
        ({"norm_after": True}, "post-norm"),
        ({"attention_layer_norm": True}, "queries and keys"),
        ({"embedding_layer_norm": True}, "on the embeddings"),
        ({"scale_logits": True}, "scale_logits"),
        ({"activation_type": "gelu"}, "activation gelu"),
        ({"layer_norm_type": "lns_default", "include_bias": True, "weight_tying": True}, "StableLm has none"),
        (
            {
                "layer_norm_type": "lns_default",
                "layer_norm_with_affine": False,
                "include_bias": True,
                "weight_tying": True,
            },
            "Olmo has none",
        ),
        ({"layer_norm_type": "exotic"}, "layer norm type exotic"),
    ],
)
def test_what_no_class_computes_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(LNSConfigError, match="no stock transformers class") as caught:
        choose_class(dataclasses.replace(RMS, **changes))
    assert reason in str(caught.value) and "\n" not in str(caught.value)


def test_refusal_through_the_command(tmp_path: Path, capsys: Capture) -> None:
    save_olmo(tmp_path / "checkpoint", layer_norm_type="lns_rms", clip_qkv=1.0)
    assert export(tmp_path / "checkpoint", tmp_path / "out", "--format", "hf") == 1
    assert "clip_qkv" in capsys.readouterr().err
    assert export(tmp_path / "checkpoint", tmp_path / "out", "--format", "olmo") == 0


def test_config_yaml_changes_one_line(tmp_path: Path) -> None:
    save_olmo(tmp_path / "checkpoint", layer_norm_type="lns_rms")
    assert export(tmp_path / "checkpoint", tmp_path / "out") == 0
    before = (tmp_path / "checkpoint" / "config.yaml").read_text().splitlines()
    after = (tmp_path / "out" / "config.yaml").read_text().splitlines()
    assert after[0] == "# LayerNorm Scaling (lns) is folded into the weights; see lns.json."
    changed = [(a, b) for a, b in zip(before, after[1:], strict=True) if a != b]
    assert changed == [("  layer_norm_type: lns_rms", "  layer_norm_type: rms")]
    assert json.loads((tmp_path / "out" / "lns.json").read_text())["folded"] is True


def test_unusual_yaml_is_written_anew(tmp_path: Path) -> None:
    save_olmo(tmp_path / "checkpoint", layer_norm_type="lns_rms")
    path = tmp_path / "checkpoint" / "config.yaml"
    config = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump(config, default_flow_style=True))
    assert export(tmp_path / "checkpoint", tmp_path / "out") == 0
    config["model"]["layer_norm_type"] = "rms"
    assert yaml.safe_load((tmp_path / "out" / "config.yaml").read_text()) == config


def test_a_lost_record_is_in_the_config(tmp_path: Path, capsys: Capture) -> None:
    """As for a resume and for analyze: the type holds every parameter; a bare one may be given another exponent."""
    save_olmo(tmp_path / "checkpoint", layer_norm_type="lns_rms")
    (tmp_path / "checkpoint" / "lns.json").unlink()
    for words, exponent in (((), 0.5), (("--exponent", "0.25"), 0.25)):
        assert export(tmp_path / "checkpoint", tmp_path / f"out{exponent}", *words) == 0
        found = Record.read(tmp_path / f"out{exponent}")
        assert found is not None and found.scheme.parameters == {"exponent": exponent}
    capsys.readouterr()
    save_olmo(tmp_path / "other", layer_norm_type="lns_rms")
    assert export(tmp_path / "other", tmp_path / "out2", "--exponent", "0.7") == 1
    assert "says exponent 0.5" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["rms", "default"])
def test_preln_has_nothing_to_fold(tmp_path: Path, capsys: Capture, kind: str) -> None:
    save_olmo(tmp_path / "checkpoint", layer_norm_type=kind)
    assert export(tmp_path / "checkpoint", tmp_path / "out") == 1
    assert "is Pre-LN: there is nothing to fold" in capsys.readouterr().err
    assert export(tmp_path / "checkpoint", tmp_path / "hf", "--format", "hf", "--tokenizer", "none") == 0
    assert "lns" not in json.loads((tmp_path / "hf" / "config.json").read_text())


def test_folded_is_not_folded_again(tmp_path: Path, capsys: Capture) -> None:
    save_olmo(tmp_path / "checkpoint", layer_norm_type="lns_rms")
    assert export(tmp_path / "checkpoint", tmp_path / "once") == 0
    assert export(tmp_path / "once", tmp_path / "twice") == 1
    assert "folded already" in capsys.readouterr().err
    assert export(tmp_path / "once", tmp_path / "hf", "--format", "hf", "--tokenizer", "none") == 0
    assert export(tmp_path / "checkpoint", tmp_path / "direct", "--format", "hf", "--tokenizer", "none") == 0
    once, direct = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "direct"))
    assert all(torch.equal(once[name], direct[name]) for name in direct)


# --- tokenizer and generation config -------------------------------------------------------------


def test_tokenizer_and_generation_config(tmp_path: Path, capsys: Capture) -> None:
    from transformers import AutoTokenizer, GenerationConfig

    tokenizer = byte_tokenizer(tmp_path / "tokenizer.json")
    save_olmo(tmp_path / "checkpoint", tokenizer=tokenizer, layer_norm_type="lns_rms", eos_token_id=0, pad_token_id=0)
    out = tmp_path / "out"
    assert export(tmp_path / "checkpoint", out, "--format", "hf") == 0
    assert "64 tokens, eos '<eos>'" in capsys.readouterr().out
    loaded = AutoTokenizer.from_pretrained(out)
    ids = loaded("A B").input_ids
    assert ids == [34, 1, 35] and loaded.decode(ids) == "A B"
    assert (loaded.eos_token, loaded.pad_token, loaded.eos_token_id) == ("<eos>", "<eos>", 0)
    generation = GenerationConfig.from_pretrained(out)
    assert (generation.eos_token_id, generation.pad_token_id) == (0, 0)
    again = tmp_path / "again"
    assert export(tmp_path / "checkpoint", again, "--format", "hf", "--tokenizer", out) == 0
    assert AutoTokenizer.from_pretrained(again)("A B").input_ids == ids


def test_tokenizer_problems(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    save_olmo(tmp_path / "checkpoint", layer_norm_type="lns_rms")
    big = byte_tokenizer(tmp_path / "big.json", 300)
    arguments = (tmp_path / "checkpoint", tmp_path / "out", "--format", "hf", "--tokenizer")
    assert export(*arguments, big) == 1
    assert "has 300 tokens, the model only 128" in capsys.readouterr().err
    (tmp_path / "bad.json").write_text("{")
    assert export(*arguments, tmp_path / "bad.json") == 1
    assert "--tokenizer none to leave it out" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert export(*arguments, tmp_path / "empty") == 1
    assert "holds no tokenizer files" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_record_survives_transformers(tmp_path: Path) -> None:
    """Stock code keeps the mark when it loads and saves the model."""
    save_olmo(tmp_path / "checkpoint", layer_norm_type="lns_rms")
    assert export(tmp_path / "checkpoint", tmp_path / "hf", "--format", "hf", "--tokenizer", "none") == 0
    load_hf(tmp_path / "hf").save_pretrained(tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["lns"] == "folded"
    assert config["lns_record"]["parameters"] == {"exponent": 0.5} and config["lns_record"]["folded"] is True


@pytest.mark.parametrize(("text", "size"), [("5GB", 5 * 10**9), ("1.5 MB", 1_500_000), ("60kb", 60_000), ("7", 7)])
def test_sizes(text: str, size: int) -> None:
    assert byte_size(text) == size


@pytest.mark.parametrize("text", ["", "big", "0", "0.5B", "-1GB", "5TB"])
def test_bad_sizes(text: str) -> None:
    import argparse

    with pytest.raises(argparse.ArgumentTypeError, match="not a size"):
        byte_size(text)


def test_a_hugging_face_export_has_a_model_card(tmp_path: Path) -> None:
    save_olmo(tmp_path / "step9-unsharded", layer_norm_type="lns_rms")
    assert export(tmp_path / "step9-unsharded", tmp_path / "hf", "--format", "hf", "--tokenizer", "none") == 0
    card = (tmp_path / "hf" / "README.md").read_text()
    assert "# step9-unsharded" in card and "`LlamaForCausalLM`, trained under `lns`" in card
    assert "6 tensors were multiplied" in card and "| scaled_init | `plain` |" in card
    assert "README.md" in (tmp_path / "hf" / "SHA256SUMS").read_text()
    assert str(tmp_path) not in card
