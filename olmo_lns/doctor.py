"""``olmo-lns doctor``: what is installed here, whether it is supported, and what would run."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import warnings
from dataclasses import dataclass
from typing import Callable, Sequence

from packaging.version import Version
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from olmo_lns import __version__
from olmo_lns.errors import LNSError
from olmo_lns.integrations import autoload
from olmo_lns.settings import Settings

__all__ = ["VARIABLES", "Finding", "examine", "main"]

#: Environment variables that something in this package reads.
VARIABLES = frozenset(
    f"OLMO_LNS_{name}"
    for name in (
        "ALLOW_MISMATCH",
        "ALLOW_UNVERIFIED",
        "DISABLE",
        "EXPONENT",
        "MONITOR",
        "NORM_BACKEND",
        "SCALED_INIT",
    )
)


@dataclass(frozen=True)
class Finding:
    """One row: ``state`` is ``ok``, ``absent``, ``note`` or ``unsupported`` (the only one that fails)."""

    what: str
    found: str
    state: str
    detail: str


def examine() -> list[Finding]:
    """Look at every part; imports the frameworks that are installed."""
    return [
        Finding("Python", platform.python_version(), "ok", "3.10 to 3.12 are supported"),
        _settings(),
        _torch(),
        _framework("OLMo", "olmo", "ai2-olmo", _register_olmo),
        _framework("Megatron core", "megatron.core", "megatron-core", _register_megatron),
        _transformer_engine(),
        _backend(),
        _autoload(),
    ]


def _settings() -> Finding:
    from olmo_lns.diagnostics.monitor import MONITOR_VARIABLE, parse_setting

    unknown = sorted(name for name in os.environ if name.startswith("OLMO_LNS_") and name not in VARIABLES)
    try:
        if unknown:
            raise LNSError(f"unknown variable {', '.join(unknown)}; known: {', '.join(sorted(VARIABLES))}")
        settings = Settings.current()
        parse_setting(os.environ.get(MONITOR_VARIABLE, ""))
    except LNSError as error:
        return Finding("olmo-lns", __version__, "unsupported", str(error))
    return Finding("olmo-lns", __version__, "ok", f"exponent {settings.exponent:g}, scaled_init {settings.scaled_init}")


def _torch() -> Finding:
    import torch

    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return Finding("torch", torch.__version__, "ok", f"CUDA: {', '.join(devices) or 'no device'}")


def _framework(label: str, module: str, distribution: str, register: Callable[[], str]) -> Finding:
    if not _importable(module):
        return Finding(label, "-", "absent", f"pip install 'olmo-lns[{module.split('.')[0]}]'")
    found = _version(distribution)
    try:
        return Finding(label, found, "ok", register())
    except Exception as error:  # whatever a framework raises on import is the answer to report
        return Finding(label, found, "unsupported", f"{type(error).__name__}: {error}")


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, autoload.PluginError):
        return importlib.util.find_spec(module.split(".")[0]) is not None


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "from a source tree"


def _register_olmo() -> str:
    import olmo

    from olmo_lns.integrations.olmo import register, types

    register()
    importlib.import_module("olmo.train")
    return f"layer_norm_type: {', '.join(types.LNS_TYPES)}; in {olmo.__path__[0]}"


def _register_megatron() -> str:
    importlib.import_module("megatron.core")
    module = importlib.import_module("olmo_lns.integrations.megatron")
    module.register()
    return "flags --layernorm-scaling, --no-scaled-init"


def _transformer_engine() -> Finding:
    from olmo_lns.norm import transformer_engine as te

    status = te.status()
    if importlib.util.find_spec("transformer_engine") is None:
        state, detail = "absent", "pip install --no-build-isolation 'olmo-lns[te]' (CUDA)"
    elif status.problem is None:
        state, detail = "ok", "fused kernels carry the factor"
    else:
        # Broken on a login node without a GPU is no fault; a version nobody verified is.
        outside = status.version is not None and not te.SUPPORTED[0] <= Version(status.version) < te.SUPPORTED[1]
        state, detail = "unsupported" if outside else "note", status.problem
    return Finding("Transformer Engine", status.version or "-", state, detail)


def _backend() -> Finding:
    from olmo_lns.norm import choose_backend

    try:
        backend = choose_backend()
    except LNSError as error:
        return Finding("norm backend", "-", "unsupported", str(error))
    return Finding("norm backend", backend.name, "ok", backend.reason)


def _autoload() -> Finding:
    if os.environ.get(autoload.DISABLE) == "1":
        return Finding("autoload", "off", "note", f"{autoload.DISABLE}=1 is set")
    if autoload.autoload_active():
        return Finding("autoload", "on", "ok", "unmodified launches load the plugins")
    return Finding(
        "autoload", "off", "note", "no start-up hook here (pip --target, PYTHONPATH or -S): python -m olmo_lns <script>"
    )


def main(argv: Sequence[str]) -> int:
    """Print the table. Exit code 1 if an installed framework or an asked-for backend cannot be used."""
    argparse.ArgumentParser(prog="olmo-lns doctor", description=__doc__).parse_args(argv)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron warns of every optional part that is absent
        findings = examine()
    table = Table("", "version", "state", Column("", overflow="fold"), title="olmo-lns doctor", title_justify="left")
    colours = {"ok": "green", "absent": "dim", "note": "yellow", "unsupported": "red"}
    for row in findings:
        table.add_row(row.what, row.found, f"[{colours[row.state]}]{row.state}[/]", escape(row.detail))
    Console().print(table)
    return int(any(row.state == "unsupported" for row in findings))
