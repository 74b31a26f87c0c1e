"""Read YAML config files: scalars as text, environment variables, and flat settings."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import re
from functools import cache, partial
from pathlib import Path
from typing import Any, Hashable, Mapping

import yaml

from olmo_lns.errors import LNSConfigError

#: OmegaConf's syntax for an environment variable: ``${oc.env:NAME}`` or ``${oc.env:NAME,default}``.
VARIABLE = re.compile(r"\$\{oc\.env:([A-Za-z_][A-Za-z0-9_]*)(?:,([^}]*))?\}")


class _TextLoader(yaml.SafeLoader):
    """Load every scalar as text, quoted or not. A repeated key is an error."""

    yaml_implicit_resolvers = {"<": [("tag:yaml.org,2002:merge", re.compile("^(?:<<)$"))]}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = set()
        for key, _ in node.value:
            identity = (key.tag, key.value) if isinstance(key, yaml.ScalarNode) else id(key)
            if identity in keys:
                message = f"The key {key.value!r} appears twice."
                raise yaml.constructor.ConstructorError(None, None, message, key.start_mark)
            keys.add(identity)
        return super().construct_mapping(node, deep)


@cache
def _parse(text: str) -> Any:
    """Parse a text once, since the runs of a study share their files."""
    return yaml.load(text, _TextLoader)


def read_text(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file, with every scalar as text. An empty value is ``""``.

    :raises LNSConfigError: if there is no such file, or it is not YAML, not a mapping, or repeats a key.
    """
    if not path.is_file():
        raise LNSConfigError(f"{path} was not found. Pass the path of a YAML file.")
    try:
        content = copy.deepcopy(_parse(path.read_text(encoding="utf-8-sig")))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        message = " ".join(str(error).split())[:300]
        raise LNSConfigError(f"{path} cannot be read as YAML. Correct this place: {message}") from error
    if not isinstance(content, dict):
        raise LNSConfigError(
            f"{path} has {type(content).__name__} at the top level. Expected a mapping of keys to values. Correct "
            "the file."
        )
    return content


def parse_scalars(node: Any) -> Any:
    """Convert text, also in lists and mappings, to JSON's numbers, booleans and null. ``no`` and ``010`` stay text.

    >>> parse_scalars({"a": "1e-3", "b": "010", "c": "null"})
    {'a': 0.001, 'b': '010', 'c': None}
    """
    if isinstance(node, dict):
        return {key: parse_scalars(value) for key, value in node.items()}
    if isinstance(node, list):
        return [parse_scalars(value) for value in node]
    if node in ("", "~"):
        return None
    try:
        value = json.loads(node) if isinstance(node, str) else node
    except ValueError:
        return node
    return node if isinstance(value, (dict, list, str)) else value


def read(path: Path) -> dict[str, Any]:
    """Return the mapping in a config file, with converted scalars. Variables are not replaced.

    :raises LNSConfigError: for the reasons of :func:`read_text`.
    """
    config: dict[str, Any] = parse_scalars(read_text(path))
    return config


def required_variables(path: Path) -> list[str]:
    """Return the environment variables without a default that a file reads."""
    variables = VARIABLE.findall(path.read_text(encoding="utf-8"))
    return list(dict.fromkeys(name for name, default in variables if not default))


def fill_variables(
    node: Any, source: str, *, variables: Mapping[str, str] | None = None, placeholder: bool = False
) -> Any:
    """Replace the environment variables in text, also in nested lists and mappings.

    :param variables: values that take precedence over the environment's.
    :param placeholder: replace an unset variable by ``/NAME-is-not-set`` instead of raising an error.
    :raises LNSConfigError: if a variable is not set and has no default.
    """
    fill = partial(fill_variables, source=source, variables=variables, placeholder=placeholder)
    if isinstance(node, dict):
        return {key: fill(value) for key, value in node.items()}
    if isinstance(node, list):
        return [fill(value) for value in node]

    def replacement(match: re.Match[str]) -> str:
        name, default = match.groups()
        if (value := (variables or {}).get(name, os.environ.get(name, default))) is not None:
            return str(value)
        if placeholder:
            return f"/{name}-is-not-set"
        raise LNSConfigError(f"{source} reads the environment variable {name}, which is not set. Export {name}.")

    return VARIABLE.sub(replacement, node) if isinstance(node, str) else node


def flatten(config: Any) -> dict[str, Any]:
    """Return a dataclass or nested mapping as ``{"model.d_model": 512, …}``, with JSON values."""
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
