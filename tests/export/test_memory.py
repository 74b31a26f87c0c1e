"""What an export holds in memory: no more than ``--max-shard-size`` beyond what the process takes anyway."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from olmo_lns.checkpoints.olmo import Architecture
from olmo_lns.record import Record
from olmo_lns.schemes import LNS

LIMIT = 40_000_000
#: What double precision takes for a part of a tensor, and the buffers of files.
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


def save(folder: Path, width: int, layers: int) -> None:
    """A sharded OLMo checkpoint, as torch's own writer leaves it: one file, however large."""
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
def test_no_more_than_a_shard(tmp_path: Path, form: str, dtype: str) -> None:
    save(tmp_path / "small", 64, 2)
    save(tmp_path / "large", 640, 8)
    words = ["--format", form, "--dtype", dtype, "--max-shard-size", f"{LIMIT // 1_000_000}MB", "--tokenizer", "none"]
    done = subprocess.run([sys.executable, "-c", PROGRAM, tmp_path, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    files = [path.stat().st_size for path in (tmp_path / "large-out").rglob("*") if path.is_file()]
    assert sum(files) > 2 * (LIMIT + CONSTANT) / (2 if dtype == "bf16" else 1), "the model is too small to tell"
    assert max(files) <= LIMIT * 1.001
    assert int(done.stdout.split("MORE")[1]) <= LIMIT + CONSTANT
