"""What the start-up hook costs an interpreter that never imports OLMo or Megatron.

Two empty virtual environments, one with ``olmo_lns_autoload.pth``; ``python -c pass`` in turn.
Prints best and median of the paired runs and writes JSON with --out.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

import olmo_lns

HOOK = Path(olmo_lns.__file__).parent / "integrations" / "olmo_lns_autoload.pth"


def make_environment(folder: Path, *, hook: bool) -> Path:
    venv.create(folder, with_pip=False)
    if hook:
        (site,) = folder.glob("lib/python*/site-packages")
        shutil.copy(HOOK, site)
    return folder / "bin" / "python"


def run_ms(python: Path) -> tuple[float, float]:
    """Wall and CPU time of one ``python -c pass``; CPU time is the one to trust on a busy machine."""
    start = time.perf_counter()
    process = subprocess.Popen([python, "-c", "pass"])
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{python} -c pass ended with {process.returncode}")
    return 1e3 * (time.perf_counter() - start), 1e3 * (usage.ru_utime + usage.ru_stime)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.runs < 1:
        parser.error(f"--runs {args.runs}: expected at least 1")
    with tempfile.TemporaryDirectory() as folder:
        pythons = {name: make_environment(Path(folder, name), hook=name == "hook") for name in ("plain", "hook")}
        for python in pythons.values():  # compiled caches, page cache
            run_ms(python)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in pythons}
        for _ in range(args.runs):
            for name, python in pythons.items():
                times[name].append(run_ms(python))
    result: dict[str, object] = {"python": platform.python_version(), "runs": args.runs}
    for index, clock in enumerate(("wall", "cpu")):
        plain, hook = ([pair[index] for pair in times[name]] for name in ("plain", "hook"))
        result[clock] = {
            "plain_best_ms": round(min(plain), 3),
            "hook_best_ms": round(min(hook), 3),
            "difference_of_best_ms": round(min(hook) - min(plain), 3),
            "plain_median_ms": round(statistics.median(plain), 3),
            "hook_median_ms": round(statistics.median(hook), 3),
        }
    print(json.dumps(result, indent=2))
    if args.out:
        args.out.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
