"""The config pack, YAML with scalars as text, environment variables in configs, and locks."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import re
import shutil
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any, Hashable, Iterator, Mapping, Sequence

import yaml

import olmo_lns
from olmo_lns.arguments import Parser, as_path
from olmo_lns.errors import LNSConfigError, LNSError

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
                message = f"the key {key.value!r} is given twice"
                raise yaml.constructor.ConstructorError(None, None, message, key.start_mark)
            keys.add(identity)
        return super().construct_mapping(node, deep)


def read_text(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file, with every scalar as text. An empty value is ``""``.

    :raises LNSConfigError: no such file, not YAML, a repeated key, or not a mapping.
    """
    if not path.is_file():
        raise LNSConfigError(f"{path}: no such file")
    try:
        content = yaml.load(path.read_text(encoding="utf-8-sig"), _TextLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise LNSConfigError(f"{path}: not YAML: {' '.join(str(error).split())[:300]}") from error
    if not isinstance(content, dict):
        raise LNSConfigError(f"{path}: expected a mapping of keys to values, found a {type(content).__name__}")
    return content


def parse_scalars(node: Any) -> Any:
    """Convert text, also in lists and mappings, to JSON's numbers, booleans and null; ``no`` and ``010`` stay text.

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

    :raises LNSConfigError: errors of :func:`read_text`.
    """
    config: dict[str, Any] = parse_scalars(read_text(path))
    return config


def required_variables(path: Path) -> list[str]:
    """Return the environment variables without a default that a file reads."""
    variables = VARIABLE.findall(path.read_text(encoding="utf-8"))
    return list(dict.fromkeys(name for name, default in variables if not default))


def fill_variables(node: Any, source: str, *, placeholder: bool = False) -> Any:
    """Replace the environment variables in text, also in nested lists and mappings.

    :param placeholder: replace an unset variable by ``/NAME-is-not-set`` instead of raising an error.
    :raises LNSConfigError: an unset variable without a default.
    """
    if isinstance(node, dict):
        return {key: fill_variables(value, source, placeholder=placeholder) for key, value in node.items()}
    if isinstance(node, list):
        return [fill_variables(value, source, placeholder=placeholder) for value in node]

    def replacement(match: re.Match[str]) -> str:
        name, default = match.groups()
        if (value := os.environ.get(name, default)) is not None:
            return str(value)
        if placeholder:
            return f"/{name}-is-not-set"
        raise LNSConfigError(f"{source} reads {name}, which is not set: export {name}=…")

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


def pack_folder() -> Path:
    """Return the folder of the config pack: ``configs`` in the package, or beside the package in a clone.

    :raises LNSConfigError: no such folder.
    """
    package = Path(olmo_lns.__file__).parent
    for candidate in (package / "configs", package.parent / "configs"):
        if candidate.is_dir():
            return candidate
    raise LNSConfigError(f"no config pack in {package} or beside it: install the wheel again, or clone the repository")


def pack_names() -> list[str]:
    """Return the paths of all files in the pack, such as ``olmo/60M-lns.yaml``."""
    paths = (path.relative_to(pack_folder()) for path in pack_folder().rglob("*") if path.is_file())
    return sorted(str(path) for path in paths if "__pycache__" not in path.parts)


def locate(name: str | Path, kind: str) -> Path:
    """Find a file by its path, or by its name in the pack, such as ``paper`` or ``60M-lns``.

    :param kind: folder of the pack, such as ``study``; ``""`` for names with a folder, such as ``study/paper``.
    :raises LNSConfigError: no such file.

    >>> locate("paper", "study").name
    'paper.yaml'
    """
    for path in (Path(name), Path(f"{name}.yaml")):  # local files precede those of the pack
        if path.is_file():
            return path
    pack_name = str(name).removeprefix("configs/")
    for folder, suffix in product(("", kind), ("", ".yaml", ".txt")):
        path = pack_folder() / folder / f"{pack_name}{suffix}"
        if path.is_file():
            return path
    names = ", ".join(path.removeprefix(f"{kind}/") for path in pack_names() if Path(path).is_relative_to(kind))
    raise LNSConfigError(f"{name}: no such file, and not in the pack, which has {names}")


def copy_from_pack(name: str, out: Path) -> Path:
    """Copy a file of the pack, or a whole folder such as ``study``. Nothing is overwritten.

    :param out: an existing folder, or the new path.
    :raises LNSConfigError: no such file in the pack, or a target that exists.
    """
    pack = pack_folder().resolve()
    paths = ((pack / f"{name.removeprefix('configs/')}{suffix}").resolve() for suffix in ("", ".yaml", ".txt"))
    source = next((path for path in paths if path.exists() and path.is_relative_to(pack)), None)
    if source is None:
        raise LNSConfigError(f"{name}: not in the pack; `olmo-lns config list` shows its files")
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
    copying.add_argument(
        "-o", "--out", type=as_path, default=Path("."), help="folder or file name (default: this folder)"
    )
    args = parser.parse_args(argv)
    print("\n".join(pack_names()) if args.command == "list" else copy_from_pack(args.name, args.out))
    return 0


def attempts(folder: Path) -> list[Path]:
    """Return the console logs in a run folder by name. Numbers are sorted by value: ``-99`` before ``-100``."""
    parts = {path: re.split(r"(\d+)", path.name) for path in folder.glob("*.log")}  # every second part is a number
    return sorted(parts, key=lambda path: [int(part) if part.isdecimal() else part for part in parts[path]])


def next_attempt(folder: Path) -> Path:
    """Return the path of the next log, after the highest number: the log of another attempt is never overwritten."""
    matches = [re.fullmatch(r"attempt-(\d+)\.log", path.name) for path in folder.glob("*.log")]
    return folder / f"attempt-{max((int(match[1]) for match in matches if match), default=0) + 1:02d}.log"


def script_path(name: str) -> str:
    """Return the absolute path of a script, local or in the pack (``configs/olmo_core/train.py``), or ``name``."""
    paths = [path for path in (Path(name), pack_folder().parent / name) if path.is_file()]
    return os.path.abspath(paths[0]) if paths else name


@contextmanager
def exclusive_lock(lock: Path, problem: str) -> Iterator[int]:
    """Hold a lock file until the block and all processes with its descriptor have ended.

    :returns: file descriptor of the lock, for child processes.
    :raises LNSError: another process holds the lock; the message is ``problem``.
    """
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LNSError(f"{problem} (lock: {lock})") from None
        yield file.fileno()
