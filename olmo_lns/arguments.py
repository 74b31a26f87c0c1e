"""The parser of the package's commands, and numbers on a command line."""

from __future__ import annotations

import argparse
from typing import Callable, NoReturn

#: dtype on the command line -> torch's name; :data:`olmo_lns.norm.dtypes.DTYPES` has the dtypes themselves.
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def at_least(smallest: int) -> Callable[[str], int]:
    """Return an argparse type: a whole number from ``smallest`` up.

    The type raises ``argparse.ArgumentTypeError``.

    Example: ``parser.add_argument("--steps", type=at_least(1))``.
    """

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < smallest:
            raise argparse.ArgumentTypeError(f"expected a whole number >= {smallest}, found {text!r}")
        return int(text)

    return number


class Parser(argparse.ArgumentParser):
    """A parser of a command, and of its sub-commands. Its error is two lines; argparse's own has the whole usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n`{self.prog} --help` lists the options\n")
