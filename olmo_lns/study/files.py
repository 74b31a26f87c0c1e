"""Files of a study: YAML that people write, in which ``${oc.env:NAME}`` reads the environment; and whole writes."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator, Mapping

import yaml

from olmo_lns.errors import LNSConfigError

__all__ = ["VARIABLE", "filled", "flatten", "needed", "placeholders", "read", "write_whole"]

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
    """Set what a file needs and is not set, so that it can be checked anywhere."""
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
