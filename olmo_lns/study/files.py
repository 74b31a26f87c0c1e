"""The config pack, YAML with values as text, and locks."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import re
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Hashable, Iterator, Mapping, Sequence

import yaml

import olmo_lns
from olmo_lns.arguments import Parser
from olmo_lns.errors import LNSConfigError, LNSError

#: ``${oc.env:NAME}`` or ``${oc.env:NAME,default}``, as OmegaConf reads them.
VARIABLE = re.compile(r"\$\{oc\.env:([A-Za-z_][A-Za-z0-9_]*)(?:,([^}]*))?\}")


class _Text(yaml.SafeLoader):
    """YAML in which every scalar is text, quoted or not, and a repeated key is an error."""

    yaml_implicit_resolvers = {"<": [("tag:yaml.org,2002:merge", re.compile("^(?:<<)$"))]}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key, _ in node.value:
            name = (key.tag, key.value) if isinstance(key, yaml.ScalarNode) else id(key)
            if name in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} is given twice", key.start_mark
                )
            seen.add(name)
        return super().construct_mapping(node, deep)


def read_text(path: Path) -> dict[str, Any]:
    """Return the mapping in a file, its scalars as text; an empty value is ``""``.

    :raises LNSConfigError: no such file, not YAML, a repeated key, or not a mapping.
    """
    if not path.is_file():
        raise LNSConfigError(f"{path}: no such file")
    try:
        found = yaml.load(path.read_text(encoding="utf-8-sig"), _Text)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise LNSConfigError(f"{path}: not YAML: {' '.join(str(error).split())[:300]}") from error
    if not isinstance(found, dict):
        raise LNSConfigError(f"{path}: expected a mapping of keys to values, found a {type(found).__name__}")
    return found


def parse_scalars(node: Any) -> Any:
    """Convert text, or nested text, to JSON's ``true``, ``null`` and numbers; ``no`` and ``010`` stay text.

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
    """Return the mapping in a config file without replacing its variables.

    :raises LNSConfigError: errors of :func:`read_text`.
    """
    found: dict[str, Any] = parse_scalars(read_text(path))
    return found


def required_variables(path: Path) -> list[str]:
    """Return the variables without a default that a file reads."""
    found = VARIABLE.findall(path.read_text(encoding="utf-8"))
    return list(dict.fromkeys(name for name, default in found if not default))


def fill_variables(node: Any, where: str, *, placeholder: bool = False) -> Any:
    """Replace the variables in text or nested text.

    :param placeholder: replace an unset variable by ``/NAME-is-not-set`` instead of an error.
    :raises LNSConfigError: an unset variable without a default.
    """
    if isinstance(node, dict):
        return {key: fill_variables(value, where, placeholder=placeholder) for key, value in node.items()}
    if isinstance(node, list):
        return [fill_variables(value, where, placeholder=placeholder) for value in node]

    def value(match: re.Match[str]) -> str:
        name, default = match[1], match[2]
        if (found := os.environ.get(name, default)) is not None:
            return str(found)
        if placeholder:
            return f"/{name}-is-not-set"
        raise LNSConfigError(f"{where} reads {name}, which is not set: export {name}=…")

    return VARIABLE.sub(value, node) if isinstance(node, str) else node


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


def pack_folder() -> Path:
    """Return the folder of the pack: in the package, or beside it in a clone.

    :raises LNSConfigError: no pack, as in an installation without package data.
    """
    package = Path(olmo_lns.__file__).parent
    for candidate in (package / "configs", package.parent / "configs"):
        if candidate.is_dir():
            return candidate
    raise LNSConfigError(f"no config pack in {package} or beside it: install the wheel again, or clone the repository")


def pack_names() -> list[str]:
    """Return the files of the pack, such as ``olmo/60M-lns.yaml``."""
    found = (path.relative_to(pack_folder()) for path in pack_folder().rglob("*") if path.is_file())
    return sorted(str(path) for path in found if "__pycache__" not in path.parts)


def locate(name: str | Path, kind: str) -> Path:
    """Return a file by its path, or by its name in the pack: ``paper``, ``60M-lns``; an existing path comes first.

    :param kind: the folder of the pack, such as ``study``; ``""`` for names such as ``study/paper``.
    :raises LNSConfigError: no such file.

    >>> locate("paper", "study").name
    'paper.yaml'
    """
    for path in (Path(name), Path(f"{name}.yaml")):  # a local copy comes before the pack's file
        if path.is_file():
            return path
    wanted = str(name).removeprefix("configs/")
    packed = (pack_folder() / folder / f"{wanted}{end}" for folder in ("", kind) for end in ("", ".yaml", ".txt"))
    if found := next((path for path in packed if path.is_file()), None):
        return found
    known = ", ".join(path.removeprefix(f"{kind}/") for path in pack_names() if Path(path).is_relative_to(kind))
    raise LNSConfigError(f"{name}: no such file here or in the pack, which has {known}")


def copy_from_pack(name: str, out: Path) -> Path:
    """Copy one file, or a folder such as ``study`` with all its files, to ``out``; nothing is overwritten.

    :param out: a folder that exists, or the new name.
    :raises LNSConfigError: no such file in the pack, or an existing target.
    """
    source = pack_folder() / name
    if not source.is_dir():
        source = locate(name, "")
    target = out / source.name if out.is_dir() else out
    if target.exists():
        raise LNSConfigError(f"{target} exists: give another name with -o")
    target.parent.mkdir(parents=True, exist_ok=True)
    (shutil.copytree if source.is_dir() else shutil.copyfile)(source, target)
    return target


def config(argv: Sequence[str] | None = None) -> int:
    """Run ``olmo-lns config list`` or ``copy NAME``."""
    parser = Parser(prog="olmo-lns config", description="List and copy the configs of the package.")
    commands = parser.add_subparsers(required=True, dest="command")
    commands.add_parser("list", help="the files of the pack")
    copying = commands.add_parser("copy", help="copy a file, or a folder such as 'study'")
    copying.add_argument("name")
    copying.add_argument("-o", "--out", type=Path, default=Path("."), help="folder or file name (default: here)")
    args = parser.parse_args(argv)
    print("\n".join(pack_names()) if args.command == "list" else copy_from_pack(args.name, args.out))
    return 0


def script_path(word: str) -> str:
    """Return a script's path here or in the pack (``configs/olmo_core/train.py``); other words unchanged."""
    here = [path for path in (Path(word), pack_folder().parent / word) if path.is_file()]
    return os.path.abspath(here[0]) if here else word


@contextmanager
def exclusive_lock(lock: Path, problem: str) -> Iterator[int]:
    """Hold a lock file until the block and every process that inherited its descriptor have ended.

    :raises LNSError: another process holds the lock; the message is ``problem``.
    """
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LNSError(f"{problem} (lock: {lock})") from None
        yield file.fileno()
