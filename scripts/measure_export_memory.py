"""Peak memory of ``olmo-lns export`` on a synthetic checkpoint of the 1B size.

    python scripts/measure_export_memory.py --folder /scratch

Writes a checkpoint with random fp32 weights (1,279,854,592 parameters, 5.1 GB; tensor by tensor,
so that making it needs no memory either), exports it in each format in a process of its own and
prints that process' peak, read from /proc every 10 ms:

anonymous   memory that the export allocated (RssAnon): what a machine must have
resident    the kernel's high-water mark (VmHWM), which also counts pages of the mapped input file
            that are cached and can be dropped at any time

Needs Linux and about four times the checkpoint's size of free disk in ``--folder``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from olmo_lns.checkpoints.architecture import Architecture
from olmo_lns.checkpoints.archive import write_archive
from olmo_lns.checkpoints.tensors import LazyTensor
from olmo_lns.record import Record
from olmo_lns.schemes import LNS

#: The 1B model of the scaling study, and a small one to try the script with.
SIZES = {
    "1B": dict(n_layers=16, d_model=2048, n_heads=16, mlp_hidden_size=16384),
    "60M": dict(n_layers=8, d_model=512, n_heads=8, mlp_hidden_size=4096),
}
COMMON = dict(rope=True, include_bias=False, bias_for_layer_norm=False, weight_tying=False, vocab_size=50280)
FORMATS = {
    "OLMo, with gain": (True, ["--format", "olmo"]),
    "Hugging Face, with gain": (True, ["--format", "hf", "--tokenizer", "none"]),
    "Hugging Face bf16, with gain": (True, ["--format", "hf", "--tokenizer", "none", "--dtype", "bf16"]),
    "OLMo, without gain": (False, ["--format", "olmo"]),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("."), help="where to work; must have room")
    parser.add_argument("--size", choices=SIZES, default="1B")
    args = parser.parse_args()
    work = args.folder / f"measure-export-memory-{os.getpid()}"
    work.mkdir()
    try:
        measure(work, args.size)
    finally:
        shutil.rmtree(work)


def measure(work: Path, size: str) -> None:
    idle = peak(
        [sys.executable, "-c", "import olmo_lns.export.olmo, olmo_lns.export.huggingface, olmo_lns.export.unfold"]
    )
    print(f"{'':34} {'anonymous MB':>13} {'resident MB':>12} {'seconds':>8}")
    print(f"{'imports alone':34} {idle['anonymous']:13.0f} {idle['resident']:12.0f} {idle['seconds']:8.0f}")
    made: dict[bool, Path] = {}
    for name, (gain, options) in FORMATS.items():
        if gain not in made:
            for old in made.values():
                shutil.rmtree(old)
            made = {gain: make_checkpoint(work / f"checkpoint-{gain}", size, gain)}
        out = work / "out"
        command = [sys.executable, "-m", "olmo_lns", "export", str(made[gain]), str(out), *options]
        found = peak(command)
        print(f"{name:34} {found['anonymous']:13.0f} {found['resident']:12.0f} {found['seconds']:8.0f}", flush=True)
        shutil.rmtree(out)


def make_checkpoint(folder: Path, size: str, gain: bool) -> Path:
    """An OLMo checkpoint with random weights; prints what its largest tensors are."""
    model: dict[str, Any] = {**COMMON, **SIZES[size], "layer_norm_with_affine": gain}
    model["layer_norm_type"] = "lns_rms"
    shapes = Architecture.from_config(model, "synthetic").shapes()
    folder.mkdir()
    tensors = {
        name: LazyTensor(shape, torch.float32, lambda shape=shape: torch.randn(shape))  # type: ignore[misc]
        for name, shape in shapes.items()
    }
    write_archive(folder / "model.pt", tensors)
    (folder / "config.yaml").write_text(json.dumps({"model": model}))
    Record(LNS, "rms", "plain").write(folder)
    largest = max(tensors.values(), key=lambda tensor: tensor.nbytes)
    count = sum(torch.Size(shape).numel() for shape in shapes.values())
    print(
        f"# {size}: {count:,} parameters, {(folder / 'model.pt').stat().st_size / 1e6:,.0f} MB, "
        f"largest tensor {tuple(largest.shape)} {largest.nbytes / 1e6:,.0f} MB, gains: {gain}"
    )
    return folder


def peak(command: list[str]) -> dict[str, float]:
    """Run ``command`` and watch its memory; MB (10⁶ bytes) and seconds."""
    start = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    highest = {"RssAnon": 0, "VmHWM": 0}
    while process.poll() is None:
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            break
        for line in status.splitlines():
            key, _, value = line.partition(":")
            if key in highest:
                highest[key] = max(highest[key], int(value.split()[0]))
        time.sleep(0.01)
    if process.wait():
        raise SystemExit(f"{' '.join(command)} failed")
    return {
        "anonymous": highest["RssAnon"] * 1024 / 1e6,
        "resident": highest["VmHWM"] * 1024 / 1e6,
        "seconds": time.monotonic() - start,
    }


if __name__ == "__main__":
    main()
