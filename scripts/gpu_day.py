#!/usr/bin/env python3
"""Run and time everything that needs a GPU, within ten minutes, on a machine that has only Python and a driver.

    python3 scripts/gpu_day.py                                     make setup first, packages from the index
    python3 scripts/gpu_day.py --python python3 --wheels .whl      an environment that has torch; packages from a folder
    python3 scripts/gpu_day.py --device cpu --quick --python .venv/bin/python      tries the script, with tiny models

Each part has a time budget and may use what earlier parts have left of theirs. A part that fails or is stopped is
reported as failed, with the last lines that it printed, and the next part starts. The report, build/gpu-day.json, and
its tables, build/gpu-day.md, are written after each part, so that an interrupted run leaves what it measured. Copied to
docs/bench/gpu.json, the report gets into the documentation by scripts/bench_docs.py.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Sequence

from bench_docs import commit, day

ROOT = Path(__file__).parents[1]


@dataclass
class Part:
    """A command with its budget in seconds; ``{json}`` in the command is a file that it writes its result into."""

    command: list[str]
    budget: float
    environment: dict[str, str] = field(default_factory=dict)


#: Prints what the machine is, as the measuring environment sees it.
ENVIRONMENT = """
import json, platform, sys, torch
from importlib import metadata
cuda = torch.cuda.is_available()
found = {d.metadata["Name"].lower(): d.version for d in metadata.distributions() if d.metadata["Name"]}
names = ("ai2-olmo", "megatron-core", "transformers", "triton", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13")
names += ("transformer-engine", "transformer-engine-torch", "transformer_engine", "transformer_engine_torch")
print(json.dumps({
    "python": platform.python_version(),
    "torch": torch.__version__,
    "transformer_engine": found.get("transformer-engine", found.get("transformer_engine")),
    "cuda": torch.version.cuda,
    "device_type": "cuda" if cuda and sys.argv[1] == "cuda" else "cpu",
    "device": torch.cuda.get_device_name() if cuda and sys.argv[1] == "cuda" else platform.machine() + " CPU",
    "packages": {name: found[name] for name in names if name in found},
}))
"""

#: Prints where the headers of NCCL and cuDNN are, which the build of Transformer Engine's extension includes.
HEADERS = "import glob, sysconfig; print(':'.join(glob.glob(sysconfig.get_paths()['purelib'] + '/nvidia/*/include')))"


def transformer_engine(python: str, wheels: Path | None) -> Part:
    """Return the installation of Transformer Engine, whose PyTorch extension is compiled with CUDA's nvcc."""
    pip = [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-build-isolation"]
    environment = {"MAX_JOBS": str(os.cpu_count()), "NVTE_FRAMEWORK": "pytorch"}
    if wheels:
        files = [str(file) for file in sorted(wheels.iterdir()) if file.suffix in (".whl", ".gz")]
        environment["NVTE_PYTORCH_FORCE_BUILD"] = "TRUE"  # else its set-up looks for a wheel on GitHub
        return Part([*pip, "--no-index", "--no-deps", *files], 160, environment)
    tools, engine = ["setuptools", "wheel", "pybind11", "ninja", "cmake"], "transformer-engine[pytorch]>=2.1,<3"
    both = f"{shlex.join([*pip, *tools])} && {shlex.join([*pip, engine])}"
    return Part(["bash", "-c", both], 160, environment)


def parts(options: argparse.Namespace, python: str) -> dict[str, Part]:
    """Return the parts in their order; the budgets are ten minutes together. ``--quick`` has tiny models."""
    quick, measuring = options.quick, ["--device", options.device, "--json", "{json}"]
    if quick:
        measuring += ["--rounds", "6", "--warmup", "1"]
    tests = " ".join(str(file.relative_to(ROOT)) for file in sorted(ROOT.glob("tests/**/test_gpu.py")))

    def bench(budget: float, *arguments: str) -> Part:
        minutes = str(round(0.6 * budget / 60, 2))  # the rest is for imports, and for a case that takes longer
        return Part([python, "scripts/bench.py", *arguments, *measuring, "--minutes", minutes], budget)

    def step(budget: float, mode: str, *sizes: str) -> Part:
        sizes = ("tiny",) if quick else sizes
        return bench(budget, "step", "--dtypes", "bf16", "--modes", mode, "--sizes", *sizes)

    found: dict[str, Part] = {}
    if options.python is None:
        found["set-up"] = Part(["make", "setup"], 100)
    if options.device == "cuda":
        found["Transformer Engine"] = transformer_engine(python, options.wheels)
    found["make test-gpu"] = Part(["make", "test-gpu", "SETUP=", f"PY={python}", f"ARGS={tests}"], 60)
    found["norms"] = bench(90, "norm", *(["--shapes", "64x32", "--modes", "eager"] if quick else ["--quick"]))
    found["steps, eager"] = step(40, "eager", "60M", "150M")
    if not quick:  # Inductor takes a minute for a graph on a busy CPU
        found["steps, compiled"] = step(70, "compiled", "60M")
    found["FSDP2 on one device"] = step(25, "eager", "60M")
    found["FSDP2 on one device"].command.append("--fsdp")
    for case, budget in {"tiny": 30.0}.items() if quick else {"meta_7b": 20.0, "real_7b": 35.0}.items():
        command = [python, "scripts/bench_apply.py", case, "--device", options.device, "--json", "{json}"]
        found[f"apply, {case}"] = Part(command, budget)
    return found


def run(part: Part, limit: float) -> dict[str, Any]:
    """Run a part and return its outcome: ``ok`` or ``failed``, with the reason, the seconds, and what it measured."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        command = [word.replace("{json}", str(file)) for word in part.command]
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", **part.environment}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        start, log = time.monotonic(), Path(folder) / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                code: int | None = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # also what the part has left running
                process.wait()
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        outcome: dict[str, Any] = {"status": "ok" if code == 0 else "failed"}
        if code != 0:
            ended = f"stopped after {limit:.0f} s" if code is None else f"exit status {code}"
            outcome["reason"] = f"{ended}; {' / '.join(lines[-3:])}"[:600]
        outcome |= {"seconds": time.monotonic() - start, "budget": part.budget, "command": shlex.join(part.command)}
        outcome["output"] = lines[-15:]
        if file.exists():  # of a part that was stopped, the cases that it finished
            with contextlib.suppress(json.JSONDecodeError):
                outcome["result"] = json.loads(file.read_text(encoding="utf-8"))
        if outcome["status"] == "ok" and "{json}" in part.command and not outcome.get("result"):
            outcome |= {"status": "skipped", "reason": lines[-1] if lines else "nothing was measured"}
        return outcome


def summary_of_tests(outcome: dict[str, Any]) -> None:
    """Report what pytest counted; a run in which every test was skipped has not shown anything."""
    last = outcome["output"][-1] if outcome["output"] else ""
    if outcome["status"] == "ok":
        outcome["reason"] = last
        if " passed" not in last:
            outcome["status"] = "skipped"


def environment_of(python: str, device: str) -> dict[str, Any]:
    """Return the command, commit, date and host, and what ``python`` says of its packages and the device."""
    seen = subprocess.run([python, "-c", ENVIRONMENT, device], cwd=ROOT, capture_output=True, text=True, check=False)
    about = json.loads(seen.stdout.splitlines()[-1]) if seen.returncode == 0 else {"problem": seen.stderr[-300:]}
    command, today = shlex.join(["python", *sys.argv]), datetime.date.today().isoformat()
    common = {"command": command, "commit": commit(), "date": today}
    return {**common, "host": platform.platform(), "cores": os.cpu_count(), **about}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny models and the fewest rounds, to try the script")
    parser.add_argument(
        "--python", help="an interpreter that has torch, pytest and OLMo; without it make setup makes one"
    )
    parser.add_argument("--wheels", type=Path, help="a folder of wheels and source distributions to install from")
    parser.add_argument("--minutes", type=float, default=10, help="for everything together (10)")
    parser.add_argument("--only", nargs="+", metavar="PART", help="parts to run; default all")
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "gpu-day.json", help="file for the report")
    parser.add_argument("--markdown", type=Path, default=ROOT / "build" / "gpu-day.md", help="file for its tables")
    options = parser.parse_args(argv)
    end = time.monotonic() + 60 * options.minutes
    python = str(ROOT / ".venv" / "bin" / "python")
    if options.python:
        given = shutil.which(options.python) or parser.error(f"--python: {options.python} is not an executable")
        python = os.path.abspath(given)  # the parts run in the repository
    if options.wheels:
        options.wheels = options.wheels.resolve()
    chosen = parts(options, python)
    if unknown := set(options.only or ()) - chosen.keys():
        parser.error(f"--only: unknown part {', '.join(sorted(unknown))}; expected one of {', '.join(chosen)}")
    if options.only:
        chosen = {name: part for name, part in chosen.items() if name in options.only}
    report: dict[str, Any] = {"environment": {}, "parts": {}}
    reserved = sum(part.budget for part in chosen.values())
    for name, part in chosen.items():
        reserved -= part.budget
        # A part may also use what is left over, but not what the later parts need.
        left = max(end - time.monotonic() - reserved, min(part.budget, end - time.monotonic()))
        if left < 5:
            outcome = {"status": "not run", "reason": "no time was left", "seconds": 0.0, "budget": part.budget}
        else:
            if name == "Transformer Engine":
                headers = subprocess.run([python, "-c", HEADERS], capture_output=True, text=True, check=False).stdout
                part.environment["CPATH"] = ":".join(filter(None, [headers.strip(), os.environ.get("CPATH")]))
            outcome = run(part, left)
            if name == "make test-gpu":
                summary_of_tests(outcome)
        report["parts"][name] = outcome
        print(f"{name}: {outcome['status']}, {outcome['seconds']:.0f} s. {outcome.get('reason', '')}", flush=True)
        if "torch" not in report["environment"] or name == "Transformer Engine":
            report["environment"] = environment_of(python, options.device)
        for file, text in ((options.json, json.dumps(report, indent=1)), (options.markdown, day(report))):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text + "\n", encoding="utf-8")
    failed = [name for name, outcome in report["parts"].items() if outcome["status"] in ("failed", "not run")]
    print(f"{options.json}, {options.markdown}. Failed or not run: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
