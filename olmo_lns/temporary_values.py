"""Replace an attribute, or the items of a mapping, until a block of code ends."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Iterator, Mapping, MutableMapping


@contextmanager
def replaced_attribute(target: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of an object or a module for a ``with`` block. Restore or remove it at the end.

    Example: ``with replaced_attribute(sys, "argv", ["script.py"]): …``.
    """
    is_own, previous = name in vars(target), vars(target).get(name)
    setattr(target, name, value)
    try:
        yield
    finally:
        setattr(target, name, previous) if is_own else delattr(target, name)


@contextmanager
def replaced_items(target: MutableMapping[str, Any], items: Mapping[str, Any]) -> Iterator[None]:
    """Set items of a mapping, such as ``os.environ``, for a ``with`` block. Restore or remove them at the end.

    Example: ``with replaced_items(os.environ, {"RANK": "0"}): …``.
    """
    previous = {name: target[name] for name in items if name in target}
    target.update(items)
    try:
        yield
    finally:
        for name in items:
            target.pop(name, None)
        target.update(previous)
