"""An OLMo whose code is not what was verified: the error, not a wrong model."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import pytest
from support import launch

pytestmark = pytest.mark.slow
pytest.importorskip("olmo", reason="needs pip install 'olmo-lns[olmo]'")


#: Name -> file, text and what takes its place: a norm factory of another name, here and at every call; block
#: constructors with one argument more; another name in a module that `import olmo` does not load.
CHANGES = {
    "renamed": ("model.py", [
        ("def build(cls, config: ModelConfig, size", "def make(cls, config: ModelConfig, size"),
        ("LayerNorm.build(", "LayerNorm.make("), ("LayerNormBase.build(", "LayerNormBase.make("),
    ]),
    "signature": ("model.py", [
        ("def __init__(self, layer_id: int, config: ModelConfig, cache: BufferCache):",
         "def __init__(self, layer_id: int, config: ModelConfig, cache: BufferCache, *, tag: str = ''):"),
    ]),
    "trainer": ("train.py", [("trainer_state_dict(", "state_of_trainer(")]),
}  # fmt: skip
#: Name -> what the warning, or the error of a scheme, says of it.
SYMBOLS = {
    "renamed": "olmo.model:LayerNormBase.build does not exist",
    "signature": "olmo.model:OLMoSequentialBlock.__init__",
    "trainer": "olmo.train:Trainer.trainer_state_dict does not exist",
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("changed")
    wanted: dict[str, Any] = {"same": (str(launch.copy_of_olmo(folder / "same")), {})}
    for name, (file, changes) in CHANGES.items():
        tree = launch.copy_of_olmo(folder / name)
        path = tree / "olmo" / file
        for old, new in changes:
            text = path.read_text()
            assert old in text, f"{path} has no {old!r}"
            path.write_text(text.replace(old, new))
        wanted[name] = (str(tree), {})
        wanted[f"{name}, stock"] = (str(tree), {"STOCK": "1"})
        wanted[f"{name}, opted out"] = (str(tree), {"OLMO_LNS_DISABLE": "1"})
        wanted[f"{name}, allowed"] = (str(tree), {"OLMO_LNS_ALLOW_UNVERIFIED": "1"})
    (folder / "wanted.json").write_text(json.dumps(wanted))
    command = [sys.executable, launch.PROGRAMS / "trees.py", folder / "wanted.json", folder / "results.json"]
    env = launch.environment(PYTHONPATH=str(launch.REPOSITORY))
    launch.run(command, cwd=folder, env=env).ok()
    return {"folder": str(folder), **json.loads((folder / "results.json").read_text())}


def test_an_unchanged_copy_is_fine(results):
    assert results["same"]["model"]["from"].startswith(results["folder"])
    assert results["same"]["model"]["scales"] == pytest.approx([1, math.sqrt(0.5)])


@pytest.mark.parametrize("name", CHANGES)
def test_with_nothing_selected_there_is_one_warning_and_olmo_is_untouched(results, name):
    alone = results[f"{name}, opted out"]["model"]  # it works by itself: otherwise the errors would show nothing
    assert alone["from"].startswith(results["folder"]) and alone["scales"] == [None, None]
    stock = results[f"{name}, stock"]
    warnings = [text for text in stock["log"] if "leaves this OLMo untouched" in text]
    assert len(warnings) == 1 and SYMBOLS[name] in warnings[0]
    assert stock["model"]["scales"] == [None, None] and stock["model"]["from"].startswith(results["folder"])
    assert stock["model"]["patched"] == (name == "trainer")


@pytest.mark.parametrize("name", CHANGES)
def test_a_scheme_is_an_error_that_names_what_was_found_and_the_ways_out(results, name):
    error = results[name]["error"]
    assert "UpstreamChangedError" in error and SYMBOLS[name] in error and "OLMO_LNS_DISABLE=1" in error
    # A function that is not there cannot be gone on with.
    assert ("OLMO_LNS_ALLOW_UNVERIFIED=1" in error) == (name == "signature")
    if name == "signature":
        assert f"{results['folder']}/signature/olmo/model.py" in error
        assert "0d09c77bc4f5c8f4" in error, "the verified fingerprint is not named"
    else:  # there is nothing to wrap, so knowing better does not help
        assert SYMBOLS[name] in results[f"{name}, allowed"]["error"]


def test_a_new_signature_goes_on_when_allowed(results):
    allowed = results["signature, allowed"]
    assert allowed["model"]["scales"] == pytest.approx([1, math.sqrt(0.5)])
    assert any("Going on because OLMO_LNS_ALLOW_UNVERIFIED=1" in text for text in allowed["log"])
