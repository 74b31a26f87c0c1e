"""Lines for Megatron's console."""

from __future__ import annotations

from olmo_lns.processes import is_first_process

_printed: set[str] = set()


def print_once(line: str, *, about: str = "") -> None:
    """Print one line, once, as Megatron's ``print_rank_0`` does (its loggers are silent by default).

    :param about: what the line is about; a later line about the same is not printed. The default is the line itself.
    """
    if is_first_process() and (about or line) not in _printed:
        _printed.add(about or line)
        print(f"olmo-lns: {line}", flush=True)
