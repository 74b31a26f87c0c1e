"""``olmo-lns verify``: what it prints, and that it fails when it should."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.exports import byte_tokenizer, export, save_olmo

from olmo_lns.cli import main
from olmo_lns.export.verify import compare

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verify")
    tokenizer = byte_tokenizer(folder / "tokenizer.json")
    save_olmo(folder / "lns", tokenizer=tokenizer, layer_norm_type="lns_rms", eos_token_id=0, pad_token_id=0)
    for form in ("olmo", "hf"):
        assert export(folder / "lns", folder / form, "--format", form) == 0
    assert export(folder / "lns", folder / "bf16", "--format", "hf", "--dtype", "bf16") == 0
    return folder


def verify(*args: Any) -> int:
    return main(["verify", *map(str, args), "--length", "16"])


@pytest.mark.parametrize("form", ["olmo", "hf", "bf16"])
def test_report(checkpoint: Path, capsys: Capture, form: str) -> None:
    assert verify(checkpoint / "lns", checkpoint / form) == 0
    out = capsys.readouterr().out
    assert "files match" in out and out.rstrip().endswith("PASS")
    assert re.search(r"positions compared +128\n", out)
    found, allowed = map(float, re.search(r"logit (\S+) \(allowed (\S+)\)", out).groups())  # type: ignore[union-attr]
    assert 0 < found <= allowed
    before, after = map(float, re.search(r"perplexity +(\S+) checkpoint, (\S+) export", out).groups())  # type: ignore[union-attr]
    assert after == pytest.approx(before, rel=1e-5 if form != "bf16" else 1e-2)


def test_prompts_from_text(checkpoint: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "text").write_text("THE QUICK BROWN FOX JUMPS OVER THE LAZY DOG. " * 3)
    assert verify(checkpoint / "lns", checkpoint / "hf", "--text", tmp_path / "text") == 0
    assert "positions compared      128" in capsys.readouterr().out
    (tmp_path / "text").write_text("SHORT")
    assert verify(checkpoint / "lns", checkpoint / "hf", "--text", tmp_path / "text") == 1
    assert "has 5 tokens" in capsys.readouterr().err


def test_export_without_the_factor_fails(checkpoint: Path, tmp_path: Path, capsys: Capture) -> None:
    """The same export with the factor taken out of the gains again."""
    import shutil

    wrong = shutil.copytree(checkpoint / "hf", tmp_path / "wrong")
    state = load_file(wrong / "model.safetensors")
    for index in range(4):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            state[f"model.layers.{index}.{norm}.weight"] *= (index + 1) ** 0.5
    save_file(state, wrong / "model.safetensors", metadata={"format": "pt"})
    assert verify(checkpoint / "lns", wrong) == 1
    assert "model.safetensors differs from its checksum" in capsys.readouterr().err
    (wrong / "SHA256SUMS").unlink()
    assert verify(checkpoint / "lns", wrong) == 1
    out = capsys.readouterr().out
    assert out.rstrip().endswith("FAIL") and "none in this folder" in out


def test_nan_fails() -> None:
    class Constant(torch.nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.value = torch.nn.Parameter(torch.tensor(value))

        def forward(self, ids: torch.Tensor) -> Any:
            logits = torch.arange(5.0).expand(*ids.shape, 5) * self.value
            return type("Output", (), {"logits": logits})

    ids = torch.zeros(2, 4, dtype=torch.long)
    with torch.no_grad():
        assert compare(Constant(1.0), Constant(1.0), ids).passed
        assert not compare(Constant(1.0), Constant(float("nan")), ids).passed
        assert not compare(Constant(1.0), Constant(1.001), ids).passed


def test_exponent_comes_from_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not from this process' environment, which verify leaves as it was."""
    monkeypatch.setenv("OLMO_LNS_EXPONENT", "1.0")
    save_olmo(tmp_path / "lns", layer_norm_type="lns_rms", exponent=1.0)
    monkeypatch.setenv("OLMO_LNS_EXPONENT", "0.5")
    assert export(tmp_path / "lns", tmp_path / "hf", "--format", "hf", "--tokenizer", "none") == 0
    assert verify(tmp_path / "lns", tmp_path / "hf") == 0


def test_sharded_checkpoint(tmp_path: Path) -> None:
    save_olmo(tmp_path / "lns", sharded=True, layer_norm_type="lns_rms", block_group_size=2)
    assert export(tmp_path / "lns", tmp_path / "folded") == 0
    assert verify(tmp_path / "lns", tmp_path / "folded") == 0


def test_what_cannot_be_run(checkpoint: Path, tmp_path: Path, capsys: Capture) -> None:
    assert verify(checkpoint / "lns", tmp_path) == 1
    assert "neither config.json nor config.yaml" in capsys.readouterr().err
    assert verify(tmp_path, checkpoint / "hf") == 1
    assert "is not an OLMo or Megatron checkpoint" in capsys.readouterr().err
