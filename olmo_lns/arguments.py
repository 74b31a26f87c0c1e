"""Numbers on a command line, and the error for unknown arguments."""

from __future__ import annotations

import argparse
import math
import re
from typing import Any, Callable, Iterator

from olmo_lns.errors import did_you_mean

#: dtype on the command line -> torch's name; :data:`olmo_lns.norm.dtypes.DTYPES` has the dtypes themselves.
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def at_least(smallest: int, below: float = math.inf) -> Callable[[str], int]:
    """Return an argparse type: a whole number from ``smallest`` up to, not including, ``below``.

    The type raises ``argparse.ArgumentTypeError``.

    Example: ``parser.add_argument("--steps", type=at_least(1))``.
    """
    expected = f"a whole number >= {smallest}" + ("" if below == math.inf else f" and < {below}")

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = smallest - 1
        if not smallest <= value < below:
            raise argparse.ArgumentTypeError(f"expected {expected}, found {text!r}")
        return value

    return number


#: A whole number that torch's generators accept as a seed.
seed = at_least(0, below=1 << 63)


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    """The options of a parser and of its sub-commands."""
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for sub in action.choices.values():
                yield from _options(sub)


def short_error(parser: argparse.ArgumentParser, message: str) -> Any:
    """Exit with two lines: the mistake with the nearest known name, and the command that lists all names.

    argparse's own error prints the whole usage.
    """
    hint = ""
    if wrong := re.match(r"unrecognized arguments: (?:.*? )??(--[^\s=]+)", message):
        hint = did_you_mean(wrong[1], _options(parser))
    elif wrong := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
        hint = did_you_mean(wrong[1], re.findall(r"[\w.-]+", wrong[2]))
    parser.exit(2, f"{parser.prog}: {message}{hint}\n`{parser.prog} --help` lists the options\n")
