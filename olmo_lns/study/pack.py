"""The config pack: in ``configs/`` of a clone, and inside the installed package."""

from __future__ import annotations

from pathlib import Path

import olmo_lns
from olmo_lns.errors import LNSConfigError, did_you_mean

__all__ = ["folder", "located", "names"]


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

    :param kind: the folder of the pack, such as ``study``.
    :raises LNSConfigError: neither.

    >>> located("paper", "study").name
    'paper.yaml'
    """
    if (path := Path(name)).is_file():
        return path
    for candidate in (folder() / kind / f"{name}.yaml", folder() / kind / name):
        if len(path.parts) == 1 and candidate.is_file():
            return candidate
    known = [Path(found).stem for found in names() if str(Path(found).parent) == kind]
    raise LNSConfigError(
        f"{name}: no such file, and none of the pack{did_you_mean(path.stem, known)}: {', '.join(known)}"
    )
