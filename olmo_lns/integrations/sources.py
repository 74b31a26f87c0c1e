"""Upstream functions as text: their fingerprint, and reading them from a source tree without importing it."""

from __future__ import annotations

import ast
import hashlib
import textwrap
from pathlib import Path
from typing import Mapping

__all__ = ["digest", "read", "unverified"]


def digest(source: str) -> str:
    """16 hex digits that identify a function's source (SHA-256; indentation and empty lines ignored)."""
    lines = (line.rstrip() for line in textwrap.dedent(source).splitlines())
    return hashlib.sha256("\n".join(line for line in lines if line).encode()).hexdigest()[:16]


def read(tree: Path, path: str) -> str | None:
    """The source of ``package.module:Class.method`` below ``tree``, or None where it is not defined."""
    module, _, qualname = path.partition(":")
    place = tree.joinpath(*module.split("."))
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    if not file.is_file():
        return None
    text = file.read_text(encoding="utf-8")
    body: list[ast.stmt] = ast.parse(text).body
    node: ast.FunctionDef | ast.ClassDef | None = None
    for name in qualname.split("."):
        node = next((n for n in body if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and n.name == name), None)
        if node is None:
            return None
        body = node.body
    assert node is not None  # a path names at least one symbol
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    return "\n".join(text.splitlines()[first - 1 : node.end_lineno])


def unverified(tree: Path, targets: Mapping[str, Mapping[str, str]], *, all_needed: bool) -> list[str]:
    """The symbols below ``tree`` whose source is none of those verified.

    :param targets: path of a symbol -> fingerprint -> versions that have it.
    :param all_needed: a symbol that is not there counts too (else it belongs to another version).
    """
    sources = {path: read(tree, path) for path in targets}
    return [
        path
        for path, source in sources.items()
        if (all_needed if source is None else digest(source) not in targets[path])
    ]
