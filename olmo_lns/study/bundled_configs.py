"""``olmo-lns config``: find, list and copy the files of the config pack."""

from __future__ import annotations

import os
import shutil
from itertools import product
from pathlib import Path
from typing import Sequence

import olmo_lns
from olmo_lns.arguments import Parser, as_path
from olmo_lns.errors import LNSConfigError, did_you_mean


def configs_folder() -> Path:
    """Return the folder of the config pack: ``configs`` in the package, or beside the package in a clone.

    :raises LNSConfigError: if neither folder exists.
    """
    package = Path(olmo_lns.__file__).parent
    for candidate in (package / "configs", package.parent / "configs"):
        if candidate.is_dir():
            return candidate
    raise LNSConfigError(
        f"No config pack was found in {package} or beside it. Install the wheel again, or clone the repository."
    )


def config_names() -> list[str]:
    """Return the paths of all files in the pack, such as ``olmo/60M-lns.yaml``."""
    paths = (path.relative_to(configs_folder()) for path in configs_folder().rglob("*") if path.is_file())
    return sorted(str(path) for path in paths if "__pycache__" not in path.parts)


def find_config(name: str | Path, folder: str) -> Path:
    """Find a file by its path, or by its name in the pack, such as ``paper`` or ``60M-lns``.

    :param folder: folder of the pack, such as ``study``, or ``""`` if the name has its folder, as in ``study/paper``.
    :raises LNSConfigError: if there is no such file.

    >>> find_config("paper", "study").name
    'paper.yaml'
    """
    for path in (Path(name), Path(f"{name}.yaml")):  # local files precede those of the pack
        if path.is_file():
            return path
    pack_name = str(name).removeprefix("configs/")
    for parent, suffix in product(("", folder), ("", ".yaml", ".txt")):
        path = configs_folder() / parent / f"{pack_name}{suffix}"
        if path.is_file():
            return path
    known = [path.removeprefix(f"{folder}/") for path in config_names() if Path(path).is_relative_to(folder)]
    hint = did_you_mean(str(name).removesuffix(".yaml"), [known_name.removesuffix(".yaml") for known_name in known])
    raise LNSConfigError(
        f"The file {name} was not found{hint}. Pass the path of a file, or one of the names in the pack: "
        + ", ".join(known_name.removesuffix(".yaml") for known_name in known)
    )


def copy_config(name: str, out: Path) -> Path:
    """Copy a file of the pack, or a whole folder such as ``study``. Nothing is overwritten.

    :param out: an existing folder, or the new path.
    :raises LNSConfigError: if the pack has no such file, or the target exists already.
    """
    pack = configs_folder().resolve()
    paths = ((pack / f"{name.removeprefix('configs/')}{suffix}").resolve() for suffix in ("", ".yaml", ".txt"))
    source = next((path for path in paths if path.exists() and path.is_relative_to(pack)), None)
    if source is None:
        hint = did_you_mean(name.removeprefix("configs/"), config_names())
        raise LNSConfigError(f"The pack has no file {name}{hint}. `olmo-lns config list` lists its files.")
    target = out / source.name if out.is_dir() else out
    if target.exists():
        raise LNSConfigError(f"{target} already exists, and is not overwritten. Pass another name with -o.")
    target.parent.mkdir(parents=True, exist_ok=True)
    (shutil.copytree if source.is_dir() else shutil.copyfile)(source, target)
    return target


def script_path(name: str) -> str:
    """Return the absolute path of a script, local or in the pack (``configs/olmo_core/train.py``), or ``name``."""
    paths = [path for path in (Path(name), configs_folder().parent / name) if path.is_file()]
    return os.path.abspath(paths[0]) if paths else name


def main(argv: Sequence[str] | None = None) -> int:
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
    print("\n".join(config_names()) if args.command == "list" else copy_config(args.name, args.out))
    return 0
