"""``olmo-lns doctor``: what is installed here, whether it is supported, and what would run."""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import runpy
import sys
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Sequence

from packaging.version import Version
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from olmo_lns import __version__, environment, extras, schemes
from olmo_lns.doctor.frameworks import FRAMEWORKS, Finding, framework_row, transformers_row, tree_of
from olmo_lns.errors import LNSError
from olmo_lns.integrations import autoload
from olmo_lns.integrations.olmo.types import check_environment

__all__ = ["Finding", "examine", "main"]


def examine() -> list[Finding]:
    """Look at every part. No framework is imported: their sources are read and compared with those verified."""
    return [
        Finding("Python", platform.python_version(), "ok", "3.10 to 3.12 are supported"),
        _settings(),
        _torch(),
        *(framework_row(framework) for framework in FRAMEWORKS),
        transformers_row(),
        _transformer_engine(),
        _backend(),
        _autoload(),
        *(_extra(name) for name in extras.names()),
    ]


def _settings() -> Finding:
    try:
        check_environment()
        if setting := environment.read(environment.MONITOR):
            from olmo_lns.diagnostics.monitor import parse_setting

            parse_setting(setting)
    except LNSError as error:
        return Finding("olmo-lns", __version__, "unsupported", str(error))
    given = [f"{name}={environment.read(name)}" for name in environment.VARIABLES if environment.read(name)]
    return Finding("olmo-lns", __version__, "ok", ", ".join(given) or f"schemes {', '.join(schemes.names())}")


#: Where a driver shows a device that torch could use (NVIDIA, WSL, ROCm).
_DEVICES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/kfd")


def _may_have_device() -> bool:
    """Whether torch has to be asked (seconds); one built for CPU, or a Linux without a device, has none."""
    built = runpy.run_path(str(tree / "torch" / "version.py")) if (tree := tree_of("torch")) else {}
    possible = bool(built.get("cuda") or built.get("hip"))
    return possible and (sys.platform != "linux" or any(Path(name).exists() for name in _DEVICES))


def _torch() -> Finding:
    if (tree := tree_of("torch")) is None:
        return Finding("torch", "-", "unsupported", "not installed: pip install torch")
    if not _may_have_device():
        version = runpy.run_path(str(tree / "torch" / "version.py"))["__version__"]
        return Finding("torch", version, "ok", "CUDA: no device")
    import torch

    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return Finding("torch", torch.__version__, "ok", f"CUDA: {', '.join(devices) or 'no device'}")


def _extra(name: str) -> Finding:
    missing, other = extras.problems(name)
    if missing:
        return Finding(f"extra {name}", "-", "absent", f"lacks {', '.join(missing)}: {extras.advice(name)}")
    return Finding(f"extra {name}", "", "note" if other else "ok", ", ".join(other) or "complete")


def _transformer_engine() -> Finding:
    if importlib.util.find_spec("transformer_engine") is None:
        return Finding("Transformer Engine", "-", "absent", f"{extras.advice('te')} (CUDA)")
    from olmo_lns.norm import transformer_engine as te

    status = te.status()
    if status.problem is None:
        state, detail = "ok", "fused kernels carry the factor"
    else:
        # Broken on a login node without a GPU is no fault; a version nobody verified is.
        outside = status.version is not None and not te.SUPPORTED[0] <= Version(status.version) < te.SUPPORTED[1]
        state, detail = "unsupported" if outside else "note", status.problem
    return Finding("Transformer Engine", status.version or "-", state, detail)


def _backend() -> Finding:
    asked = environment.read(environment.NORM_BACKEND)
    if asked in ("", "auto") and not _may_have_device():
        # What choose_backend says here, without the seconds of importing torch.
        return Finding("norm backend", "torch", "ok", "no CUDA device is visible")
    from olmo_lns.norm import choose_backend

    try:
        backend = choose_backend()
    except LNSError as error:
        return Finding("norm backend", "-", "unsupported", str(error))
    return Finding("norm backend", backend.name, "ok", backend.reason)


def _autoload() -> Finding:
    if environment.is_set(environment.DISABLE):
        return Finding("autoload", "off", "note", f"{environment.DISABLE}=1 is set")
    if autoload.autoload_active():
        return Finding("autoload", "on", "ok", "unmodified launches load the plugins")
    return Finding(
        "autoload", "off", "note", "no start-up hook here (pip --target, PYTHONPATH or -S): python -m olmo_lns <script>"
    )


def _lacking(findings: Sequence[Finding], required: Sequence[str]) -> list[str]:
    """One line for every required extra that cannot be used: its framework's row, and its packages' row."""
    rows = {row.what: row for row in findings}
    labels = {framework.extra: framework.label for framework in FRAMEWORKS}
    labels |= {"hf": "transformers", "te": "Transformer Engine"}
    lines = []
    for name in required:
        for row in (rows.get(labels.get(name, "")), rows[f"extra {name}"]):
            if row is None:
                continue
            # Packages of another version than asked for may do; a framework without an integration does not.
            fails = ("absent", "unsupported") if row.what.startswith("extra ") else ("absent", "unsupported", "note")
            if row.state in fails:
                state = "unsupported" if row.state == "note" else row.state
                lines.append(f"--require {name}: {row.what} is {state}: {row.detail}")
                break
    return lines


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="olmo-lns doctor", description="What is installed here, whether it is supported, and what would run."
    )
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument(
        "--require",
        action="append",
        default=[],
        metavar="EXTRA",
        choices=extras.names(),
        help=f"exit with 1 where it is absent; may be given again: {', '.join(extras.names())}",
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Print the table. Exit code 1 if an installed framework, a chosen backend or a required extra cannot be used."""
    args = _parser().parse_args(argv)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of optional parts that are absent
        findings = examine()
    if args.json:
        print(json.dumps([asdict(row) for row in findings], indent=1))
    else:
        _print(findings)
    lacking = _lacking(findings, args.require)
    for line in lacking:
        print(f"olmo-lns doctor: {line}", file=sys.stderr)
    return int(bool(lacking) or any(row.state == "unsupported" for row in findings))


def _print(findings: Sequence[Finding]) -> None:
    table = Table("", "version", "state", Column("", overflow="fold"), title="olmo-lns doctor", title_justify="left")
    colours = {"ok": "green", "absent": "dim", "note": "yellow", "unsupported": "red"}
    for row in findings:
        table.add_row(row.what, row.found, f"[{colours[row.state]}]{row.state}[/]", escape(row.detail))
    Console().print(table)
