#!/usr/bin/env python
"""Print the fingerprints of upstream functions, read from source trees without importing them.

    python scripts/fingerprints.py olmo_lns.integrations.megatron.upstream 0.16.1=../Megatron-LM ...

For each target of the module's ``TARGETS`` one line per distinct source, with the versions that
have it, ready to be pasted into the table. Missing symbols are listed too.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import sys
import textwrap
from pathlib import Path


def source(tree: Path, path: str) -> str | None:
    """The source of ``package.module:Class.method`` below ``tree``, or None where it is not defined."""
    module, _, qualname = path.partition(":")
    file = tree / Path(*module.split(".")).with_suffix(".py")
    if not file.is_file():
        return None
    text = file.read_text(encoding="utf-8")
    body: list[ast.stmt] = ast.parse(text).body
    node: ast.AST | None = None
    for name in qualname.split("."):
        node = next((n for n in body if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and n.name == name), None)
        if node is None:
            return None
        body = node.body
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    return "\n".join(text.splitlines()[first - 1 : node.end_lineno])


def fingerprint(text: str) -> str:
    """As ``olmo_lns.integrations.patching.fingerprint`` makes it of the imported function."""
    lines = (line.rstrip() for line in textwrap.dedent(text).splitlines())
    return hashlib.sha256("\n".join(line for line in lines if line).encode()).hexdigest()[:16]


def table(targets: dict[str, str], trees: dict[str, Path]) -> dict[str, dict[str, list[str]]]:
    """target name -> fingerprint (or "missing") -> versions."""
    rows: dict[str, dict[str, list[str]]] = {}
    for name, path in targets.items():
        for version, tree in trees.items():
            text = source(tree, path)
            rows.setdefault(name, {}).setdefault("missing" if text is None else fingerprint(text), []).append(version)
    return rows


def main(argv: list[str]) -> int:
    if len(argv) < 2 or any("=" not in word for word in argv[1:]):
        print(__doc__, file=sys.stderr)
        return 2
    targets = {name: target.path for name, target in importlib.import_module(argv[0]).TARGETS.items()}
    trees = {version: Path(tree) for version, _, tree in (word.partition("=") for word in argv[1:])}
    for name, row in table(targets, trees).items():
        print(f"{name}: {targets[name]}")
        for found, versions in row.items():
            print(f'    "{found}": "{", ".join(versions)}",')
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
