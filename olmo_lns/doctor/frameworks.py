"""The rows of the frameworks: where each stands, its version, whether its sources are those that were verified."""

from __future__ import annotations

import importlib
import importlib.util
import re
import runpy
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from olmo_lns import environment, extras
from olmo_lns.errors import LNSError
from olmo_lns.integrations import sources

__all__ = ["FRAMEWORKS", "Finding", "framework_row", "transformers_row", "tree_of"]


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
    :param all_needed: whether every symbol of the table exists in every version.
    """

    label: str
    extra: str
    module: str
    release: tuple[str, str]
    upstream: str
    all_needed: bool
    detail: str


FRAMEWORKS = (
    Framework(
        "OLMo",
        "olmo",
        "olmo",
        ("olmo/version.py", "VERSION"),
        "olmo_lns.integrations.olmo.upstream",
        True,
        "layer_norm_type: lns, lns_rms, lns_default, lns_low_precision; so for the other schemes",
    ),
    Framework(
        "OLMo-core",
        "olmo-core",
        "olmo_core",
        ("olmo_core/version.py", "VERSION"),
        "olmo_lns.integrations.olmo_core.upstream",
        True,
        "block: {_CLASS_: olmo_lns.olmo_core.BlockConfig}",
    ),
    Framework(
        "Megatron core",
        "megatron",
        "megatron.core",
        ("megatron/core/package_info.py", "__version__"),
        "olmo_lns.integrations.megatron.upstream",
        False,
        "flags --layernorm-scaling, --norm-scheme, --no-scaled-init",
    ),
)


def framework_row(framework: Framework) -> Finding:
    """Its sources are read and compared with those verified; nothing of it is imported."""
    label = framework.label
    if (tree := tree_of(framework.module)) is None:
        here = Path(*framework.module.split("."))
        if not here.is_dir():
            return Finding(label, "-", "absent", extras.advice(framework.extra))
        # A script of this folder would import it; `olmo-lns` itself, which lies elsewhere, does not.
        return Finding(label, "-", "absent", f"only ./{here}, for scripts of this folder: python -m olmo_lns doctor")
    upstream = importlib.import_module(framework.upstream)
    version = _version(framework, tree)
    if version is None:
        return Finding(label, "-", "unsupported", f"{tree / framework.release[0]} says no {framework.release[1]}")
    if framework.module == "olmo_core" and Version(version) < Version(upstream.OLDEST):
        return Finding(label, version, "note", f"older than {upstream.OLDEST}: not used; ai2-olmo brings it for itself")
    try:
        if framework.module == "olmo":
            upstream.check_version(version)
        targets = {target.path: target.verified for target in upstream.TARGETS}
        changed = sources.unverified(tree, targets, all_needed=framework.all_needed)
    except (LNSError, OSError, SyntaxError) as error:
        return Finding(label, version, "unsupported", f"{type(error).__name__}: {error}")
    if changed:
        text = f"{', '.join(changed)}: source not verified, in {tree}"
        allowed = environment.is_set(environment.ALLOW_UNVERIFIED)
        return Finding(label, version, "note" if allowed else "unsupported", text)
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


def _version(framework: Framework, tree: Path) -> str | None:
    """As the sources that would be imported say; metadata may be another copy's."""
    path, name = framework.release
    try:
        return str(runpy.run_path(str(tree / path))[name])
    except (KeyError, OSError):
        return None


def transformers_row() -> Finding:
    """It has no sources to compare: its integration is made of its own extension points, in a range of versions."""
    if (tree := tree_of("transformers")) is None:
        return Finding("transformers", "-", "absent", extras.advice("hf"))
    from olmo_lns.integrations.transformers.families import FAMILIES, PREFIX, VERIFIED

    source = tree / "transformers" / "__init__.py"
    written = re.search(r'^__version__ = "(.+)"', source.read_text(encoding="utf-8"), re.MULTILINE)
    if written is None:
        return Finding("transformers", "-", "unsupported", f"{source} says no __version__")
    version, wanted = written[1], extras.wanted("hf", "transformers")
    types = ", ".join(f"{PREFIX}{kind}" for kind, family in FAMILIES.items() if family.sub_layers)
    if not wanted.contains(version, prereleases=True):
        return Finding("transformers", version, "note", f"wanted {wanted}; verified: {VERIFIED}")
    return Finding("transformers", version, "ok", f"model types {types}")
