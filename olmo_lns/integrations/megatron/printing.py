"""Print lines to Megatron's console."""

from __future__ import annotations

from olmo_lns.processes import is_first_process

_printed: set[str] = set()


def print_once(line: str, *, about: str = "") -> None:
    """Print a line in the first process, but not if it has been printed before.

    It is printed as by Megatron's ``print_rank_0``, because Megatron's loggers are silent by default.

    :param about: subject of the line. A later line with the same subject is not printed. The default is the line.
    """
    if is_first_process() and (about or line) not in _printed:
        _printed.add(about or line)
        print(f"olmo-lns: {line}", flush=True)
