"""The extras of this package, read from its own metadata, and which of their packages are installed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from typing import Sequence

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

DISTRIBUTION = "olmo-lns"
#: Distribution -> the module it is imported as, where the two differ.
IMPORTED_AS = {
    "ai2-olmo": "olmo",
    "ai2-olmo-core": "olmo_core",
    "lm-eval": "lm_eval",
    "megatron-core": "megatron",
    "pyyaml": "yaml",
    "scikit-learn": "sklearn",
    "transformer-engine": "transformer_engine",
}

_MAIN = {"olmo": "ai2-olmo", "olmo-core": "ai2-olmo-core", "sft": "trl"}
#: (extra that is asked for, extra that is here) -> what installing the first does to the second.
_APART = {
    ("olmo", "olmo-core"): "it replaces OLMo-core",
    ("olmo-core", "olmo"): "it replaces the OLMo-core that OLMo pins",
    ("sft", "olmo"): "TRL wants datasets>=4, OLMo datasets<4",
    ("olmo", "sft"): "OLMo wants datasets<4, TRL datasets>=4",
}


def names() -> list[str]:
    """The extras, in the order of pyproject.toml."""
    return importlib.metadata.metadata(DISTRIBUTION).get_all("Provides-Extra") or []


def _requirements(extra: str) -> list[Requirement]:
    """The requirements that ``extra`` adds on this platform."""
    found = [Requirement(text) for text in importlib.metadata.requires(DISTRIBUTION) or []]
    return [r for r in found if r.marker and r.marker.evaluate({"extra": extra}) and "extra" in str(r.marker)]


def _module(requirement: Requirement) -> str:
    return IMPORTED_AS.get(requirement.name.lower(), requirement.name.replace("-", "_"))


def require(*modules: str) -> None:
    """:raises ModuleNotFoundError: one is not installed; asked before the work that would end with it."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)


def problems(extra: str) -> tuple[list[str], list[str]]:
    """``(missing, of another version)`` packages of an extra; one on the path without metadata is not missing."""
    missing, other = [], []
    for requirement in _requirements(extra):
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            if importlib.util.find_spec(_module(requirement)) is None:
                missing.append(requirement.name)
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            other.append(f"{requirement.name} {version} (wanted {requirement.specifier})")
    return missing, other


def wanted(extra: str, name: str) -> SpecifierSet:
    """The versions of package ``name`` that an extra accepts."""
    return next(requirement.specifier for requirement in _requirements(extra) if requirement.name == name)


def extra_of(module: str, preferred: Sequence[str]) -> str | None:
    """The extra that brings the top-level ``module``: one of ``preferred`` if it does, else any; None for none.

    Beside OLMo-core the extra ``olmo`` comes last: it would replace OLMo-core by the release that ai2-olmo pins.
    """
    order = [*preferred, *names()]
    if _is_here("olmo-core"):
        order = [extra for extra in order if extra != "olmo"] + ["olmo"]
    for extra in order:
        if any(_module(requirement) == module for requirement in _requirements(extra)):
            return extra
    return None


def advice(extra: str) -> str:
    """The command that installs an extra, or several: ``olmo,analysis``."""
    isolation = "--no-build-isolation " if extra == "te" else ""
    clashes = [why for (one, here), why in _APART.items() if one in extra.split(",") and _is_here(here)]
    apart = f" in another environment: {clashes[0]}" if clashes else ""
    return f"pip install {isolation}'{DISTRIBUTION}[{extra}]'{apart}"


def _is_here(extra: str) -> bool:
    """Whether the main package of an extra is installed in an accepted version (ai2-olmo brings an older OLMo-core)."""
    main = _MAIN[extra]
    missing, other = problems(extra)
    return main not in missing and not any(text.startswith(f"{main} ") for text in other)
