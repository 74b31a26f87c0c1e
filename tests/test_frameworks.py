"""Every place that lists frameworks has those of the one table."""

import ast
import re
from pathlib import Path

import pytest

import olmo_lns
from olmo_lns import doctor
from olmo_lns.frameworks import FRAMEWORKS, framework_of
from olmo_lns.integrations.interface import Integration
from olmo_lns.integrations.megatron.language_models import LANGUAGE_MODELS
from olmo_lns.integrations.transformers import refusals

PACKAGE = Path(olmo_lns.__file__).parent
ROOT = PACKAGE.parent


def test_each_framework_has_an_integration_and_each_integration_a_row():
    folders = {path.parent.name for path in (PACKAGE / "integrations").glob("*/__init__.py")}
    assert folders - {"any_model"} == set(FRAMEWORKS)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_each_says_how_the_public_functions_treat_its_models(framework):
    """Its module ``integration`` has a subclass of the interface, which adds no method of another name."""
    tree = ast.parse((PACKAGE / "integrations" / framework / "integration.py").read_text(encoding="utf-8"))
    (own,) = (node for node in tree.body if isinstance(node, ast.ClassDef))
    assert [ast.unparse(base) for base in own.bases] == ["Integration"]
    methods = {node.name for node in own.body if isinstance(node, ast.FunctionDef)}
    assert methods and methods <= vars(Integration).keys()
    assert f"INTEGRATION = {own.name}()" in map(ast.unparse, tree.body) and FRAMEWORKS[framework].classes


def test_the_start_up_hook_has_the_same_names():
    text = (PACKAGE / "integrations" / "olmo_lns_autoload.pth").read_text()
    (names,) = re.findall(r"N=\(([^)]*)\)", text)
    assert sorted(re.findall(r"'(\w+)'", names)) == sorted(FRAMEWORKS)


def test_the_doctor_has_a_line_for_each(capsys):
    doctor.main([])
    text = capsys.readouterr().out
    assert [row.title for row in FRAMEWORKS.values() if f"\n  {row.title:<14} " not in text] == []


@pytest.mark.parametrize("row", FRAMEWORKS.values(), ids=FRAMEWORKS)
def test_each_has_an_extra_that_the_release_check_installs_and_a_guide(row):
    if not (ROOT / "pyproject.toml").is_file():
        pytest.skip("needs a checkout")
    assert re.search(rf"^{row.extra} = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    (extras,) = re.findall(r"^extras=\$\{EXTRAS-(.*)\}$", (ROOT / "scripts/release_check.sh").read_text(), re.MULTILINE)
    assert row.extra in extras.split()
    assert (ROOT / "docs" / f"{row.module.replace('_', '-')}.md").is_file()


def test_a_model_is_of_the_framework_whose_class_it_inherits():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    own = type("Own", (transformers.LlamaForCausalLM,), {})
    assert framework_of(own(config)) == "transformers" and framework_of(transformers.PretrainedConfig()) == ""


def _wrapped(folder):
    """Patterns of the functions that the modules of an integration wrap, from their calls of ``wrap``."""
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("wrap", "hook.wrap"):
                function = ast.unparse(node.args[0]).strip("f'\"").partition(":")[2]  # of "module:Class.function"
                yield re.sub(r"^\{.*\}\.?", "", function)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_page_names_every_wrapped_function(framework):
    page = ROOT / "docs" / "compatibility.md"
    if not page.is_file():
        pytest.skip("needs a checkout")
    (text,) = re.findall(r"## What is wrapped\n(.*?)\n## ", page.read_text(encoding="utf-8"), re.DOTALL)
    functions = set(_wrapped(PACKAGE / "integrations" / framework))
    if framework == "transformers":
        functions |= {name for names in refusals._REFUSED.values() for name in names}
    if framework == "megatron":
        functions |= set(LANGUAGE_MODELS.values())
    missing = [
        name for name in functions - {""} if not all(re.search(_pattern(part), text) for part in name.split("."))
    ]
    assert missing == []


def _pattern(part):
    """``restore_{kind}_checkpoint`` -> a pattern of its names on the page."""
    return r"\b" + r"\w+".join(re.escape(each) for each in re.split(r"\{.*?\}", part)) + r"(?!\w)"
