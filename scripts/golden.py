"""Golden figures: today's numbers, so that a change of structure can be shown to change none of them.

    python scripts/golden.py write /tmp/golden.json             every tensor's sha256 and statistics
    python scripts/golden.py write tests/golden/golden.npz      the statistics alone, small
    python scripts/golden.py compare FILE                       within the tolerance (any processor)
    python scripts/golden.py compare /tmp/golden.json --exact   bit for bit (the machine that wrote it)

Drawn weights, logits, gradients, losses of a few steps and exported tensors of tiny models of OLMo
and Megatron Core, with and without LayerNorm Scaling. Our package is reached as a user reaches it,
by its entry points, upstream's own classes and configs and the command line, so that this script
runs unchanged before and after a change of our modules. The committed copy, tests/golden/golden.npz,
was made at e67c8bb; a change that is meant to change numbers writes it again.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import sys
from pathlib import Path
from typing import Iterable

os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1"))  # before torch: sums depend on threads

import numpy as np
import torch
from golden_cases import named_tensors

#: Allowed difference of a statistic, relative to the sum of the tensor's absolute values: twenty times what torch's
#: scalar kernels with MKL's SSE4.2 ones change (2.5e-6; ATEN_CPU_CAPABILITY=default MKL_ENABLE_INSTRUCTIONS=SSE4_2).
#: The factor of one block off by a thousandth changes up to 3e-3, and is seen in 3,583 figures.
TOLERANCE = 5e-5
PACKAGES = ("ai2-olmo", "megatron-core", "numpy", "torch")
#: A figure: sha256 of the bytes (None in the small file), and sum, sum of absolute values, projection, in fp64.
Figure = tuple["str | None", tuple[float, float, float]]


def figure(tensor: torch.Tensor) -> Figure:
    array = np.ascontiguousarray(tensor.detach().numpy())
    flat = array.astype(np.float64).ravel()
    statistics = (flat.sum(), np.abs(flat).sum(), flat @ pseudo_random(flat.size))
    return hashlib.sha256(f"{array.dtype}".encode() + array.tobytes()).hexdigest(), tuple(map(float, statistics))


def pseudo_random(size: int) -> np.ndarray:
    """``size`` fixed numbers in [-1, 1): splitmix64, in integers, so equal under every version of numpy."""
    z = np.arange(1, size + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) >> np.uint64(11)).astype(np.float64) / 2.0**52 - 1.0


def measure() -> dict[str, Figure]:
    """Every figure, by name; the name ends with the shape."""
    torch.set_num_threads(1)
    found: dict[str, Figure] = {}
    for name, tensor in named_tensors():
        key = f"{name} {'x'.join(map(str, tensor.shape))}"
        if key in found:
            raise SystemExit(f"two figures are named {key!r}")
        found[key] = figure(tensor)
    return found


def versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in PACKAGES}


def write(path: Path, figures: dict[str, Figure]) -> None:
    """All of it as JSON, or the statistics alone (fp32, compressed) where ``path`` ends in .npz."""
    if path.suffix == ".npz":
        text = {"versions": json.dumps(versions()), "names": "\n".join(figures)}
        encoded = {key: np.frombuffer(value.encode(), dtype=np.uint8) for key, value in text.items()}
        statistics = np.array([statistics for _, statistics in figures.values()], dtype=np.float32)
        np.savez_compressed(path, statistics=statistics, **encoded)
    else:
        path.write_text(json.dumps({"versions": versions(), "figures": figures}, indent=0) + "\n")


def read(path: Path) -> tuple[dict[str, str], dict[str, Figure]]:
    """Versions and figures of a file that :func:`write` made."""
    if path.suffix != ".npz":
        content = json.loads(path.read_text())
        return content["versions"], {name: (sha, tuple(rest)) for name, (sha, rest) in content["figures"].items()}
    with np.load(path) as file:
        names = file["names"].tobytes().decode().split("\n")
        rows = zip(names, file["statistics"].astype(np.float64), strict=True)
        return json.loads(file["versions"].tobytes()), {name: (None, tuple(map(float, row))) for name, row in rows}


def compare(expected: dict[str, Figure], found: dict[str, Figure], *, exact: bool) -> list[str]:
    """What differs, one line each."""
    lines = [f"missing: {name}" for name in expected if name not in found]
    lines += [f"new: {name}" for name in found if name not in expected]
    for name in expected.keys() & found.keys():
        (sha, old), (new_sha, new) = expected[name], found[name]
        error = relative_error(old, new)
        if sha != new_sha if exact else not error <= TOLERANCE:
            lines.append(f"{name}: off by {error:.1e}; sum, absolute sum, projection were {old}, are {new}")
    return sorted(lines)


def relative_error(old: Iterable[float], new: Iterable[float]) -> float:
    """Largest difference of the statistics, relative to the larger sum of absolute values."""
    old, new = tuple(old), tuple(new)
    size = max(old[1], new[1])
    return max(abs(a - b) for a, b in zip(old, new, strict=True)) / size if size else 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("write", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--exact", action="store_true", help="bit for bit, by sha256 (a JSON file of this machine)")
    args = parser.parse_args()
    if args.exact and (args.command == "write" or args.file.suffix == ".npz"):
        parser.error("--exact is for comparing with a JSON file: .npz files hold no sha256")
    if ours := sorted(name for name in os.environ if name.startswith("OLMO_LNS_")):
        parser.error(f"{', '.join(ours)} would change the figures: unset")
    if args.command == "write":
        write(args.file, figures := measure())
        print(f"wrote {args.file}: {len(figures)} figures, {args.file.stat().st_size / 1e3:.0f} kB")
        return 0
    made_with, expected = read(args.file)
    if made_with != versions():
        print(f"note: {args.file} was made with {made_with}, here are {versions()}")
    found = measure()
    lines = compare(expected, found, exact=args.exact)
    worst = max(relative_error(expected[name][1], found[name][1]) for name in expected.keys() & found.keys())
    for line in [*lines[:20], *([f"… and {len(lines) - 20} more"] if len(lines) > 20 else [])]:
        print(line)
    how = "bit for bit" if args.exact else f"within {TOLERANCE:g}"
    print(f"{len(lines)} of {len(expected)} figures differ ({how}); largest relative difference {worst:.1e}")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())
