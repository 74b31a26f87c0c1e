"""The config pack, and files of a study: YAML in which ``${oc.env:NAME}`` reads the environment, and whole writes."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator, Mapping

import yaml

import olmo_lns
from olmo_lns.errors import LNSConfigError, did_you_mean

#: ``${oc.env:NAME}`` or ``${oc.env:NAME,default}``, as OmegaConf reads them.
VARIABLE = re.compile(r"\$\{oc\.env:([A-Za-z_][A-Za-z0-9_]*)(?:,([^}]*))?\}")


def read(path: Path) -> dict[str, Any]:
    """The mapping in a file, with its variables as they are written.

    :raises LNSConfigError: no such file, not YAML, or not a mapping.
    """
    if not path.is_file():
        raise LNSConfigError(f"{path}: no such file")
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise LNSConfigError(f"{path}: not YAML: {' '.join(str(error).split())[:200]}") from error
    if not isinstance(found, dict):
        raise LNSConfigError(f"{path}: expected a mapping of keys to values, found a {type(found).__name__}")
    return found


def needed(path: Path) -> list[str]:
    """The variables without a default that a file reads."""
    found = VARIABLE.findall(path.read_text(encoding="utf-8"))
    return list(dict.fromkeys(name for name, default in found if not default))


def filled(node: Any, where: str, *, placeholder: bool = False, otherwise: str = "") -> Any:
    """Text, or lists and mappings of it, with the variables replaced.

    :param placeholder: one that is not set becomes ``/NAME-is-not-set`` instead of an error.
    :param otherwise: what else to do, for that error.
    :raises LNSConfigError: a variable that is not set and has no default.
    """
    if isinstance(node, dict):
        return {key: filled(value, where, placeholder=placeholder) for key, value in node.items()}
    if isinstance(node, list):
        return [filled(value, where, placeholder=placeholder) for value in node]

    def value(match: re.Match[str]) -> str:
        name, default = match[1], match[2]
        if (found := os.environ.get(name, default)) is not None:
            return str(found)
        if placeholder:
            return f"/{name}-is-not-set"
        raise LNSConfigError(f"{where} reads {name}, which is not set: export {name}=…{otherwise}")

    return VARIABLE.sub(value, node) if isinstance(node, str) else node


@contextmanager
def placeholders(path: Path) -> Iterator[None]:
    """Give the variables that a file needs a stand-in where they are not set, so that it can be checked anywhere."""
    missing = [name for name in needed(path) if name not in os.environ]
    os.environ.update({name: f"/{name}-is-not-set" for name in missing})
    try:
        yield
    finally:
        for name in missing:
            os.environ.pop(name, None)


def flatten(config: Any) -> dict[str, Any]:
    """A dataclass or nested mapping as ``{"model.d_model": 512, …}``, with the values that JSON has."""
    tree = dataclasses.asdict(config) if dataclasses.is_dataclass(config) else config  # type: ignore[arg-type]
    flat: dict[str, Any] = {}

    def walk(prefix: str, node: Any) -> None:
        if isinstance(node, Mapping):
            for key, value in node.items():
                walk(f"{prefix}.{key}" if prefix else str(key), value)
        else:
            flat[prefix] = node

    walk("", json.loads(json.dumps(tree, default=str)))
    return flat


def write_whole(path: Path, text: str) -> None:
    """Write ``path`` by rename: neither a kill nor a full disk leaves half of it, or costs what was there."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8", newline="")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def pack_folder() -> Path:
    """Where the pack is: in the package, or beside it in a clone.

    :raises LNSConfigError: neither, as in an installation without package data.
    """
    package = Path(olmo_lns.__file__).parent
    for candidate in (package / "configs", package.parent / "configs"):
        if candidate.is_dir():
            return candidate
    raise LNSConfigError(f"no config pack in {package} or beside it: install the wheel again, or clone the repository")


def pack_names() -> list[str]:
    """The files of the pack, such as ``olmo/60M-lns.yaml``."""
    found = (path.relative_to(pack_folder()) for path in pack_folder().rglob("*") if path.is_file())
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
    for packed in pack_names():
        spelled = (packed, packed.removeprefix(f"{kind}/"))
        known |= dict.fromkeys((*spelled, *(os.path.splitext(each)[0] for each in spelled)), packed)
    if wanted in known:
        return pack_folder() / known[wanted]
    here = [os.path.splitext(path)[0].removeprefix(f"{kind}/") for path in pack_names() if path.startswith(kind)]
    hint, text = did_you_mean(Path(name).stem, here), ", ".join(here) if kind else "`olmo-lns config list` shows it"
    raise LNSConfigError(f"{name}: no such file, and none of the pack{hint}: {text}")


def pack_copy(name: str, out: Path) -> Path:
    """Copy one file, or a folder such as ``study`` with all its files, to ``out``; nothing is overwritten.

    :param out: a folder that exists, or the new name.
    :raises LNSConfigError: no such file in the pack, or there is one at the target already.
    """
    source = path if (path := pack_folder() / name).exists() else pack_folder() / f"{name}.yaml"
    if not source.exists() or not source.resolve().is_relative_to(pack_folder().resolve()):
        known = pack_names() + sorted({str(Path(path).parent) for path in pack_names()})
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
    text = (pack_folder() / name).read_text(encoding="utf-8").lstrip('"#! ')
    return re.split(r"[.:](?=\s)", text, maxsplit=1)[0].replace("\n# ", " ")[:90] if text[:1] not in "{<" else ""
