"""Exports are given away: what lies outside the checkpoint must not get into one, nor a tokenizer that does not fit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.exports import byte_tokenizer, export, refused, save_olmo

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text("not for others")
    return path


def test_linked_trainer_state_is_not_copied(checkpoint: Path, tmp_path: Path, secret: Path, capsys: Capture) -> None:
    copy = shutil.copytree(checkpoint, tmp_path / "checkpoint")
    (copy / "train.pt").symlink_to(secret)
    assert f"train.pt is a symbolic link to {secret}" in refused(capsys, copy, tmp_path / "out")


@pytest.mark.parametrize("place", ["train/rank0.pt", "train/more/rank1.pt", "train"])
def test_linked_states_of_ranks(sharded: Path, tmp_path: Path, secret: Path, capsys: Capture, place: str) -> None:
    copy = shutil.copytree(sharded, tmp_path / "checkpoint")
    if place == "train":
        secret.unlink()
        secret.mkdir()
        (secret / "rank0.pt").write_text("not for others")
    else:
        (copy / place).parent.mkdir(parents=True)
        (copy / "train" / "rank0.pt").touch()
        (copy / place).unlink(missing_ok=True)
    (copy / place).symlink_to(secret)
    assert "symbolic link" in refused(capsys, copy, tmp_path / "out")


def tokenizer_folder(path: Path, size: int = 64) -> Path:
    path.mkdir()
    byte_tokenizer(path / "tokenizer.json", size)
    return path


def test_linked_tokenizer_files_are_not_copied(checkpoint: Path, tmp_path: Path, secret: Path, capsys: Capture) -> None:
    folder = tokenizer_folder(tmp_path / "tokenizer")
    (folder / "vocab.txt").symlink_to(secret)
    options = ("--format", "hf", "--tokenizer", folder)
    assert f"vocab.txt is a symbolic link to {secret}" in refused(capsys, checkpoint, tmp_path / "out", *options)


def test_a_folder_of_tokenizer_files_is_checked_like_a_file(checkpoint: Path, tmp_path: Path, capsys: Capture) -> None:
    """The model has 128 rows of embeddings."""
    folder = tokenizer_folder(tmp_path / "large", 129)
    options = ("--format", "hf", "--tokenizer", folder)
    assert "has 129 tokens, the model only 128" in refused(capsys, checkpoint, tmp_path / "out", *options)
    byte_tokenizer(folder / "tokenizer.json")
    (folder / "added_tokens.json").write_text(json.dumps({"<new>": 300}))
    assert "has 301 tokens, the model only 128" in refused(capsys, checkpoint, tmp_path / "out", *options)
    (folder / "added_tokens.json").unlink()
    assert export(checkpoint, tmp_path / "out", *options) == 0
    assert "1 tokenizer files from" in capsys.readouterr().out


@pytest.mark.parametrize("content", ["{", "{}", "[1, 2]"])
def test_a_broken_tokenizer_is_refused(checkpoint: Path, tmp_path: Path, capsys: Capture, content: str) -> None:
    folder = tokenizer_folder(tmp_path / "tokenizer")
    (folder / "tokenizer.json").write_text(content)
    options = ("--format", "hf", "--tokenizer", folder)
    assert "not a folder of tokenizer files that can be read" in refused(capsys, checkpoint, tmp_path / "out", *options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"layer_norm_type": "lns_rms"}, marks=pytest.mark.exhaustive),
        {"layer_norm_type": "lns_rms", "weight_tying": True},
    ],
)
def test_a_model_without_padding_rows(tmp_path: Path, changes: dict[str, Any]) -> None:
    """``embedding_size: null`` is OLMo's way to say that there are none."""
    from olmo_lns.cli import main

    save_olmo(tmp_path / "lns", embedding_size=None, **changes)
    assert "embedding_size: null" in (tmp_path / "lns" / "config.yaml").read_text()
    for form in ("olmo", "hf"):
        assert export(tmp_path / "lns", tmp_path / form, "--format", form, "--tokenizer", "none") == 0
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["vocab_size"] == 64
    assert main(["verify", str(tmp_path / "lns"), str(tmp_path / "hf"), "--length", "16"]) == 0
    if "weight_tying" not in changes:
        assert main(["verify", str(tmp_path / "lns"), str(tmp_path / "olmo"), "--length", "16"]) == 0
