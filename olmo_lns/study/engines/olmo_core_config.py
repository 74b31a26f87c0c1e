"""Config files of OLMo-core: the sections of an ``ExperimentConfig``, as YAML or as the ``config.json`` of a run."""

from __future__ import annotations

import copy
import os
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Mapping

import yaml

from olmo_lns.errors import LNSConfigError, LNSError, one_line
from olmo_lns.study.engines.olmo_config import ENVIRONMENT, placeholders

__all__ = ["SECTIONS", "available", "build", "model_of", "overrides_to_args", "planned", "read", "with_overrides"]

#: What a run is made of, in the order in which it is built.
SECTIONS = ("model", "dataset", "data_loader", "train_module", "trainer")


def read(path: str | Path) -> dict[str, Any]:
    """The file as nested mappings, ``${oc.env:NAME}`` replaced by the variable's value.

    :raises LNSConfigError: no such file, a variable that is not set, or a section that is missing.
    """
    path = Path(path)
    if not path.is_file():
        raise LNSConfigError(f"{path}: no such file")
    text = path.read_text(encoding="utf-8")
    if missing := [name for name in ENVIRONMENT.findall(text) if name not in os.environ]:
        raise LNSConfigError(f"{path} reads {missing[0]}, which is not set: export {missing[0]}=…")
    try:
        tree = yaml.safe_load(ENVIRONMENT.sub(lambda match: os.environ[match[1]], text))
    except yaml.YAMLError as error:
        raise LNSConfigError(f"{path}: not YAML: {one_line(error)}") from None
    if lacking := [name for name in SECTIONS if not isinstance(tree, dict) or not isinstance(tree.get(name), dict)]:
        raise LNSConfigError(f"{path} has no section {lacking[0]!r}: expected {', '.join(SECTIONS)}")
    return dict(tree)


def with_overrides(tree: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """``tree`` with flat settings laid over it, in place.

    :raises LNSConfigError: a key below something that is no section.
    """
    for key, value in overrides.items():
        *outer, last = key.split(".")
        node: Any = tree
        for name in outer:
            node = node.get(name) if isinstance(node, dict) else None
        if not isinstance(node, dict):
            raise LNSConfigError(f"override {key}: the config has no section {'.'.join(outer)}")
        node[last] = value
    return tree


def planned(path: Path, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """:func:`read` with overrides, where variables need not be set and OLMo-core need not be there."""
    if not path.is_file():
        raise LNSConfigError(f"{path}: no such file")
    with placeholders(path):
        return with_overrides(read(path), overrides or {})


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
    if isinstance(node, list):
        for item in node:
            _require_classes(path, where, item)
    if not isinstance(node, dict):
        return
    for key, value in node.items():
        _require_classes(path, f"{where}.{key}", value)
    if (name := node.get("_CLASS_")) is None:
        if where in SECTIONS:
            raise LNSConfigError(f"{path}: {where} has no _CLASS_: say which class of OLMo-core it is")
        return
    module, _, attribute = str(name).rpartition(".")
    try:
        known = hasattr(import_module(module), attribute)
    except ImportError as error:
        raise LNSConfigError(f"{path}: {where}._CLASS_={name}: {error}") from None
    if not known:
        raise LNSConfigError(f"{path}: {where}._CLASS_={name}: {module} has no {attribute}")


def overrides_to_args(overrides: Mapping[str, Any]) -> list[str]:
    """``{"model.d_model": 64}`` → ``["--model.d_model=64"]``; OLMo-core reads each value as YAML."""
    return [f"--{key}={_word(value)}" for key, value in overrides.items()]


def _word(value: Any) -> str:
    if isinstance(value, str):
        return value
    return yaml.safe_dump(value, default_flow_style=True, width=2**16).removesuffix("...\n").strip()
