"""The modules of the package import only from modules below them, and there are no circles."""

import ast
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import olmo_lns

ROOT = Path(olmo_lns.__file__).parent
SOURCES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in sorted(ROOT.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in SOURCES.items()}

#: From top to bottom: a package may import those below it. Packages of one line do not import each other.
ORDER = [
    ("__main__",),
    ("cli", "doctor"),
    ("demo",),
    ("train",),
    ("study", "diagnostics"),
    ("export",),
    ("dispatch", "olmo_core", "torchtitan"),
    ("integrations",),
    ("folding", "start_up_line", "records"),
    ("sites",),
    ("scaled",),
    ("whole_model",),
    ("probe", "hook"),
    ("response", "initialization", "shadow"),
    ("norm", "gains", "arms"),
    ("schemes",),
    (
        "arguments",
        "atomic",
        "copying",
        "environment",
        "frameworks",
        "measured",
        "pip_extras",
        "processes",
        "temporary_values",
        "token_files",
        "tokenizers",
    ),
    ("errors",),
]
#: The package's own file: it names the public functions and loads none of them.
PACKAGE = "__init__"
LEVEL = {package: level for level, packages in enumerate(ORDER) for package in packages}


def imported(tree):
    """Dotted names of ours that a module imports, at the top, inside a function, or by ``import_module``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, "relative imports are not used here"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            assert not any("olmo_lns" in ast.unparse(word) for word in node.args if isinstance(word, ast.JoinedStr))
            yield from (str(word.value) for word in node.args if isinstance(word, ast.Constant))


def arrows(tree):
    """The packages and modules of ours that ``tree`` imports: ``"integrations.olmo.norm_types"``."""
    ours = {name.removeprefix("olmo_lns.") for name in imported(tree) if name.startswith("olmo_lns.")}
    return {name for name in ours if name.split(".")[0] in LEVEL}


#: Modules that name a module above them in a string -> the packages that they name so, with the reason.
NAMED_ABOVE = {
    "frameworks": {"integrations"},  # the hook loads an integration when its framework is imported
    "hook": {
        "diagnostics"
    },  # the monitor also observes runs without a scheme, and wraps olmo.train as an integration does
}


def named(tree):
    """The modules of ours that strings of a module name, also at the beginning of an f-string."""
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    names = {text.removeprefix("olmo_lns.").rstrip(".") for text in texts if text.startswith("olmo_lns.")}
    return {name for name in names if name in SOURCES or f"{name}.__init__" in SOURCES}


def upwards(module, tree):
    package = module.split(".")[0]
    if package == PACKAGE:
        return set()
    targets = {name.split(".")[0] for name in arrows(tree) | named(tree)} - {package} - NAMED_ABOVE.get(module, set())
    return {(module, target) for target in targets if LEVEL[target] <= LEVEL[package]}


def test_imports_run_only_downwards():
    assert {name.split(".")[0] for name in TREES} - {PACKAGE} <= LEVEL.keys(), "every package has its level"
    found = {arrow for module, tree in TREES.items() for arrow in upwards(module, tree)}
    assert found == set(), "imports against the order of the packages"
    assert upwards("integrations.olmo", ast.parse("def f():\n    from olmo_lns.diagnostics import monitor"))
    assert upwards("export.open", ast.parse("importlib.import_module('olmo_lns.study.describe')"))
    assert upwards("hook", ast.parse("LATER = {'olmo.train': 'olmo_lns.study.launch'}"))
    for module, above in NAMED_ABOVE.items():
        assert {name.split(".")[0] for name in named(TREES[module])} >= above


def test_the_map_in_contributing_has_the_packages_in_this_order():
    if not (contributing := ROOT.parent / "CONTRIBUTING.md").is_file():
        pytest.skip("needs a checkout")
    table = contributing.read_text(encoding="utf-8").split("## Map")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert [tuple(re.findall(r"`(\w+)/?`", row)) for row in rows] == ORDER


def definitions(module):
    """Names that a module defines, also inside its classes."""
    nodes = ast.walk(TREES[module])
    return {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}


def test_every_hop_of_the_walks_in_contributing_exists():
    if not (contributing := ROOT.parent / "CONTRIBUTING.md").is_file():
        pytest.skip("needs a checkout")
    walks = re.findall(r"^## How .*?(?=^## )", contributing.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(walks) == 4
    everywhere = set().union(*map(definitions, TREES)) | {"norm_scale"}
    for word in re.findall(r"`([^`]+)`", "".join(walks)):
        if word.endswith(".py"):
            assert list(ROOT.glob(word.replace("<framework>", "*"))), word
        elif "." in word and word.split(".")[0] in TREES:
            module, name = word.split(".")
            assert name in definitions(module), word
        elif re.fullmatch(r"\w+(\(\))?", word):
            assert word.removesuffix("()") in everywhere, word


def graph(trees):
    """Module of ours -> the modules of ours that it imports, at the top or inside a function."""
    return {
        module: {
            name if name in trees else name.rpartition(".")[0]
            for name in arrows(tree)
            if module not in (PACKAGE, name, name.rpartition(".")[0])
        }
        & trees.keys()
        for module, tree in trees.items()
    }


def test_no_module_imports_itself_in_a_circle():
    packages = {name.removesuffix(".__init__"): tree for name, tree in TREES.items() if name != PACKAGE}
    TopologicalSorter(graph(packages)).prepare()  # raises a CycleError that names the circle
    lazy = {
        "probe": ast.parse("def f():\n    from olmo_lns.sites import check"),
        "sites": ast.parse("from olmo_lns import probe"),
    }
    with pytest.raises(CycleError):
        TopologicalSorter(graph(lazy)).prepare()


def test_integrations_do_not_import_each_other():
    """All may import the interface with its hints and the engine for any model, and nothing else beside them."""
    folders = {path.name for path in (ROOT / "integrations").iterdir() if path.is_dir()}
    for module, tree in TREES.items():
        package, name, *inner = *module.split("."), ""
        if package == "integrations" and name in folders and any(inner):
            used = {other.split(".")[1] for other in arrows(tree) if other.startswith("integrations.")}
            assert not used - {name, "any_model", "hints", "interface"}, module


def test_every_test_file_that_the_makefile_names_exists():
    """pytest runs nothing at all if one of its files is missing."""
    root = Path(__file__).resolve().parents[1]
    named = re.findall(r"tests/[\w/]+\.py", (root / "Makefile").read_text(encoding="utf-8"))
    assert named and [name for name in named if not (root / name).is_file()] == []
