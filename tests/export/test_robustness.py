"""A killed or failing export leaves no partial result in its place, and an export's memory is bounded."""

import json
import os
import resource
import signal
import subprocess
import sys
import textwrap

import pytest
import torch
from support.exports import export, load_hf, refused

from olmo_lns.checkpoints.olmo import Architecture
from olmo_lns.errors import LNSConfigError
from olmo_lns.export.atomic import CHECKSUMS, ExportError, atomic_folder, verify_checksums
from olmo_lns.record import Record
from olmo_lns.schemes import LNS

# --- kill -9 -------------------------------------------------------------------------------------

KILLED = textwrap.dedent(
    """
    import os, signal, sys
    from olmo_lns.{package} import {module}
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


def run_killed(checkpoint, out, module, function, call, stop="SIGKILL"):
    package = "checkpoints" if module == "tensors" else "export"
    code = KILLED.format(package=package, module=module, function=function, call=call, signal=stop)
    command = [sys.executable, "-c", code, str(checkpoint), str(out), "--format", "hf", "--tokenizer", "none"]
    return subprocess.run([*command, "--max-shard-size", "60KB"], capture_output=True, timeout=120).returncode


@pytest.mark.parametrize(
    ("module", "function", "call"),
    [
        pytest.param("tensors", "_write_shard", 1, marks=pytest.mark.exhaustive),  # in the first tensor
        ("tensors", "_write_shard", 3),  # a later shard
        ("sources", "write_json", 2),  # all weights are there, the config is not
        pytest.param("atomic", "_sha256", 3, marks=pytest.mark.exhaustive),  # complete, not yet renamed
    ],
)
@pytest.mark.slow
def test_kill_9_leaves_no_export(checkpoint, tmp_path, module, function, call):
    out = tmp_path / "out"
    assert run_killed(checkpoint, out, module, function, call) == -signal.SIGKILL
    assert not out.exists()
    leftovers = list(tmp_path.iterdir())
    assert len(leftovers) == 1 and leftovers[0].name.startswith(".out.")
    if function != "_sha256":
        assert not (leftovers[0] / "config.json").exists()
        with pytest.raises((OSError, ValueError)):
            load_hf(leftovers[0])
    assert export(checkpoint, out, "--format", "hf", "--tokenizer", "none") == 0
    assert list(tmp_path.iterdir()) == [out], "the next export clears what the killed one left"
    load_hf(out)


@pytest.mark.slow
def test_sigterm_removes_the_partial_export(checkpoint, tmp_path):
    assert run_killed(checkpoint, tmp_path / "out", "tensors", "_write_shard", 3, "SIGTERM") == 130
    assert list(tmp_path.iterdir()) == []


def test_a_running_export_is_not_cleared_by_another(checkpoint, tmp_path, capsys):
    with atomic_folder(tmp_path / "out"):
        assert "another export" in refused(capsys, checkpoint, tmp_path / "out")


def test_a_path_that_only_looks_like_a_leftover_is_kept(tmp_path):
    """A user's folder, file, link and pipe are named like a hidden folder of ours."""
    ours = [tmp_path / f".out.{name}.partial" for name in ("folder", "file", "link", "pipe", "other")]
    ours[0].mkdir()
    (ours[0] / "thesis.txt").write_text("a year's work")
    ours[1].write_text("also work")
    ours[2].symlink_to(ours[0])
    os.mkfifo(ours[3])
    ours[4].mkdir()
    (ours[4] / ".olmo-lns-export").write_text("out.other")  # the leftover of an export to another folder
    with atomic_folder(tmp_path / "out.longer"), atomic_folder(tmp_path / "out") as folder:
        (folder / "a").write_text("1")
    assert sorted(tmp_path.iterdir()) == sorted([*ours, tmp_path / "out", tmp_path / "out.longer"])
    assert (ours[0] / "thesis.txt").read_text() == "a year's work"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["SHA256SUMS", "a"]


# --- the disk ------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["olmo", "olmo-unsharded", "hf"])
def test_a_write_that_fails_leaves_nothing_behind(sharded, tmp_path, capsys, form):
    """RLIMIT_FSIZE makes the write fail in the middle of a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        line = refused(capsys, sharded, tmp_path / "out", "--format", form, "--tokenizer", "none")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "File too large" in line and "nothing was left behind" in line


def test_an_export_overwrites_no_folder_and_makes_no_parent(checkpoint, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    assert "never overwrite" in refused(capsys, checkpoint, tmp_path / "out")
    with pytest.raises(LNSConfigError, match="create it first"), atomic_folder(tmp_path / "absent" / "out"):
        pass


def test_a_folder_that_somebody_else_made_meanwhile_is_kept(tmp_path):
    with pytest.raises(ExportError, match="not empty"), atomic_folder(tmp_path / "out") as folder:
        (folder / "a").write_text("ours")
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "b").write_text("theirs")
    assert [p.name for p in tmp_path.rglob("*")] == ["out", "b"]


def test_the_checksums_find_a_changed_and_a_missing_file(checkpoint, tmp_path):
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


ZERO = b"0" * 64


@pytest.mark.parametrize(
    "content",
    [b"\xff\xfe\x00", b"no list", b"0  SHA256SUMS", ZERO + b"  ", ZERO + b"  ../other", ZERO + b"  /etc/hostname"],
)
def test_a_file_that_is_not_a_list_of_checksums_is_refused(tmp_path, content):
    (tmp_path / CHECKSUMS).write_bytes(content)
    with pytest.raises(LNSConfigError, match="is no text|is not a SHA-256 digest"):
        verify_checksums(tmp_path)


# --- memory: no more than --max-shard-size beyond what the process takes anyway --------------------

LIMIT = 40_000_000
#: Bytes for one chunk of a tensor in double precision, and for the buffers of files.
CONSTANT = 16_000_000
#: Exports a small checkpoint, then the large one; prints by how many bytes the second raised the largest resident size.
PROGRAM = """
import resource, sys
from olmo_lns.cli import main
peaks = []
for name in ("small", "large"):
    assert main(["export", f"{sys.argv[1]}/{name}", f"{sys.argv[1]}/{name}-out", *sys.argv[2:]]) == 0
    peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
print("MORE", peaks[1] - peaks[0])
"""


def save(folder, width, layers):
    """Write a sharded OLMo checkpoint with torch's own writer: one file, however large."""
    from torch.distributed import checkpoint

    size = {"n_layers": layers, "d_model": width, "n_heads": 4, "vocab_size": 8 * width, "embedding_size": 8 * width}
    plain = {"rope": True, "include_bias": False, "bias_for_layer_norm": False, "weight_tying": False}
    config = {**size, **plain, "layer_norm_type": "lns_rms"}
    shapes = Architecture.from_config(config, "here").shapes()
    state = {f"model.{name}": torch.randn(shape) for name, shape in shapes.items()}
    folder.mkdir()
    checkpoint.save(state, checkpoint_id=folder / "model_and_optim", no_dist=True)
    (folder / "config.yaml").write_text(json.dumps({"model": config}))
    Record(LNS, "rms", "plain").write(folder)


@pytest.mark.parametrize(("form", "dtype"), [("hf", "bf16"), ("hf", "keep"), ("olmo", "bf16"), ("olmo", "keep")])
def test_an_export_holds_no_more_than_a_shard_in_memory(tmp_path, form, dtype):
    save(tmp_path / "small", 64, 2)
    save(tmp_path / "large", 640, 8)
    words = ["--format", form, "--dtype", dtype, "--max-shard-size", f"{LIMIT // 1_000_000}MB", "--tokenizer", "none"]
    done = subprocess.run([sys.executable, "-c", PROGRAM, tmp_path, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    files = [path.stat().st_size for path in (tmp_path / "large-out").rglob("*") if path.is_file()]
    assert sum(files) > 2 * (LIMIT + CONSTANT) / (2 if dtype == "bf16" else 1), "the model is too small to tell"
    assert max(files) <= LIMIT * 1.001
    assert int(done.stdout.split("MORE")[1]) <= LIMIT + CONSTANT
