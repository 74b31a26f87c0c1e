#!/usr/bin/env python3
"""Time the commands that people wait for: doctor, checks of configs, a plan, and exports with their memory.

    python scripts/bench_tools.py --json docs/bench/tools.json
    python scripts/bench_tools.py --exports --folder /scratch --json docs/bench/tools.json    # 1B, 5 GB of weights

Each command runs in a process of its own, in turn with the others; given are median and quartiles. An export also
shows the most memory that it allocated and, in turn with it, the time of a plain copy of its input, flushed to the disk
(Linux; three of the kinds of checkpoints are made in memory).
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
from export_checkpoints import EXPORTS, MAKERS, SIZES

ROOT = Path(__file__).parents[1]
#: Seconds to wait before a copy and an export, after the disk has taken what was written and deleted before. Memory
#: that a deletion leaves is free for whoever writes next, until a virtual machine's host takes it back within seconds.
SETTLE = 5.0
_OURS = ("-m", "olmo_lns")
#: Name -> (arguments of Python, aim in seconds). The last is what the two before it begin with.
COMMANDS: dict[str, tuple[tuple[str, ...], float | None]] = {
    "doctor": ((*_OURS, "doctor"), 5.0),
    "config check configs": ((*_OURS, "config", "check", str(ROOT / "configs")), 10.0),
    "study plan": ((*_OURS, "study", "plan", str(ROOT / "configs" / "study" / "paper.yaml")), 10.0),
    "import olmo.config": (("-c", "import olmo.config"), None),
}


def run(arguments: Sequence[str]) -> None:
    """``python`` with these arguments; ends the program with the command's own words if it fails."""
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise SystemExit(f"python {' '.join(arguments)} ended with {done.returncode}: {''.join(last)}")


def children_seconds(work: Callable[[], object]) -> float:
    """CPU time of the processes that ``work`` starts and waits for."""
    before = os.times()
    work()
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


#: What an export is compared with -> decimals shown.
_COPY = {"copy_seconds": 1, "ratio": 2}
#: What every export imports, and what one of a transformers folder does, which builds the model without data.
_IMPORTS = {
    "the imports alone": "olmo_lns.export.cli, olmo_lns.export.sources",
    "the imports for transformers folders": (
        "olmo_lns.export.cli, olmo_lns.export.sources, transformers.models.llama.modeling_llama"
    ),
}
TIMERS: dict[str, benchlib.Timer] = {"wall": benchlib.cpu_seconds, "cpu": children_seconds}


def commands(names: Sequence[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Seconds of each command and whether its aim is met."""
    works = {name: functools.partial(run, COMMANDS[name][0]) for name in names}
    seconds = benchlib.interleaved(works, TIMERS[options.clock], options.rounds, warmup=1)
    return [
        {"command": _label(name), "seconds": benchlib.spread(values), "aim_seconds": COMMANDS[name][1]}
        for name, values in seconds.items()
    ]


def _label(name: str) -> str:
    return f"olmo-lns {name}" if COMMANDS[name][0][0] == "-m" else f'python -c "{name}"'


def exports(folder: Path, size: str, rounds: int) -> list[dict[str, Any]]:
    """Seconds and memory of an export of each kind in each format, in turn with a copy of the files that it reads."""
    found = [
        {"from": f"nothing: {what}", "to": ""}
        | _summary([peak([sys.executable, "-c", f"import {modules}"]) for _ in range(rounds)])
        for what, modules in _IMPORTS.items()
    ]
    for kind, make in MAKERS.items():
        with tempfile.TemporaryDirectory(dir=folder) as name:
            checkpoint, copy, out = (Path(name) / part for part in ("checkpoint", "copy", "out"))
            make(checkpoint, size)
            _copy_seconds(checkpoint, copy)  # the first one waits for what was just written
            for options in (options for known, options in EXPORTS if known == kind):
                copies, taken = [], []
                for _ in range(rounds):
                    copies.append(_copy_seconds(checkpoint, copy))
                    taken.append(
                        peak([sys.executable, "-m", "olmo_lns", "export", str(checkpoint), str(out), *options])
                    )
                    shutil.rmtree(out)
                words = " ".join(option for option in options if option not in ("--tokenizer", "none"))
                row = {"from": kind, "to": words} | _summary(taken)
                row |= {"copy_seconds": benchlib.spread(copies)}
                row |= {"ratio": benchlib.ratio([each["seconds"] for each in taken], copies)}
                found.append(row)
                shown = benchlib.show(row["seconds"], digits=1)
                print(f"# {kind} {words}: {shown} s", file=sys.stderr, flush=True)
    return found


def _summary(taken: Sequence[dict[str, float]]) -> dict[str, Any]:
    most = {name: max(each[name] for each in taken) for name in ("anonymous", "resident")}
    return {"seconds": benchlib.spread([each["seconds"] for each in taken])} | most


def peak(command: Sequence[str]) -> dict[str, float]:
    """Run ``command``, after :data:`SETTLE`, and read its memory from /proc every 10 ms; MB (10**6 bytes) and seconds.

    ``anonymous`` is what it allocated; ``resident``, the kernel's high-water mark, also counts cached pages of mapped
    files, which can be dropped at any time.
    """
    os.sync()
    time.sleep(SETTLE)
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
    memory = {"anonymous": highest["RssAnon"] * 1024 / 1e6, "resident": highest["VmHWM"] * 1024 / 1e6}
    return memory | {"seconds": time.monotonic() - start}


def _copy_seconds(source: Path, target: Path) -> float:
    """A plain copy of a folder, flushed to the disk, after :data:`SETTLE`."""
    os.sync()
    time.sleep(SETTLE)
    start = time.monotonic()
    shutil.copytree(source, target)
    for path in target.rglob("*"):
        if path.is_file():
            with path.open("rb+") as file:
                os.fsync(file.fileno())
    seconds = time.monotonic() - start
    shutil.rmtree(target)
    return seconds


def show(report: dict[str, Any]) -> str:
    """Markdown: the commands, and the exports where they were measured."""
    lines = [[row["command"], benchlib.show(row["seconds"]), *_verdict(row)] for row in report["commands"]]
    text = benchlib.markdown(["command", f"seconds, {report['clock']} (quartiles)", "aim", ""], lines)
    if "exports" not in report:
        return text
    rows = [
        [
            row["from"],
            f"`{row['to']}`" if row["to"] else "",
            benchlib.show(row["seconds"], digits=1),
            *(benchlib.show(row[key], digits=digits) if key in row else "" for key, digits in _COPY.items()),
            *(f"{row[key]:.0f}" for key in ("anonymous", "resident")),
        ]
        for row in report["exports"]
    ]
    header = [f"export of {report['size']} from", "to", "seconds", "a copy, s", "export / copy"]
    return text + "\n\n" + benchlib.markdown([*header, "allocated, MB", "resident, MB"], rows)


def _verdict(row: dict[str, Any]) -> tuple[str, str]:
    if (aim := row["aim_seconds"]) is None:
        return "", ""
    return f"{aim:g}", "met" if row["seconds"]["median"] <= aim else "NOT met"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commands", nargs="+", choices=tuple(COMMANDS), default=list(COMMANDS), metavar="COMMAND")
    parser.add_argument("--rounds", type=benchlib.positive, default=5)
    parser.add_argument("--clock", choices=tuple(TIMERS), default="wall", help="cpu: the processes' CPU time")
    parser.add_argument("--exports", action="store_true", help="also exports, of every kind in every format")
    parser.add_argument("--size", choices=tuple(SIZES), default="1B", help="of the model exported")
    parser.add_argument("--folder", type=Path, default=Path("."), help="for exports; needs three times their size")
    parser.add_argument("--json", type=benchlib.report_path, help="where to write the report")
    options = parser.parse_args(argv)
    report: dict[str, Any] = {"environment": benchlib.environment(torch.device("cpu")), "clock": options.clock}
    report["commands"] = commands(options.commands, options)
    if options.exports:
        report["size"], report["exports"] = options.size, exports(options.folder, options.size, options.rounds)
    benchlib.write(report, options.json)
    print(show(report))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
