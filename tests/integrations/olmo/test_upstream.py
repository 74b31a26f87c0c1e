"""The table of verified OLMo functions, the script that makes its lines, and what an OLMo beside them does."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path
from typing import Any

import olmo
import pytest
from olmo.config import InitFnType, LayerNormType
from support import launch

from olmo_lns.errors import UpstreamChangedError
from olmo_lns.integrations import patching
from olmo_lns.integrations.olmo import register, types, upstream

SCRIPT = Path(__file__).parents[3] / "scripts" / "fingerprints.py"


@pytest.fixture(scope="module")
def fingerprints():
    spec = importlib.util.spec_from_file_location("lns_fingerprints", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_script_finds_in_the_source_what_was_verified(fingerprints, capsys):
    """The installed OLMo as a source tree, read without importing it; its tree beside a version without it."""
    tree = Path(olmo.__file__).parents[1]
    empty = Path(__file__).parent
    assert fingerprints.main(["olmo_lns.integrations.olmo.upstream", f"here={tree}", f"none={empty}"]) == 0
    assert len({target.path for target in upstream.TARGETS}) == len(upstream.TARGETS) == 25
    lines = capsys.readouterr().out.splitlines()
    assert lines[::3] == [target.path for target in upstream.TARGETS]
    for target, found, missing in zip(upstream.TARGETS, lines[1::3], lines[2::3], strict=True):
        fingerprint, version = found.strip().split(": ")
        assert fingerprint.strip('"') in target.verified and version == '"here",'
        assert missing.strip() == '"missing": "none",'


def test_an_olmo_that_is_too_old_is_refused_and_a_newer_one_judged_by_its_source():
    with pytest.raises(UpstreamChangedError, match=r"ai2-olmo 0\.3\.0: .*needs at least 0\.4\.0"):
        upstream.check_version("0.3.0")
    upstream.check_version("0.7.0")


@pytest.fixture
def unverified(monkeypatch):
    """An OLMo, found here, that was not verified; its enums as they are before anything of ours is in them."""
    monkeypatch.setattr(patching, "_aside", {})
    monkeypatch.setattr(types, "selected", False)
    monkeypatch.setattr(upstream, "check_version", lambda found: (_ for _ in ()).throw(UpstreamChangedError("odd")))
    before = {
        (kind, table): getattr(kind, table)
        for kind in (LayerNormType, InitFnType)
        for table in ("_member_map_", "_value2member_map_")
    }
    for (kind, table), present in before.items():
        stock = {name: member for name, member in dict(present).items() if not types.has_scheme(name)}
        type.__setattr__(kind, table, {name: member for name, member in stock.items() if name not in types.INIT_FNS})
    yield
    for (kind, table), present in before.items():
        type.__setattr__(kind, table, present)


def test_an_olmo_that_is_not_verified_stops_where_a_scheme_is_asked_for(unverified, monkeypatch, caplog):
    """``OLMO_LNS_SCHEME`` alone selects nothing; ``OLMO_LNS_INITIALIZATION`` bears on stock models, at once."""
    monkeypatch.setenv("OLMO_LNS_SCHEME", "lns:exponent=0.25")
    register()
    assert caplog.text.count("leaves this OLMo untouched") == 1 and LayerNormType["rms"] is LayerNormType.rms
    for look_up in (
        lambda: LayerNormType["lns"],
        lambda: LayerNormType("lns_rms"),
        lambda: InitFnType["normal_scaled"],
    ):
        with pytest.raises(UpstreamChangedError, match="A scheme was asked for, but this OLMo was left untouched: odd"):
            look_up()
    with pytest.raises(UpstreamChangedError, match="left untouched"):
        register(scheme="lns:exponent=0.25")
    monkeypatch.setenv("OLMO_LNS_INITIALIZATION", "plain")
    with pytest.raises(UpstreamChangedError, match="left untouched"):
        register()


# Trees whose code is not what was verified: the error, not a wrong model

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


@pytest.mark.slow
def test_an_unchanged_copy_is_fine(results):
    assert results["same"]["model"]["from"].startswith(results["folder"])
    assert results["same"]["model"]["scales"] == pytest.approx([1, math.sqrt(0.5)])


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_with_nothing_selected_there_is_one_warning_and_olmo_is_untouched(results, name):
    alone = results[f"{name}, opted out"]["model"]  # it works by itself: otherwise the errors would show nothing
    assert alone["from"].startswith(results["folder"]) and alone["scales"] == [None, None]
    stock = results[f"{name}, stock"]
    warnings = [text for text in stock["log"] if "leaves this OLMo untouched" in text]
    assert len(warnings) == 1 and SYMBOLS[name] in warnings[0]
    assert stock["model"]["scales"] == [None, None] and stock["model"]["from"].startswith(results["folder"])
    assert stock["model"]["patched"] == (name == "trainer")


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_new_signature_goes_on_when_allowed(results):
    allowed = results["signature, allowed"]
    assert allowed["model"]["scales"] == pytest.approx([1, math.sqrt(0.5)])
    assert any("Going on because OLMO_LNS_ALLOW_UNVERIFIED=1" in text for text in allowed["log"])
