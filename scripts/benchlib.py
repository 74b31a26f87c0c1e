"""What the benchmark scripts share: interleaved rounds, medians with spread, the machine, JSON and Markdown."""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shlex
import statistics
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any, Callable, Mapping, Sequence

import torch

from olmo_lns.diagnostics.results import check_writable
from olmo_lns.errors import LNSError

_COMPILED = {"off": (False,), "on": (True,), "both": (False, True)}
Timer = Callable[[Callable[[], object]], float]


def require_device(name: str) -> torch.device:
    """The device asked for; ends the program with one line where there is none."""
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device: torch.cuda.is_available() is False here; use --device cpu, or a GPU machine")
    return device


def report_path(text: str) -> Path:
    """argparse type: a .json file that can be written, found out before the measurement."""
    try:
        check_writable(Path(text), [".json"])
    except LNSError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return Path(text)


def positive(text: str) -> int:
    """argparse type: an integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer >= 1")
    return int(text)


def cpu_seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def busy_seconds(work: Callable[[], object]) -> float:
    """CPU time of this process, all threads: what a single thread would take on a machine of its own."""
    start = time.process_time()
    work()
    return time.process_time() - start


def cuda_seconds(work: Callable[[], object]) -> float:
    """GPU time of ``work`` between two events on the current stream."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


CLOCKS: dict[str, Timer] = {"wall": cpu_seconds, "cpu": busy_seconds}


def add_clock(parser: argparse.ArgumentParser) -> None:
    """The option --clock."""
    parser.add_argument(
        "--clock", choices=tuple(CLOCKS), default="wall", help="cpu: this process's CPU time, for a busy machine"
    )


def add_options(parser: argparse.ArgumentParser, *, warmup: int) -> None:
    """The options that every benchmark of a model has."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=positive, default=21)
    parser.add_argument("--warmup", type=positive, default=warmup)
    add_clock(parser)
    parser.add_argument("--json", type=report_path, help="where to write the report")


def add_compile(parser: argparse.ArgumentParser, default: str) -> None:
    """The option --compile, for :func:`by_compile`."""
    parser.add_argument("--compile", choices=tuple(_COMPILED), default=default)


def by_compile(sizes: Sequence[str], options: argparse.Namespace) -> list[tuple[str, bool]]:
    """Every size without and with ``torch.compile``, as asked for."""
    return [(size, compiled) for size in sizes for compiled in _COMPILED[options.compile]]


def run(
    options: argparse.Namespace,
    device: torch.device,
    cases: Sequence[tuple[str, bool | str]],
    measure: Callable[[str, Any, argparse.Namespace, torch.device], dict[str, Any]],
    table: Callable[[Mapping[str, Any]], str],
) -> int:
    """Measure the cases one after the other, write the report and print its table; the exit status.

    :param cases: size, and what else tells a case from another.
    """
    report: dict[str, Any] = {"environment": environment(device), "cases": []}
    report["clock"] = "cuda events" if device.type == "cuda" else options.clock
    for size, what in cases:
        try:
            report["cases"].append(measure(size, what, options, device))
        except LNSError as error:  # a backend that cannot run here
            raise SystemExit(str(error)) from None
        shown = f"compile {'on' if what else 'off'}" if isinstance(what, bool) else what
        print(f"{size}, {shown}: done", flush=True)
    write(report, options.json)
    print(table(report))
    return 0


def interleaved(
    works: Mapping[str, Callable[[], object]], timer: Timer, rounds: int, warmup: int
) -> dict[str, list[float]]:
    """Seconds of each work in each round. Within a round all run, in random order: slow drifts hit all alike."""
    order = random.Random(0)
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for i in range(warmup + rounds):
        names = list(works)
        order.shuffle(names)
        for name in names:
            took = timer(works[name])
            if i >= warmup:
                seconds[name].append(took)
    return seconds


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return {"median": middle, "q25": low, "q75": high}


def ratio(values: Sequence[float], base: Sequence[float]) -> dict[str, float]:
    """Spread of the ratios within each round."""
    return spread([a / b for a, b in zip(values, base, strict=True)])


def environment(device: torch.device) -> dict[str, Any]:
    """What a reader needs to judge the numbers."""
    facts: dict[str, Any] = {
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "date": time.strftime("%Y-%m-%d"),
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "packages": {name: _version(name) for name in ("olmo-lns", "ai2-olmo", "transformer-engine")},
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "allocator": {k: v for k, v in os.environ.items() if k.startswith("MALLOC_") or k == "GLIBC_TUNABLES"},
        "load_average": [round(value, 1) for value in os.getloadavg()],
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {"gpu": properties.name, "cuda": torch.version.cuda, "gpu_memory_gib": properties.total_memory >> 30}
    return facts


def _commit() -> str | None:
    """Of this repository, with ``-dirty`` where files differ from it; None outside a clone."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def show(value: Mapping[str, float], unit: float = 1.0, digits: int = 2) -> str:
    """``median (q25-q75)``."""
    median, low, high = (f"{value[key] * unit:.{digits}f}" for key in ("median", "q25", "q75"))
    return f"{median} ({low}-{high})"


def write(report: Mapping[str, Any], path: Path | None) -> None:
    if path:
        path.write_text(json.dumps(report, indent=1) + "\n")
