"""The table of verified OLMo functions, and the script that makes its lines."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import olmo
import pytest

from olmo_lns.errors import UpstreamChangedError
from olmo_lns.integrations.olmo import upstream
from olmo_lns.integrations.patching import Target

SCRIPT = Path(__file__).parents[3] / "scripts" / "fingerprints.py"


@pytest.fixture(scope="module")
def fingerprints():
    spec = importlib.util.spec_from_file_location("lns_fingerprints", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_named_target_is_in_the_table():
    named = [value.path for value in vars(upstream).values() if isinstance(value, Target)]
    assert isinstance(upstream.TARGETS, tuple) and sorted(named) == sorted(t.path for t in upstream.TARGETS)
    assert len(set(named)) == len(named)


def test_the_script_finds_in_the_source_what_was_verified(fingerprints, capsys):
    """The installed OLMo as a source tree, read without importing it; its tree beside a version without it."""
    tree = Path(olmo.__file__).parents[1]
    empty = Path(__file__).parent
    assert fingerprints.main(["olmo_lns.integrations.olmo.upstream", f"here={tree}", f"none={empty}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[::3] == [target.path for target in upstream.TARGETS]
    for target, found, missing in zip(upstream.TARGETS, lines[1::3], lines[2::3], strict=True):
        fingerprint, version = found.strip().split(": ")
        assert fingerprint.strip('"') in target.verified and version == '"here",'
        assert missing.strip() == '"missing": "none",'


def test_the_script_names_a_tree_that_is_not_there(fingerprints, capsys):
    assert fingerprints.main(["olmo_lns.integrations.olmo.upstream", "9.9=/nowhere"]) == 2
    assert "no such source tree: 9.9=/nowhere" in capsys.readouterr().err
    assert fingerprints.main(["olmo_lns.integrations.olmo.upstream"]) == 2


def test_an_olmo_that_is_too_old_is_refused_and_a_newer_one_judged_by_its_source():
    with pytest.raises(UpstreamChangedError, match=r"ai2-olmo 0\.3\.0: .*needs at least 0\.4\.0"):
        upstream.check_version("0.3.0")
    upstream.check_version("0.7.0")
