#!/usr/bin/env python
"""Print the fingerprints of upstream functions, read from source trees without importing them.

    python scripts/fingerprints.py olmo_lns.integrations.megatron.upstream 0.16.1=../Megatron-LM ...

For each target of the module's ``TARGETS`` (a tuple of ``Target``) one line per distinct source, with
the versions that have it, ready to be pasted into the table. Missing symbols are listed too.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Iterable, Mapping

from olmo_lns.integrations import patching


def table(paths: Iterable[str], trees: Mapping[str, Path]) -> dict[str, dict[str, list[str]]]:
    """path of a symbol -> fingerprint (or "missing") -> versions."""
    rows: dict[str, dict[str, list[str]]] = {}
    for path in paths:
        for version, tree in trees.items():
            text = patching.source_below(tree, path)
            found = "missing" if text is None else patching.digest(text)
            rows.setdefault(path, {}).setdefault(found, []).append(version)
    return rows


def main(argv: list[str]) -> int:
    only_unknown = "--unknown" in argv
    argv = [word for word in argv if word != "--unknown"]
    if len(argv) < 2 or any("=" not in word for word in argv[1:]):
        print(__doc__, file=sys.stderr)
        return 2
    targets = importlib.import_module(argv[0]).TARGETS
    paths = [target.path for target in targets]
    trees = {version: Path(tree) for version, _, tree in (word.partition("=") for word in argv[1:])}
    if missing := [f"{version}={tree}" for version, tree in trees.items() if not tree.is_dir()]:
        print(f"no such source tree: {', '.join(missing)}", file=sys.stderr)
        return 2
    rows = table(paths, trees)
    if only_unknown:  # a symbol that some version never had is no news; a source that nobody read is
        known = {target.path: set(target.verified) | {"missing"} for target in targets}
        rows = {path: row for path, row in rows.items() if set(row) - known[path]}
    for path, row in rows.items():
        print(path)
        for found, versions in row.items():
            print(f'    "{found}": "{", ".join(versions)}",')
    return int(only_unknown and bool(rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
