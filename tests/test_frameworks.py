"""Every place that lists frameworks has those of the one table."""

import re
from pathlib import Path

import pytest

import olmo_lns
from olmo_lns import doctor
from olmo_lns.frameworks import FRAMEWORKS, framework_of

PACKAGE = Path(olmo_lns.__file__).parent
ROOT = PACKAGE.parent


def test_each_framework_has_an_integration_and_each_integration_a_row():
    folders = {path.parent.name for path in (PACKAGE / "integrations").glob("*/__init__.py")}
    assert folders == set(FRAMEWORKS)


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
