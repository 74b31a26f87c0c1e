#!/usr/bin/env python3
"""Time the commands that people wait for: doctor, checks of configs, a plan, and exports with their memory.

    python scripts/bench_tools.py --json docs/bench/tools.json
    python scripts/bench_tools.py --exports --folder /scratch --json docs/bench/tools.json    # 1B, 5 GB of weights

Each command runs in a process of its own, in turn with the others; given are median and quartiles. An export also shows
the most memory that it allocated and the time of a plain copy of its input, which is what the disk takes.
"""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Sequence

import benchlib
import torch
from measure_export_memory import FORMATS, SIZES, make_checkpoint, peak

ROOT = Path(__file__).parents[1]
#: Name -> (arguments of olmo-lns, aim in seconds).
COMMANDS: dict[str, tuple[list[str], float]] = {
    "doctor": (["doctor"], 5.0),
    "config check configs": (["config", "check", str(ROOT / "configs")], 10.0),
    "study plan": (["study", "plan", str(ROOT / "configs" / "study" / "paper.yaml")], 10.0),
}


def run(arguments: Sequence[str]) -> None:
    """``olmo-lns`` with these arguments; ends the program with the command's own words if it fails."""
    command = [sys.executable, "-m", "olmo_lns", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise SystemExit(f"olmo-lns {' '.join(arguments)} ended with {done.returncode}: {''.join(last)}")


def children_seconds(work: Callable[[], object]) -> float:
    """CPU time of the processes that ``work`` starts and waits for."""
    before = os.times()
    work()
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


TIMERS: dict[str, benchlib.Timer] = {"wall": benchlib.cpu_seconds, "cpu": children_seconds}


def commands(names: Sequence[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Seconds of each command and whether its aim is met."""
    works = {name: functools.partial(run, COMMANDS[name][0]) for name in names}
    seconds = benchlib.interleaved(works, TIMERS[options.clock], options.rounds, warmup=1)
    return [
        {"command": f"olmo-lns {name}", "seconds": benchlib.spread(values), "aim_seconds": COMMANDS[name][1]}
        for name, values in seconds.items()
    ]


def exports(folder: Path, size: str) -> list[dict[str, Any]]:
    """Seconds and memory of an export in each format, beside a copy of the checkpoint's weights."""
    found = []
    with tempfile.TemporaryDirectory(dir=folder) as name:
        work = Path(name)
        for gain in dict.fromkeys(gain for gain, _ in FORMATS.values()):
            checkpoint = make_checkpoint(work / "checkpoint", size, gain)
            copy = _copy_seconds(checkpoint / "model.pt", work / "copy")
            for label, (with_gain, how) in FORMATS.items():
                if with_gain != gain:
                    continue
                out = work / "out"
                taken = peak([sys.executable, "-m", "olmo_lns", "export", str(checkpoint), str(out), *how])
                found.append({"export": label, "copy_seconds": copy} | taken)
                shutil.rmtree(out)
            shutil.rmtree(checkpoint)
    return found


def _copy_seconds(source: Path, target: Path) -> float:
    """A plain copy, flushed to the disk."""
    start = time.monotonic()
    shutil.copyfile(source, target)
    with target.open("rb+") as file:
        os.fsync(file.fileno())
    target.unlink()
    return time.monotonic() - start


def show(report: dict[str, Any]) -> str:
    """Markdown: the commands, and the exports where they were measured."""
    lines = [
        [
            row["command"],
            benchlib.show(row["seconds"]),
            f"{row['aim_seconds']:g}",
            "met" if row["seconds"]["median"] <= row["aim_seconds"] else "NOT met",
        ]
        for row in report["commands"]
    ]
    text = benchlib.markdown(["command", f"seconds, {report['clock']} (quartiles)", "aim", ""], lines)
    if "exports" not in report:
        return text
    rows = [
        [row["export"], *(f"{row[key]:.1f}" for key in ("seconds", "copy_seconds")), f"{row['anonymous']:.0f}"]
        for row in report["exports"]
    ]
    header = [f"export of {report['size']}", "seconds", "copy of the input, s", "memory allocated, MB"]
    return text + "\n\n" + benchlib.markdown(header, rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commands", nargs="+", choices=tuple(COMMANDS), default=list(COMMANDS), metavar="COMMAND")
    parser.add_argument("--rounds", type=benchlib.positive, default=5)
    parser.add_argument("--clock", choices=tuple(TIMERS), default="wall", help="cpu: the processes' CPU time")
    parser.add_argument("--exports", action="store_true", help="also exports, in every format of measure_export_memory")
    parser.add_argument("--size", choices=tuple(SIZES), default="1B", help="of the model exported")
    parser.add_argument("--folder", type=Path, default=Path("."), help="for exports; needs four times their size")
    parser.add_argument("--json", type=benchlib.report_path, help="where to write the report")
    options = parser.parse_args(argv)
    report: dict[str, Any] = {"environment": benchlib.environment(torch.device("cpu")), "clock": options.clock}
    report["commands"] = commands(options.commands, options)
    if options.exports:
        report["size"], report["exports"] = options.size, exports(options.folder, options.size)
    benchlib.write(report, options.json)
    print(show(report))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
