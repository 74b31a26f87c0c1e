"""Which backend is fastest on the machine at hand: measured on request, kept in a file, read by ``auto``.

Nothing is ever measured or written unasked: only ``olmo-lns doctor --tune`` does. A table counts for the GPU, the
torch, the Transformer Engine and the state of Quack's override that it was measured with, on CPU for the compiled
norms, which are of one torch and one kind of processor, and for nothing else.
"""

from __future__ import annotations

import json
import math
import os
import random
import statistics
import time
from pathlib import Path
from typing import Any, Callable, Iterable, Mapping

import torch

from olmo_lns.environment import cache
from olmo_lns.errors import LNSConfigError
from olmo_lns.norm import cpp
from olmo_lns.norm.kernels import quack_problem
from olmo_lns.norm.transformer_engine import status

__all__ = ["COMMAND", "best", "key", "measure", "path", "read", "write"]

COMMAND = "olmo-lns doctor --tune"
TABLE = "norm-backends.json"
#: (rows, width) of the RMSNorms that are timed, forward and backward.
SHAPES = {
    "cuda": ((8192, 1024), (8192, 2048), (8192, 4096)),
    "cpu": ((1, 1024), (64, 64), (512, 256), (2048, 512), (8192, 1024)),
}
DTYPES = (torch.bfloat16, torch.float32)
ROUNDS = 15
_FORMAT = 1
_RmsNorm = Callable[..., torch.Tensor]


def path() -> Path:
    """The table, in :func:`olmo_lns.environment.cache`."""
    return cache() / TABLE


def key(device: torch.device) -> str:
    """What a measurement depends on."""
    if device.type == "cpu":
        return f"CPU, {cpp.library().stem}"
    quack = "without" if quack_problem(device) else "with"
    te = status().version if status().problem is None else "none"
    return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__} {quack} Quack, Transformer Engine {te}"


def read(machine: str) -> dict[str, Any] | None:
    """The entry for a machine (:func:`key`); None if there is none.

    :raises LNSConfigError: the file is there and is not a table.
    """
    entry = _load().get(machine)
    if entry is not None and not (isinstance(entry, dict) and {"backend", "measured"} <= entry.keys()):
        raise LNSConfigError(f"{path()} has no backend for {machine!r}: delete it and run {COMMAND} again")
    return entry


def _load() -> dict[str, Any]:
    try:
        table = json.loads(path().read_text())
        if table["format"] == _FORMAT:
            return dict(table["machines"])
        found = f"format {table['format']!r}, expected {_FORMAT}"
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        found = f"{type(error).__name__}: {error}"
    raise LNSConfigError(f"{path()} is not a table of norm backends ({found}): delete it and run {COMMAND} again")


def write(machine: str, milliseconds: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Add a measurement (case -> backend -> milliseconds) to the table; returns the entry."""
    entry = {"backend": best(milliseconds), "measured": time.strftime("%Y-%m-%d"), "milliseconds": milliseconds}
    machines = _load() | {machine: entry}
    path().parent.mkdir(parents=True, exist_ok=True)
    partial = path().with_suffix(f".{os.getpid()}.tmp")  # renamed when complete: another process may be reading
    partial.write_text(json.dumps({"format": _FORMAT, "machines": machines}, indent=1) + "\n")
    partial.replace(path())
    return entry


def best(milliseconds: Mapping[str, Mapping[str, float]]) -> str:
    """The backend with the smallest geometric mean over the cases, each of which weighs the same."""
    names = next(iter(milliseconds.values()))
    return min(names, key=lambda name: math.fsum(math.log(case[name]) for case in milliseconds.values()))


def measure(
    backends: Mapping[str, _RmsNorm],
    device: torch.device,
    *,
    shapes: Iterable[tuple[int, int]] | None = None,
    dtypes: Iterable[torch.dtype] = DTYPES,
    rounds: int = ROUNDS,
) -> dict[str, dict[str, float]]:
    """Median milliseconds of each backend's RMSNorm, forward and backward: case -> backend -> time.

    Backends take turns in random order; four inputs in turn keep the cache from answering.
    """
    found = {}
    for dtype in dtypes:
        for rows, width in shapes or SHAPES[device.type]:
            calls = {name: _call(norm, rows, width, dtype, device) for name, norm in backends.items()}
            found[f"{rows}x{width} {str(dtype).removeprefix('torch.')}"] = _medians(calls, device, rounds)
    return found


def _call(norm: _RmsNorm, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Callable[[], None]:
    weight = torch.ones(width, dtype=dtype, device=device, requires_grad=True)
    inputs = [torch.randn(rows, width, dtype=dtype, device=device, requires_grad=True) for _ in range(4)]

    def call() -> None:
        for x in inputs:
            y = norm(x, weight, 1e-6, 0.5)
            torch.autograd.grad(y, (x, weight), x.detach())

    return call


def _medians(calls: Mapping[str, Callable[[], None]], device: torch.device, rounds: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    order, names = random.Random(0), list(calls)
    for number in range(3 + rounds):
        order.shuffle(names)
        for name in names:
            took = _milliseconds(calls[name], device)
            if number >= 3:
                times[name].append(took)
    return {name: statistics.median(values) for name, values in times.items()}


def _milliseconds(call: Callable[[], None], device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - start)
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    call()
    last.record()
    last.synchronize()
    return first.elapsed_time(last)
