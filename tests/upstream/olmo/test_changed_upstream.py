"""An OLMo whose code is not what was verified: the error, not a wrong model."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from support import launch

pytestmark = pytest.mark.slow
pytest.importorskip("olmo", reason="needs pip install 'olmo-lns[olmo]'")


def renamed(tree: Path) -> None:
    """The norm factory has another name, here and at every call."""
    model = tree / "olmo" / "model.py"
    launch.change(model, "def build(cls, config: ModelConfig, size", "def make(cls, config: ModelConfig, size")
    for name in ("LayerNorm", "LayerNormBase"):
        launch.change(model, f"{name}.build(", f"{name}.make(")


def new_signature(tree: Path) -> None:
    """Block constructors take one argument more."""
    launch.change(
        tree / "olmo" / "model.py",
        "def __init__(self, layer_id: int, config: ModelConfig, cache: BufferCache):",
        "def __init__(self, layer_id: int, config: ModelConfig, cache: BufferCache, *, tag: str = ''):",
    )


def trainer_renamed(tree: Path) -> None:
    """A symbol of a module that `import olmo` does not load."""
    launch.change(tree / "olmo" / "train.py", "trainer_state_dict(", "state_of_trainer(")


CHANGES = {"renamed": renamed, "signature": new_signature, "trainer": trainer_renamed}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("changed")
    wanted: dict[str, Any] = {"same": (str(launch.copy_of_olmo(folder / "same")), {})}
    for name, change in CHANGES.items():
        tree = launch.copy_of_olmo(folder / name)
        change(tree)
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
def test_a_changed_tree_is_a_working_olmo_by_itself(results, name):
    """Otherwise the errors below would show nothing."""
    model = results[f"{name}, opted out"]["model"]
    assert model["from"].startswith(results["folder"]) and model["scales"] == [None, None]


@pytest.mark.parametrize(
    ("name", "symbol"),
    [
        ("renamed", "olmo.model:LayerNormBase.build does not exist"),
        ("signature", "olmo.model:OLMoSequentialBlock.__init__"),
        ("trainer", "olmo.train:Trainer.trainer_state_dict does not exist"),
    ],
)
def test_with_nothing_selected_there_is_one_warning_and_olmo_is_untouched(results, name, symbol):
    stock = results[f"{name}, stock"]
    warnings = [text for text in stock["log"] if "leaves this OLMo untouched" in text]
    assert len(warnings) == 1 and symbol in warnings[0]
    assert stock["model"]["scales"] == [None, None] and stock["model"]["from"].startswith(results["folder"])
    assert stock["model"]["patched"] == (name == "trainer")


@pytest.mark.parametrize("name", CHANGES)
def test_a_scheme_is_an_error_that_names_the_ways_out(results, name):
    error = results[name]["error"]
    assert "UpstreamChangedError" in error and "OLMO_LNS_DISABLE=1" in error
    # A function that is not there cannot be gone on with.
    assert ("OLMO_LNS_ALLOW_UNVERIFIED=1" in error) == (name == "signature")


def test_the_error_names_what_was_found_and_what_was_verified(results):
    error = results["signature"]["error"]
    assert "olmo.model:OLMoSequentialBlock.__init__" in error
    assert f"{results['folder']}/signature/olmo/model.py" in error
    assert "0d09c77bc4f5c8f4" in error, "the verified fingerprint is not named"
    # There is nothing to wrap, so knowing better does not help.
    assert "olmo.model:LayerNormBase.build does not exist" in results["renamed, allowed"]["error"]


def test_a_new_signature_goes_on_when_allowed(results):
    allowed = results["signature, allowed"]
    assert allowed["model"]["scales"] == pytest.approx([1, math.sqrt(0.5)])
    assert any("Going on because OLMO_LNS_ALLOW_UNVERIFIED=1" in text for text in allowed["log"])
