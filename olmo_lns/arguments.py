"""The argument parser of the package's commands, and argparse types."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Callable, NoReturn

#: dtype on the command line -> torch's name; :data:`olmo_lns.norm.dtypes.DTYPES` maps it to the dtype itself.
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def at_least(smallest: int) -> Callable[[str], int]:
    """Return an argparse type for whole numbers of at least ``smallest``.

    The type raises ``argparse.ArgumentTypeError``.

    Example: ``parser.add_argument("--steps", type=at_least(1))``.
    """

    def whole_number(text: str) -> int:
        if not text.isdecimal() or int(text) < smallest:
            raise argparse.ArgumentTypeError(f"{text!r} is not accepted. Pass a whole number of at least {smallest}")
        return int(text)

    return whole_number


def as_path(text: str) -> Path:
    """Return a path; an argparse type. :raises argparse.ArgumentTypeError: an empty path, as of an unset variable."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty. Pass a path, or set the shell variable that has it")
    return Path(text)


class Parser(argparse.ArgumentParser):
    """A parser for a command and its sub-commands, with two-line errors instead of argparse's whole usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n`{self.prog} --help` lists the options\n")
