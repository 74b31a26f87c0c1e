"""docs/api.md lists exactly the public names, and each of them exists."""

import ast
import importlib
import re
from pathlib import Path

import pytest

import olmo_lns

REPOSITORY = Path(__file__).parents[1]
PAGE = (REPOSITORY / "docs" / "api.md").read_text(encoding="utf-8")
#: Dotted path -> the heading of its entry, or the path.
ENTRIES = {
    path: heading or path
    for path, heading in re.findall(r'^::: (\S+)(?:\n    options: \{heading: "([^"]+)"\})?', PAGE, re.MULTILINE)
}


def names_of(module):
    """The ``__all__`` of a module of this package, read without importing its framework."""
    path = REPOSITORY / f"{module.replace('.', '/')}.py"
    assignments = [node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.Assign)]
    return next(ast.literal_eval(node.value) for node in assignments if node.targets[0].id == "__all__")


@pytest.mark.parametrize("path", ENTRIES)
def test_every_listed_name_exists(path):
    module, _, name = path.rpartition(".")
    if module in ("olmo_lns.olmo_core", "olmo_lns.torchtitan"):
        assert name in names_of(module)
    elif path == "olmo_lns.gains":
        importlib.import_module(path)
    else:
        found = getattr(importlib.import_module(module), name)
        heading = ENTRIES[path]
        assert heading == path or getattr(olmo_lns, heading.removeprefix("olmo_lns.")) is found


def test_every_public_name_is_listed():
    public = [f"olmo_lns.{name}" for name in olmo_lns.__all__ if name != "__version__"]
    for module in ("olmo_lns.olmo_core", "olmo_lns.torchtitan"):
        public += [f"{module}.{name}" for name in names_of(module)]
    assert {*public} <= {*ENTRIES.values()}
