"""Kills, full disks, damaged and contradictory checkpoints: one line, and nothing left behind."""

from __future__ import annotations

import errno
import json
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, Callable

import pytest
import torch
from support.exports import export, load_hf, save_olmo

from olmo_lns.errors import LNSConfigError
from olmo_lns.export import atomic
from olmo_lns.export.atomic import CHECKSUMS, ExportError, atomic_folder, verify_checksums
from olmo_lns.export.distributed import DistributedCheckpoint

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "checkpoint"
    save_olmo(folder, layer_norm_type="lns_rms")
    return folder


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "sharded"
    save_olmo(folder, sharded=True, layer_norm_type="lns_rms")
    return folder


def refused(capsys: Capture, *args: Any) -> str:
    """Run an export that must fail; returns its one line, having checked that nothing was written."""
    out = Path(args[1])
    before = sorted(out.parent.iterdir())
    capsys.readouterr()
    assert export(*args) == 1
    captured = capsys.readouterr()
    assert sorted(out.parent.iterdir()) == before, "something was left behind"
    assert captured.err.count("\n") == 1 and "Traceback" not in captured.err, captured.err
    assert captured.out == ""
    return captured.err


# --- kill -9 -------------------------------------------------------------------------------------

KILLED = textwrap.dedent(
    """
    import os, signal, sys
    from olmo_lns.export import {module}
    original = {module}.{function}
    calls = 0
    def killed(*args, **kwargs):
        global calls
        calls += 1
        if calls == {call}:
            os.kill(os.getpid(), signal.{signal})
        return original(*args, **kwargs)
    {module}.{function} = killed
    from olmo_lns.cli import main
    sys.exit(main(["export", *sys.argv[1:]]))
    """
)


def run_killed(checkpoint: Path, out: Path, module: str, function: str, call: int, stop: str = "SIGKILL") -> int:
    code = KILLED.format(module=module, function=function, call=call, signal=stop)
    command = [sys.executable, "-c", code, str(checkpoint), str(out), "--format", "hf", "--tokenizer", "none"]
    return subprocess.run([*command, "--max-shard-size", "60KB"], capture_output=True, timeout=120).returncode


@pytest.mark.parametrize(
    ("module", "function", "call"),
    [
        ("shards", "tensor_bytes", 1),  # in the first tensor
        ("shards", "tensor_bytes", 30),  # in a later shard
        ("huggingface", "_write_json", 2),  # all weights are there, the config is not
        ("atomic", "_digest", 3),  # complete, not yet renamed
    ],
)
def test_kill_9_leaves_no_export(checkpoint: Path, tmp_path: Path, module: str, function: str, call: int) -> None:
    out = tmp_path / "out"
    assert run_killed(checkpoint, out, module, function, call) == -signal.SIGKILL
    assert not out.exists()
    leftovers = list(tmp_path.iterdir())
    assert len(leftovers) == 1 and leftovers[0].name.startswith(".out.")
    if function != "_digest":
        assert not (leftovers[0] / "config.json").exists()
        with pytest.raises((OSError, ValueError)):
            load_hf(leftovers[0])
    assert export(checkpoint, out, "--format", "hf", "--tokenizer", "none") == 0
    assert list(tmp_path.iterdir()) == [out], "the next export clears what the killed one left"
    load_hf(out)


def test_sigterm_cleans_up(checkpoint: Path, tmp_path: Path) -> None:
    assert run_killed(checkpoint, tmp_path / "out", "shards", "tensor_bytes", 5, "SIGTERM") == 130
    assert list(tmp_path.iterdir()) == []


def test_running_export_is_not_cleared(checkpoint: Path, tmp_path: Path, capsys: Capture) -> None:
    with atomic_folder(tmp_path / "out"):
        assert "another export" in refused(capsys, checkpoint, tmp_path / "out")


# --- the disk ------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["olmo", "olmo-unsharded", "hf"])
def test_file_size_limit(sharded: Path, tmp_path: Path, capsys: Capture, form: str) -> None:
    """RLIMIT_FSIZE: the write fails in the middle of a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        line = refused(capsys, sharded, tmp_path / "out", "--format", form, "--tokenizer", "none")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "File too large" in line and "nothing was left behind" in line


@pytest.mark.parametrize("call", [1, 20])
def test_disk_full(
    checkpoint: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    from olmo_lns.export import archive

    original, calls = archive._write_record, []

    def full(*args: Any) -> None:
        calls.append(1)
        if len(calls) == call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(*args)

    monkeypatch.setattr(archive, "_write_record", full)
    assert "No space left on device" in refused(capsys, checkpoint, tmp_path / "out")


def test_full_device(checkpoint: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A real ENOSPC: the weights go to /dev/full."""
    from olmo_lns.export import shards

    monkeypatch.setattr(shards, "_write_file", lambda path, tensors: _to(Path("/dev/full"), tensors))

    def _to(path: Path, tensors: Any) -> Path:
        with path.open("wb") as file:
            file.write(b"x" * 100_000)
        return path

    assert "No space left" in refused(capsys, checkpoint, tmp_path / "out", "--format", "hf", "--tokenizer", "none")


def test_no_overwriting(checkpoint: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "out").mkdir()
    assert "never overwrite" in refused(capsys, checkpoint, tmp_path / "out")


def test_parent_must_exist(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(LNSConfigError, match="create it first"), atomic_folder(tmp_path / "absent" / "out"):
        pass


def test_somebody_else_made_the_folder_meanwhile(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="not empty"), atomic_folder(tmp_path / "out") as folder:
        (folder / "a").write_text("ours")
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "b").write_text("theirs")
    assert [p.name for p in tmp_path.rglob("*")] == ["out", "b"]


def test_checksums(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert export(checkpoint, out) == 0
    done = subprocess.run(["sha256sum", "--check", "--strict", CHECKSUMS], cwd=out, capture_output=True, text=True)
    assert done.returncode == 0 and "model.pt: OK" in done.stdout
    assert verify_checksums(out) == 4
    data = bytearray((out / "model.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (out / "model.pt").write_bytes(data)
    with pytest.raises(LNSConfigError, match=r"model\.pt differs"):
        verify_checksums(out)
    (out / "lns.json").unlink()
    with pytest.raises(LNSConfigError, match=r"lns\.json is missing"):
        verify_checksums(out)


# --- damaged checkpoints -------------------------------------------------------------------------


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


def test_lock_is_released(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "a") as folder:
        (folder / "x").write_text("1")
    assert (tmp_path / "a" / "x").read_text() == "1"
    assert atomic.verify_checksums(tmp_path / "a") == 1
