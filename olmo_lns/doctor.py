"""``olmo-lns doctor``: what is installed here, whether it is supported, and what would run.

No framework is imported: their sources are read and compared with those that were verified.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import platform
import re
import runpy
import sys
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Sequence

from packaging.version import Version
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from olmo_lns import __version__, environment, extras, schemes
from olmo_lns.errors import LNSError
from olmo_lns.integrations import autoload, patching
from olmo_lns.integrations.olmo.types import check_environment


@dataclass(frozen=True)
class Finding:
    """One row: ``state`` is ``ok``, ``absent``, ``note`` or ``unsupported`` (the only one that fails)."""

    what: str
    found: str
    state: str
    detail: str


@dataclass(frozen=True)
class Framework:
    """Where a framework's name, version and verified sources stand.

    :param release: path below the source tree, and the variable in it, that holds the version.
    :param detail: how a scheme is selected.
    """

    label: str
    extra: str
    module: str
    release: tuple[str, str]
    detail: str


_TYPES = "layer_norm_type: lns, lns_rms, lns_default, lns_low_precision; so for the other schemes"
_BLOCK = "block: {_CLASS_: olmo_lns.olmo_core.BlockConfig}"
_FLAGS = "flags --layernorm-scaling, --norm-scheme, --no-scaled-init"
_MEGATRON = ("megatron/core/package_info.py", "__version__")
FRAMEWORKS = (
    Framework("OLMo", "olmo", "olmo", ("olmo/version.py", "VERSION"), _TYPES),
    Framework("OLMo-core", "olmo-core", "olmo_core", ("olmo_core/version.py", "VERSION"), _BLOCK),
    Framework("Megatron core", "megatron", "megatron.core", _MEGATRON, _FLAGS),
)

#: Where Megatron has this file (0.19 has), every import of its core reaches it, and it imports triton.
_WANTS_TRITON = Path("megatron", "core", "transformer", "moe", "ops", "paged_stash.py")


def examine() -> list[Finding]:
    """Look at every part."""
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


def framework_row(framework: Framework) -> Finding:
    """The row of a framework: its version, and whether its sources are those that were verified."""
    label = framework.label
    if (tree := tree_of(framework.module)) is None:
        here = Path(*framework.module.split("."))
        if not here.is_dir():
            return Finding(label, "-", "absent", extras.advice(framework.extra))
        # A script of this folder would import it; `olmo-lns` itself, which lies elsewhere, does not.
        return Finding(label, "-", "absent", f"only ./{here}, for scripts of this folder: python -m olmo_lns doctor")
    own = f"olmo_lns.integrations.{framework.extra.replace('-', '_')}.upstream"
    upstream = (
        importlib.import_module(own) if importlib.util.find_spec(own) else None
    )  # None: measured when it is built
    path, name = framework.release
    try:  # as the sources that would be imported say; metadata may be another copy's
        version = str(runpy.run_path(str(tree / path))[name])
    except (KeyError, OSError):
        return Finding(label, "-", "unsupported", f"{tree / path} says no {name}")
    if upstream and framework.module == "olmo_core" and Version(version) < Version(upstream.OLDEST):
        return Finding(label, version, "note", f"older than {upstream.OLDEST}: not used; ai2-olmo brings it for itself")
    try:
        # Of Megatron's symbols no version has all.
        all_needed = framework.extra != "megatron"
        changed = patching.unverified(tree, upstream.TARGETS, all_needed=all_needed) if upstream else []
    except (LNSError, OSError, SyntaxError) as error:
        return Finding(label, version, "unsupported", f"{type(error).__name__}: {error}")
    if changed:
        text = f"{', '.join(changed)}: source not verified, in {tree}"
        allowed = environment.is_set(environment.ALLOW_UNVERIFIED)
        return Finding(label, version, "note" if allowed else "unsupported", text)
    if (tree / _WANTS_TRITON).is_file() and importlib.util.find_spec("triton") is None:
        text = f"megatron.core {version} cannot be imported without triton, which is not installed: pip install triton"
        return Finding(label, version, "unsupported", text)
    if framework.module == "olmo" and (missing := extras.problems("olmo")[0]):  # `pip install ai2-olmo` alone
        text = f"it may not be importable: lacks {', '.join(missing)}: {extras.advice('olmo')}"
        return Finding(label, version, "note", text)
    return Finding(label, version, "ok", f"{framework.detail}; in {tree}")


def tree_of(module: str) -> Path | None:
    """The folder that holds a framework's top-level package, or None where it cannot be imported."""
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # the parent is absent
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations))).parents[module.count(".")]


def transformers_row() -> Finding:
    """The row of transformers, judged by its version: the integration replaces none of its functions' sources."""
    if (tree := tree_of("transformers")) is None:
        return Finding("transformers", "-", "absent", extras.advice("hf"))
    source = (tree / "transformers" / "__init__.py").read_text(encoding="utf-8")
    version = re.findall(r'^__version__ = "(.+)"', source, re.MULTILINE)[0]
    wanted = extras.wanted("hf", "transformers")
    if not wanted.contains(version, prereleases=True):
        return Finding("transformers", version, "note", f"wanted {wanted}")
    return Finding("transformers", version, "ok", "lns_<type> for any type whose blocks are Pre-LN")


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


def _torch() -> Finding:
    try:
        import torch
    except (ImportError, OSError) as error:
        return Finding("torch", "-", "unsupported", f"cannot be imported: pip install torch ({error})")
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

    status = te.availability()
    if status.problem is None:
        state, detail = "ok", "fused kernels carry the factor"
    else:
        # Broken on a login node without a GPU is no fault; a version nobody verified is.
        outside = status.version is not None and not te.SUPPORTED[0] <= Version(status.version) < te.SUPPORTED[1]
        state, detail = "unsupported" if outside else "note", status.problem
    return Finding("Transformer Engine", status.version or "-", state, detail)


def _backend() -> Finding:
    try:
        from olmo_lns.norm import choose_backend

        backend = choose_backend()
    except (ImportError, LNSError) as error:
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
        # Packages of another version than asked for may do; a framework without an integration does not.
        own, packages = rows.get(labels.get(name, "")), rows[f"extra {name}"]
        bad = own if own and own.state != "ok" else packages if packages.state == "absent" else None
        if bad:
            lines.append(f"--require {name}: {bad.what} is {bad.state.replace('note', 'unsupported')}: {bad.detail}")
    return lines


def main(argv: Sequence[str]) -> int:
    """Print the table. Exit code 1 if an installed framework, a chosen backend or a required extra cannot be used."""
    parser = argparse.ArgumentParser(
        prog="olmo-lns doctor", description="What is installed here, whether it is supported, and what would run."
    )
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    text = f"exit with 1 where it is absent; may be given again: {', '.join(extras.names())}"
    choices: dict[str, Any] = {"metavar": "EXTRA", "choices": extras.names()}
    parser.add_argument("--require", action="append", default=[], **choices, help=text)
    args = parser.parse_args(argv)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of optional parts that are absent
        findings = examine()
    if args.json:
        print(json.dumps([asdict(row) for row in findings], indent=1))
    else:
        table = Table(
            "", "version", "state", Column("", overflow="fold"), title="olmo-lns doctor", title_justify="left"
        )
        colours = {"ok": "green", "absent": "dim", "note": "yellow", "unsupported": "red"}
        for row in findings:
            table.add_row(row.what, row.found, f"[{colours[row.state]}]{row.state}[/]", escape(row.detail))
        Console().print(table)
    lacking = _lacking(findings, args.require)
    for line in lacking:
        print(f"olmo-lns doctor: {line}", file=sys.stderr)
    return int(bool(lacking) or any(row.state == "unsupported" for row in findings))
