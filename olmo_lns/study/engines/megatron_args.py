"""Megatron configs: a YAML of Megatron's own flags, expanded on the command line.

Megatron's ``--yaml-cfg`` is another format, and its own example does not parse; so nothing of it
is used. A key is a flag without its dashes; ``true`` is a bare flag, ``false`` and ``null`` leave it out, a list
gives several values, ``${oc.env:NAME}`` and ``${oc.env:NAME,default}`` read the environment.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any, Sequence

import yaml

from olmo_lns.errors import LNSConfigError
from olmo_lns.study.pack import located

__all__ = ["OPTION", "available", "expand", "main", "parse", "read", "to_flags"]

OPTION = "--lns-config"
VARIABLE = re.compile(r"\$\{oc\.env:([A-Za-z_][A-Za-z0-9_]*)(?:,([^}]*))?\}")


def read(path: Path) -> dict[str, Any]:
    """The file's settings under Megatron's argument names (``num_layers``), variables not yet replaced.

    :raises LNSConfigError: no such file, not a flat mapping, or a key written with an underscore.
    """
    path = located(path, "megatron")
    try:
        raw = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise LNSConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(raw, dict):
        raise LNSConfigError(f"{path}: expected a mapping of Megatron flags to values, found {type(raw).__name__}")
    for key, value in raw.items():
        if not isinstance(key, str) or not re.fullmatch(r"[a-z][a-z0-9-]*", key):
            raise LNSConfigError(f"{path}: key {key!r}: expected a Megatron flag without dashes, such as num-layers")
        if isinstance(value, dict):
            raise LNSConfigError(f"{path}: {key}: expected a value, found a mapping: the file must be flat")
        if isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
            raise LNSConfigError(f"{path}: {key}: expected a list of values, found a list or mapping inside it")
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
        flags.append("--" + key.replace("_", "-"))
        if value is True:
            continue
        for item in value if isinstance(value, list) else [value]:
            flags += _words(str(item), key, placeholder)
    return flags


def _words(text: str, key: str, placeholder: bool) -> list[str]:
    def replace(match: re.Match[str]) -> str:
        name, default = match[1], match[2]
        if name in os.environ:
            return os.environ[name]
        if default is not None:
            return str(default)
        if placeholder:
            return f"/{name}-is-not-set"
        flag = "--" + key.replace("_", "-")
        raise LNSConfigError(f"{key}: environment variable {name} is not set: export {name}=…, or give {flag} yourself")

    # A value that is one variable may hold several words, as --data-path does.
    return shlex.split(VARIABLE.sub(replace, text)) if VARIABLE.fullmatch(text) else [VARIABLE.sub(replace, text)]


def expand(argv: Sequence[str]) -> list[str]:
    """Replace ``--lns-config FILE`` by the file's flags; a flag that is given explicitly wins over the file.

    >>> expand(["--lns-config", "60M-lns.yaml", "--micro-batch-size", "4"])   # doctest: +SKIP

    :raises LNSConfigError: no file after the option, the option twice, or what :func:`read` and :func:`to_flags` raise.
    """
    explicit: list[str] = []
    files: list[str] = []
    words = iter(argv)
    for word in words:
        if word == OPTION:
            files.append(next(words, ""))
        elif word.startswith(OPTION + "="):
            files.append(word.split("=", 1)[1])
        else:
            explicit.append(word)
    if not files:
        return explicit
    if len(files) > 1 or not files[0] or files[0].startswith("--"):
        raise LNSConfigError(f"{OPTION}: expected one file, found {files if len(files) > 1 else files[0] or 'nothing'}")
    given = {word[2:].split("=", 1)[0].replace("-", "_") for word in explicit if word.startswith("--")}
    settings = {key: value for key, value in read(Path(files[0])).items() if key not in given}
    return to_flags(settings) + explicit


def available() -> bool:
    """Whether there is a ``megatron.training`` for :func:`parse`: ``MEGATRON_LM_SRC``, or one that is installed."""
    if os.environ.get("MEGATRON_LM_SRC"):
        return True
    return (
        importlib.util.find_spec("megatron") is not None and importlib.util.find_spec("megatron.training") is not None
    )


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
        namespace = arguments.parse_args()
        if validate:
            namespace = arguments.validate_args(namespace)
    except SystemExit as error:
        raise LNSConfigError("Megatron's parser refuses the flags; its message is above") from error
    except (AssertionError, ValueError) as error:
        raise LNSConfigError(f"Megatron refuses the flags: {error}") from error
    finally:
        sys.argv = before
    found: argparse.Namespace = namespace
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Print what a config expands to."""
    parser = argparse.ArgumentParser(
        prog="olmo-lns megatron-args", description="Print the Megatron flags that a config expands to."
    )
    parser.add_argument("config", help="a file, or one of the pack by its name: 60M-lns")
    parser.add_argument("--one-per-line", action="store_true")
    args, explicit = parser.parse_known_args(argv)
    flags = expand([OPTION, args.config, *explicit])
    if args.one_per_line:
        print("\n".join(re.sub(r" --", "\n--", shlex.join(flags)).splitlines()))
    else:
        print(shlex.join(flags))
    return 0
