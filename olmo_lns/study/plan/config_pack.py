"""``olmo-lns config``: the config pack that comes with the package, and its check.

The pack lies in ``configs/`` of a clone, and inside the installed package.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Sequence

from olmo_lns.errors import LNSConfigError, did_you_mean
from olmo_lns.study.pack import folder, names

__all__ = ["folder", "main", "names"]


def copy(name: str, out: Path) -> Path:
    """Copy one file, or a folder such as ``study`` with all its files, to ``out``; nothing is overwritten.

    :param out: a folder that exists, or the new name.
    :raises LNSConfigError: no such file in the pack, or there is one at the target already.
    """
    source = folder() / name
    if not source.exists() and not name.endswith(".yaml"):
        source = folder() / f"{name}.yaml"
    if not source.exists() or not source.resolve().is_relative_to(folder().resolve()):
        known = names() + sorted({str(Path(path).parent) for path in names()})
        raise LNSConfigError(f"the pack has no {name!r}{did_you_mean(name, known)}: `olmo-lns config list` shows it")
    target = out / source.name if out.is_dir() else out
    if target.exists():
        raise LNSConfigError(f"{target} exists: give another name with -o")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target)
        else:
            shutil.copyfile(source, target)
    except OSError as error:
        raise LNSConfigError(f"{target} cannot be written: {error.strerror}") from None
    return target


def _lacking(target: Path, name: str) -> dict[str, Path]:
    """What the copied files name, ``config: ../olmo/{size}-{arm}.yaml``, and is not there: in the pack -> its place."""
    files = sorted(path for path in target.rglob("*") if path.is_file()) if target.is_dir() else [target]
    here = Path(name) if target.is_dir() else Path(name).parent
    found = {}
    for path in files:
        for named in re.findall(r"^ *config: *([^\s{]+)", path.read_text(encoding="utf-8"), re.MULTILINE):
            if not (place := path.parent / named).exists():
                found[os.path.normpath(here / named)] = place
    return {name: place for name, place in found.items() if not found.keys() & set(map(str, Path(name).parents))}


def main(argv: Sequence[str]) -> int:
    """``list``, ``copy NAME``, or ``check PATH``. :returns: 1 when a checked file has a problem."""
    if argv and argv[0] == "check":
        from olmo_lns.study.plan import config_check

        return config_check.main(argv)
    parser = argparse.ArgumentParser(
        prog="olmo-lns config",
        description="List and copy the configs that come with the package, check those of anybody.",
        epilog="example: olmo-lns config copy olmo/60M-lns.yaml && olmo-lns config check 60M-lns.yaml",
    )
    commands = parser.add_subparsers(required=True, dest="command")
    commands.add_parser("list", help="the files of the pack")
    copying = commands.add_parser("copy", help="copy a file, or a folder such as 'study', to here")
    copying.add_argument("name")
    copying.add_argument("-o", "--out", type=Path, default=Path("."), help="folder or file name (default: here)")
    commands.add_parser("check", help="load, count, estimate; exit code 1 when something is wrong")
    args = parser.parse_args(argv)
    if args.command == "list":
        print("\n".join(names()))
    else:
        target = copy(args.name, args.out)
        print(target)
        for lacking, place in _lacking(target, args.name).items():
            command = f"olmo-lns config copy {lacking} -o {os.path.normpath(place)}"
            print(f"note: what was copied names {lacking} of the pack: {command}", file=sys.stderr)
    return 0
