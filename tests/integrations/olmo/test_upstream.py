"""The table of verified OLMo functions, the script that makes its lines, and what an OLMo beside them does."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import olmo
import pytest
from olmo.config import InitFnType, LayerNormType

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
