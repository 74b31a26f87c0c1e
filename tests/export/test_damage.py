"""Damaged, foreign and contradictory checkpoints: one line, and nothing left behind."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any, Callable

import pytest
import torch
from support.exports import refused

from olmo_lns.errors import LNSConfigError
from olmo_lns.export.distributed import DistributedCheckpoint

Capture = pytest.CaptureFixture[str]


def state_change(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        state = torch.load(folder / "model.pt", weights_only=True)
        change(state)
        torch.save(state, folder / "model.pt")

    return damage


def truncate(folder: Path) -> None:
    os.truncate(folder / "model.pt", 5000)


def flip(folder: Path) -> None:
    data = bytearray((folder / "model.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "model.pt").write_bytes(data)


def edit(old: str, new: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        text = (folder / "config.yaml").read_text()
        assert old in text
        (folder / "config.yaml").write_text(text.replace(old, new))

    return damage


def record(**changes: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        values = json.loads((folder / "lns.json").read_text())
        (folder / "lns.json").write_text(json.dumps(values | changes))

    return damage


class Hostile:
    def __reduce__(self) -> Any:
        return print, ("this must never run",)


WEIGHT = "transformer.blocks.2.attn_norm.weight"
DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (truncate, "truncated"),
    "flipped bit": (flip, "checksum"),
    "missing key": (state_change(lambda s: s.pop(WEIGHT)), f"lacks the weight {WEIGHT}"),
    "extra key": (state_change(lambda s: s.update(extra=s[WEIGHT])), "unexpected the weight extra"),
    "wrong shape": (state_change(lambda s: s.update({WEIGHT: torch.ones(7)})), "has shape (7,)"),
    "hostile pickle": (state_change(lambda s: s.update(x=Hostile())), "cannot be loaded safely"),
    "not tensors": (state_change(lambda s: s.update({WEIGHT: 3})), "not a state dict of tensors"),
    "no model.pt": (lambda f: (f / "model.pt").unlink(), "neither model.pt nor"),
    "wrong depth": (edit("n_layers: 4", "n_layers: 5"), "lacks the weight"),
    "unknown setting": (edit("  n_layers: 4", "  n_layers: 4\n  magic: 1"), "unknown model setting 'magic'"),
    "not yaml": (edit("n_layers: 4", "n_layers: [4"), "not valid YAML"),
    "not a number": (edit("n_layers: 4", "n_layers: four"), "n_layers must be of type int"),
    "no record": (lambda f: (f / "lns.json").unlink(), "--exponent"),
    "half a record": (lambda f: (f / "lns.json").write_text("{"), "not valid JSON"),
    "record of another norm": (record(type="lns_default"), "contradict each other"),
    "record says folded": (record(folded=True), "contradict each other"),
    "config says rms": (edit("layer_norm_type: lns_rms", "layer_norm_type: rms"), "contradict each other"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_checkpoint(checkpoint: Path, tmp_path: Path, capsys: Capture, name: str) -> None:
    damage, reason = DAMAGE[name]
    copy = shutil.copytree(checkpoint, tmp_path / "checkpoint")
    damage(copy)
    line = refused(capsys, copy, tmp_path / "out", "--format", "hf", "--tokenizer", "none")
    assert reason in line


def shards_of(folder: Path) -> list[Path]:
    return sorted((folder / "model_and_optim").glob("*.distcp"))


def flip_shard(folder: Path) -> None:
    path = shards_of(folder)[0]
    data = bytearray(path.read_bytes())
    for position in range(200, len(data), 400):
        data[position] ^= 1
    path.write_bytes(data)


SHARD_DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated shard": (lambda f: os.truncate(shards_of(f)[0], 3000), "is truncated"),
    "flipped bits": (flip_shard, ""),
    "missing shard": (lambda f: shards_of(f)[0].unlink(), "is missing"),
    "no metadata": (lambda f: (f / "model_and_optim" / ".metadata").unlink(), "not a complete distributed checkpoint"),
    "half metadata": (lambda f: os.truncate(f / "model_and_optim" / ".metadata", 100), "damaged or unsafe"),
    "hostile metadata": (
        lambda f: (f / "model_and_optim" / ".metadata").write_bytes(pickle.dumps(Hostile())),
        "no place in a checkpoint's metadata",
    ),
}


@pytest.mark.parametrize("form", ["olmo", "hf"])
@pytest.mark.parametrize("name", SHARD_DAMAGE)
def test_damaged_shards(sharded: Path, tmp_path: Path, capsys: Capture, name: str, form: str) -> None:
    damage, reason = SHARD_DAMAGE[name]
    copy = shutil.copytree(sharded, tmp_path / "checkpoint")
    damage(copy)
    assert reason in refused(capsys, copy, tmp_path / "out", "--format", form, "--tokenizer", "none")


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        (["rank0.pt"], "torch_legacy"),
        (["model/rank0.pt"], "local checkpointer"),
        (["model/x.safetensors"], "olmo_core"),
    ],
)
def test_other_sharded_kinds(checkpoint: Path, tmp_path: Path, capsys: Capture, files: list[str], reason: str) -> None:
    copy = shutil.copytree(checkpoint, tmp_path / "checkpoint")
    (copy / "model.pt").unlink()
    for name in files:
        (copy / name).parent.mkdir(exist_ok=True)
        (copy / name).touch()
    line = refused(capsys, copy, tmp_path / "out")
    assert reason in line and "unshard.py" in line


def test_metadata_of_the_real_thing_is_read(sharded: Path) -> None:
    names = DistributedCheckpoint(sharded / "model_and_optim").names
    assert f"model.{WEIGHT}" in names


def test_paths_outside_the_folder_are_refused(sharded: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(sharded / "model_and_optim", tmp_path / "copy")
    metadata = pickle.loads((copy / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = f"../{info.relative_path}"
    (copy / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(LNSConfigError, match="outside the folder"):
        DistributedCheckpoint(copy)


def test_reading_errors_name_the_file(checkpoint: Path, tmp_path: Path, capsys: Capture) -> None:
    assert "is not a folder" in refused(capsys, tmp_path / "absent", tmp_path / "out")
    assert "not a checkpoint" in refused(capsys, tmp_path, tmp_path / "out")
    assert "for Megatron" in refused(capsys, checkpoint, tmp_path / "out", "--format", "megatron")
