"""The mark in a trainer's state (:mod:`olmo_lns.integrations.olmo.state`), put in or taken out of a saved one.

A trainer's state holds arbitrary objects, which an export neither loads nor trusts: the pickle is edited as bytes.
"""

from __future__ import annotations

import pickletools
import struct
from pathlib import Path

from olmo_lns.checkpoints.archive import rewrite_pickle
from olmo_lns.errors import LNSConfigError
from olmo_lns.integrations.olmo.state import KEY, needs_olmo_lns
from olmo_lns.record import Record

__all__ = ["mark"]

_FUNCTION = f"{needs_olmo_lns.__module__} {needs_olmo_lns.__qualname__}"
#: How a mark is pickled, apart from what the pickler memorizes on the way.
_CODES = ["BINUNICODE", "GLOBAL", "BINUNICODE", "TUPLE1", "REDUCE"]
_PUTS = ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE")


def mark(path: Path, record: Record) -> None:
    """Make the trainer's state in ``path`` carry the mark when ``record`` needs this package, and no mark otherwise.

    :raises LNSConfigError: not a dict in a file of ``torch.save``, or a mark that is not as it was saved.
    """

    def change(pickled: bytes) -> bytes:
        plain = _without(pickled, path)
        return _with(plain, str(record)) if record.active else plain

    rewrite_pickle(path, change)


def _with(pickled: bytes, record: str) -> bytes:
    """Set one more item of the dict that lies on the stack when the pickle ends."""
    function = f"c{_FUNCTION}\n".replace(" ", "\n").encode()
    return pickled[:-1] + b"(" + _text(KEY) + function + _text(record) + b"\x85Ru."


def _text(value: str) -> bytes:
    content = value.encode()
    return b"X" + struct.pack("<I", len(content)) + content


def _without(pickled: bytes, path: Path) -> bytes:
    try:
        found = [(code.name, value, at) for code, value, at in pickletools.genops(pickled) if at is not None]
    except ValueError as error:
        raise LNSConfigError(f"{path}: its pickle cannot be read: {error}") from None
    first = next((index for index, (_, value, _) in enumerate(found) if value == KEY), None)
    if first is None:
        return pickled
    last = first
    part: list[tuple[str, object]] = []
    memorized: list[tuple[str, object]] = []
    while last < len(found) and (len(part) < len(_CODES) or found[last][0] in _PUTS):
        name, value, _ = found[last]
        (memorized if name in _PUTS else part).append((name, value))
        last += 1
    used = {value for name, value, _ in found if name in ("GET", "BINGET", "LONG_BINGET")}
    expected = [name for name, _ in part] == _CODES and part[1][1] == _FUNCTION
    if not expected or used & {value for _, value in memorized}:
        raise LNSConfigError(f"{path}: its mark of olmo-lns is not as it was saved, and cannot be taken out")
    if found[last][0] == "SETITEM":  # it was the only item
        last += 1
    return pickled[: found[first][2]] + pickled[found[last][2] :]
