"""Megatron configs: a YAML of Megatron's own flags, expanded on the command line.

Megatron's ``--yaml-cfg`` is another format, and its own example does not parse; so nothing of it is used. A key is a
flag without its dashes; ``true`` is a bare flag, ``false`` and ``null`` leave it out, a list gives several values.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn, Sequence

from olmo_lns.errors import LNSConfigError
from olmo_lns.study import files
from olmo_lns.study.pack import located

__all__ = ["OPTION", "available", "expand", "main", "parse", "read", "to_flags"]

OPTION = "--lns-config"


def read(path: Path) -> dict[str, Any]:
    """The file's settings under Megatron's argument names (``num_layers``), variables not yet replaced.

    :raises LNSConfigError: no such file, not a flat mapping, or a key written with an underscore.
    """
    raw = files.read(path := located(path, "megatron"))
    for key, value in raw.items():
        if not isinstance(key, str) or not re.fullmatch(r"[a-z][a-z0-9-]*", key):
            raise LNSConfigError(f"{path}: key {key!r}: expected a Megatron flag without dashes, such as num-layers")
        if any(isinstance(item, (dict, list)) for item in (value if isinstance(value, list) else [value])):
            raise LNSConfigError(f"{path}: {key}: expected a value or a list of values: the file must be flat")
    return {key.replace("-", "_"): value for key, value in raw.items()}


def to_flags(settings: dict[str, Any], *, placeholder: bool = False) -> list[str]:
    """Flags and values for an argument list.

    :param placeholder: a variable that is not set becomes ``/NAME-is-not-set`` instead of an error.
    :raises LNSConfigError: a variable that is not set.
    """
    flags: list[str] = []
    for key, value in settings.items():
        if value is None or value is False:
            continue
        flags.append(flag := "--" + key.replace("_", "-"))
        for text in map(str, [] if value is True else value if isinstance(value, list) else [value]):
            found = files.filled(text, flag, placeholder=placeholder, otherwise=f", or give {flag} yourself")
            # A value that is one variable may hold several words, as --data-path does.
            flags += shlex.split(found) if files.VARIABLE.fullmatch(text) else [found]
    return flags


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise LNSConfigError(f"{message}: expected one file after {OPTION}")


def expand(argv: Sequence[str]) -> list[str]:
    """Replace ``--lns-config FILE`` by the file's flags; a flag that is given explicitly wins over the file.

    >>> expand(["--lns-config", "60M-lns.yaml", "--micro-batch-size", "4"])   # doctest: +SKIP

    :raises LNSConfigError: no file after the option, the option twice, or what :func:`read` and :func:`to_flags` raise.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument(OPTION, action="append", default=[], dest="files")
    own, explicit = parser.parse_known_args(argv)
    if not own.files:
        return explicit
    if len(own.files) > 1 or not own.files[0]:
        raise LNSConfigError(f"{OPTION} {own.files}: expected one file after {OPTION}")
    given = {word[2:].split("=", 1)[0].replace("-", "_") for word in explicit if word.startswith("--")}
    return to_flags({key: value for key, value in read(Path(own.files[0])).items() if key not in given}) + explicit


def available() -> bool:
    """Whether there is a ``megatron.training`` for :func:`parse`: ``MEGATRON_LM_SRC``, or one that is installed."""
    if os.environ.get("MEGATRON_LM_SRC"):
        return True
    return find_spec("megatron") is not None and find_spec("megatron.training") is not None


def parse(flags: Sequence[str], *, validate: bool = True) -> argparse.Namespace:
    """Megatron's own parser (and, with ``validate``, its ``validate_args``) on flags, the plugin's among them.

    ``megatron.training`` must be importable, or ``MEGATRON_LM_SRC`` name a Megatron-LM checkout.

    :raises LNSConfigError: there is none, or Megatron refuses the flags.
    """
    source = os.environ.get("MEGATRON_LM_SRC")
    if source and source not in sys.path:
        sys.path.insert(0, source)
    from olmo_lns.integrations.megatron import register

    register()
    try:
        from megatron.training import arguments
    except ImportError as error:
        raise LNSConfigError(
            f"megatron.training cannot be imported ({error}): set MEGATRON_LM_SRC to a Megatron-LM checkout"
        ) from error
    before = sys.argv
    sys.argv = ["pretrain_gpt.py", *flags]
    try:
        found: argparse.Namespace = arguments.parse_args()
        found = arguments.validate_args(found) if validate else found
    except SystemExit as error:
        raise LNSConfigError("Megatron's parser refuses the flags; its message is above") from error
    except (AssertionError, ValueError) as error:
        raise LNSConfigError(f"Megatron refuses the flags: {error}") from error
    finally:
        sys.argv = before
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Print what a config expands to."""
    parser = argparse.ArgumentParser(
        prog="olmo-lns megatron-args", description="Print the Megatron flags that a config expands to."
    )
    parser.add_argument("config", help="a file, or one of the pack by its name: 60M-lns")
    parser.add_argument("--one-per-line", action="store_true")
    args, explicit = parser.parse_known_args(argv)
    text = shlex.join(expand([OPTION, args.config, *explicit]))
    print(text.replace(" --", "\n--") if args.one_per_line else text)
    return 0
