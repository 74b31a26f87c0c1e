"""Config files of OLMo-core: the sections of an ``ExperimentConfig``, as YAML or as the ``config.json`` of a run."""

from __future__ import annotations

import copy
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Mapping

import yaml

from olmo_lns.errors import LNSConfigError, LNSError, one_line
from olmo_lns.study import files

__all__ = ["SECTIONS", "available", "build", "model_of", "overrides_to_args", "planned", "read"]

#: What a run is made of, in the order in which it is built.
SECTIONS = ("model", "dataset", "data_loader", "train_module", "trainer")


def read(path: str | Path) -> dict[str, Any]:
    """The file as nested mappings, its variables replaced.

    :raises LNSConfigError: no such file, a variable that is not set, or a section that is missing.
    """
    return planned(Path(path), placeholder=False)


def planned(path: Path, overrides: Mapping[str, Any] | None = None, *, placeholder: bool = True) -> dict[str, Any]:
    """:func:`read` with flat overrides, where variables need not be set and OLMo-core need not be there.

    :raises LNSConfigError: also a key below something that is no section.
    """
    tree: dict[str, Any] = files.filled(files.read(path), str(path), placeholder=placeholder)
    if lacking := [name for name in SECTIONS if not isinstance(tree.get(name), dict)]:
        raise LNSConfigError(f"{path} has no section {lacking[0]!r}: expected {', '.join(SECTIONS)}")
    for key, value in (overrides or {}).items():
        *outer, last = key.split(".")
        node: Any = tree
        for name in outer:
            node = node.get(name) if isinstance(node, dict) else None
        if not isinstance(node, dict):
            raise LNSConfigError(f"override {key}: the config has no section {'.'.join(outer)}")
        node[last] = value
    return tree


def available() -> bool:
    """Whether OLMo-core is here; ai2-olmo brings 0.1.0, which has no models."""
    return find_spec("olmo_core") is not None and find_spec("olmo_core.nn") is not None


def build(path: Path, tree: Mapping[str, Any]) -> dict[str, Any]:
    """Section -> OLMo-core's config object.

    :raises LNSConfigError: OLMo-core's own complaint, or a class that it does not have, with the file's name.
    """
    from olmo_core.config import Config
    from olmo_core.exceptions import OLMoConfigurationError

    sections = {}
    for name in SECTIONS:
        _require_classes(path, name, tree[name])
        try:
            sections[name] = Config.from_dict(copy.deepcopy(tree[name]))
        except (OLMoConfigurationError, ImportError, TypeError, ValueError) as error:
            raise LNSConfigError(f"{path}: OLMo-core refuses {name}: {one_line(error)}") from error
    return sections


def model_of(path: Path, tree: Mapping[str, Any]) -> Any:
    """The model of a config on the meta device; it draws and holds nothing.

    :raises LNSConfigError: as :func:`build`, or a model that OLMo-core cannot build.
    """
    config = build(path, tree)["model"]
    try:
        return config.build(init_device="meta")
    except LNSError:
        raise
    except Exception as error:  # OLMo-core's and torch's own, of many kinds
        raise LNSConfigError(f"{path}: OLMo-core cannot build this model: {one_line(error)}") from error


def _require_classes(path: Path, where: str, node: Any) -> None:
    """OLMo-core takes a class that it cannot find for none, and builds its default in silence."""
    for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        _require_classes(path, f"{where}.{key}", value)
    name = node.get("_CLASS_") if isinstance(node, dict) else None
    if name is None:
        if where in SECTIONS:
            raise LNSConfigError(f"{path}: {where} has no _CLASS_: say which class of OLMo-core it is")
        return
    module, _, attribute = str(name).rpartition(".")
    try:
        if not hasattr(import_module(module), attribute):
            raise ImportError(f"{module} has no {attribute}")
    except ImportError as error:
        raise LNSConfigError(f"{path}: {where}._CLASS_={name}: {error}") from None


def overrides_to_args(overrides: Mapping[str, Any]) -> list[str]:
    """``{"model.d_model": 64}`` → ``["--model.d_model=64"]``; OLMo-core reads each value as YAML."""

    def word(value: Any) -> str:
        if isinstance(value, str):
            return value
        return yaml.safe_dump(value, default_flow_style=True, width=2**16).removesuffix("...\n").strip()

    return [f"--{key}={word(value)}" for key, value in overrides.items()]
