"""``olmo-lns doctor``: report if LayerNorm Scaling can run here, and list the installed frameworks.

No framework is imported: each model is measured when it is built, with any version of its framework.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Sequence

from packaging.requirements import Requirement

from olmo_lns import __version__, environment
from olmo_lns.arguments import Parser
from olmo_lns.errors import LNSError
from olmo_lns.frameworks import FRAMEWORKS, Framework
from olmo_lns.hook import autoload_active
from olmo_lns.pip_extras import install_command, unsupported


def installed(framework: Framework) -> str | None:
    """Return the version of a framework, or the folder of its checkout, or None if it is not installed."""
    package, module = framework.package, framework.installed_as
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # the parent package is absent
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(next(iter(spec.submodule_search_locations))).parents[module.count(".")].resolve()
    with suppress(importlib.metadata.PackageNotFoundError):
        distribution = importlib.metadata.distribution(package)
        if Path(str(distribution.locate_file(""))).resolve() == folder:
            return distribution.version
    return str(folder)


def missing_packages(extra: str) -> str:
    """Return the missing packages of an extra, with the command that installs them, or ``""``."""
    framework = next((row for row in FRAMEWORKS.values() if row.extra == extra), None)
    version = framework and installed(framework)
    if not version and (problem := unsupported(extra)):
        return problem
    checkout = framework.package if framework and "/" in (version or "") else None
    missing = []
    for requirement in map(Requirement, importlib.metadata.requires("olmo-lns") or []):
        marker, name = requirement.marker, requirement.name
        if marker and "extra" in str(marker) and marker.evaluate({"extra": extra}) and name != checkout:
            try:
                found = importlib.metadata.version(name)
                if not requirement.specifier.contains(found, prereleases=True):
                    missing.append(f"{name}{requirement.specifier} (version {found} is installed)")
            except importlib.metadata.PackageNotFoundError:
                missing.append(name)
    if not missing:
        return ""
    verb = "is" if len(missing) == 1 else "are"
    command = install_command(extra, "--no-build-isolation" if extra == "te" else "")
    return f"{', '.join(missing)} {verb} missing. Run: {command}"


def examine() -> tuple[list[str], list[str]]:
    """Return the lines of the report, and the problems that would stop a launch."""
    ready, rows, problems = [], [], []
    for row in FRAMEWORKS.values():
        version, missing = installed(row), missing_packages(row.extra)
        if row.module == "olmo_core" and missing and installed(FRAMEWORKS["olmo"]):
            missing = (
                "OLMo-core cannot be installed beside ai2-olmo. docs/olmo-core.md installs it in another environment."
            )
        rows.append((row.title, version or "-", missing or row.setting))
        if version and not missing:
            ready.append(f"{row.title} {version}")
    lines = [f"LayerNorm Scaling can run here with {', '.join(ready)}."] if ready else []
    lines = lines or ["No supported framework is installed."]
    if environment.is_set(environment.DISABLE):
        problems.append(f"{environment.DISABLE}=1 switches the plugin off in every launch. Unset it to use the plugin.")
    elif autoload_active():
        lines.append("Unmodified launches load the plugin: the start-up hook is on.")
    else:
        lines.append(
            "The start-up hook is off, as after pip --target, with PYTHONPATH or under python -S. Launch with: python "
            "-m olmo_lns <script>"
        )
    try:
        environment.check()
        from olmo_lns.diagnostics.monitor import parse_setting
        from olmo_lns.norm import choose_backend

        if monitor := environment.read(environment.MONITOR):
            parse_setting(monitor)
        backend = choose_backend()
        lines.append(f"Norms run on {backend.name} ({backend.reason}).")
    except LNSError as error:
        problems.append(str(error))
    except (ImportError, OSError) as error:
        problems.append(f"torch could not be imported ({error}). Every framework needs it. Run: pip install torch")
    rows.append(("olmo-lns", __version__, f"Python {platform.python_version()}"))
    lines += ["", *(f"  {label:<14} {version:<10} {text}" for label, version, text in rows)]
    if variables := [f"{name}={value}" for name in environment.VARIABLES if (value := environment.read(name))]:
        lines.append(f"  settings: {', '.join(variables)}")
    return lines, problems


def main(argv: Sequence[str]) -> int:
    """Print the report. Exit code 1: a setting cannot work, or a required extra is incomplete."""
    parser = Parser(prog="olmo-lns doctor", description="Check that LayerNorm Scaling can run here.")
    extras = importlib.metadata.metadata("olmo-lns").get_all("Provides-Extra") or []
    require_help = f"exit with 1 if this extra is incomplete; repeatable: {', '.join(extras)}"
    parser.add_argument("--require", action="append", default=[], metavar="EXTRA", choices=extras, help=require_help)
    args = parser.parse_args(argv)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about missing optional packages
        lines, problems = examine()
    problems += [f"--require {extra}: {missing}" for extra in args.require if (missing := missing_packages(extra))]
    for problem in problems:
        print(f"olmo-lns doctor: {problem}", file=sys.stderr)
    print("\n".join(lines))
    return int(bool(problems))
