"""The config pack, in ``configs/`` of a clone and inside the installed package."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import olmo_lns
from olmo_lns.errors import LNSConfigError, did_you_mean

__all__ = ["about", "copy", "folder", "located", "names"]


def folder() -> Path:
    """Where the pack is: in the package, or beside it in a clone.

    :raises LNSConfigError: neither, as in an installation without package data.
    """
    package = Path(olmo_lns.__file__).parent
    for candidate in (package / "configs", package.parent / "configs"):
        if candidate.is_dir():
            return candidate
    raise LNSConfigError(f"no config pack in {package} or beside it: install the wheel again, or clone the repository")


def names() -> list[str]:
    """The files of the pack, such as ``olmo/60M-lns.yaml``."""
    found = (path.relative_to(folder()) for path in folder().rglob("*") if path.is_file())
    return sorted(str(path) for path in found if "__pycache__" not in path.parts)


def located(name: str | Path, kind: str) -> Path:
    """A file by its path, or one of the pack by its name: ``paper``, ``60M-lns``; a path that is there comes first.

    :param kind: the folder of the pack, such as ``study``; ``""`` for names such as ``study/paper``.
    :raises LNSConfigError: neither.

    >>> located("paper", "study").name
    'paper.yaml'
    """
    for path in (Path(name), Path(f"{name}.yaml")):  # a copy here, perhaps edited, comes before the pack's
        if path.is_file():
            return path
    wanted, known = str(name).removeprefix("configs/"), dict[str, str]()
    for packed in names():
        spelled = (packed, packed.removeprefix(f"{kind}/"))
        known |= dict.fromkeys((*spelled, *(os.path.splitext(each)[0] for each in spelled)), packed)
    if wanted in known:
        return folder() / known[wanted]
    here = [os.path.splitext(path)[0].removeprefix(f"{kind}/") for path in names() if path.startswith(kind)]
    hint, text = did_you_mean(Path(name).stem, here), ", ".join(here) if kind else "`olmo-lns config list` shows it"
    raise LNSConfigError(f"{name}: no such file, and none of the pack{hint}: {text}")


def copy(name: str, out: Path) -> Path:
    """Copy one file, or a folder such as ``study`` with all its files, to ``out``; nothing is overwritten.

    :param out: a folder that exists, or the new name.
    :raises LNSConfigError: no such file in the pack, or there is one at the target already.
    """
    source = next((path for path in (folder() / name, folder() / f"{name}.yaml") if path.exists()), folder() / name)
    if not source.exists() or not source.resolve().is_relative_to(folder().resolve()):
        known = names() + sorted({str(Path(path).parent) for path in names()})
        raise LNSConfigError(f"the pack has no {name!r}{did_you_mean(name, known)}: `olmo-lns config list` shows it")
    target = out / source.name if out.is_dir() else out
    if target.exists():
        raise LNSConfigError(f"{target} exists: give another name with -o")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if source.is_dir() else shutil.copyfile)(source, target)
    except OSError as error:
        raise LNSConfigError(f"{target} cannot be written: {error.strerror}") from None
    return target


def about(name: str) -> str:
    """The first sentence of a file's header."""
    text = (folder() / name).read_text(encoding="utf-8").lstrip('"#! ')
    return re.split(r"[.:](?=\s)", text, maxsplit=1)[0].replace("\n# ", " ")[:90] if text[:1] not in "{<" else ""
