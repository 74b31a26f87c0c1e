from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from olmo_lns import doctor
from olmo_lns.norm import transformer_engine as te


def rows(**environment):
    env = {**os.environ, "COLUMNS": "200", **environment}
    done = subprocess.run([sys.executable, "-m", "olmo_lns", "doctor"], capture_output=True, text=True, env=env)
    return done.returncode, done.stdout


def test_a_good_environment_is_reported_whole():
    code, out = rows()
    assert code == 0
    for word in ("Python", "torch", "OLMo", "0.6.0", "lns_rms", "Megatron core", "Transformer Engine", "norm backend"):
        assert word in out


def test_opt_out_and_wrong_settings_are_shown():
    code, out = rows(OLMO_LNS_DISABLE="1", OLMO_LNS_SCALED_INIT="maybe")
    assert "OLMO_LNS_DISABLE=1 is set" in out
    # the OLMo row cannot register with a setting that is not allowed
    assert code == 1 and "OLMO_LNS_SCALED_INIT='maybe'" in out


@pytest.mark.skipif(te.status().problem is None, reason="Transformer Engine works here")
def test_a_backend_that_cannot_run_fails_with_its_reason():
    code, out = rows(OLMO_LNS_NORM_BACKEND="te")
    assert code == 1 and "Transformer Engine is not installed" in out


def test_an_unverified_olmo_is_unsupported(monkeypatch):
    from olmo_lns.integrations.olmo import upstream

    monkeypatch.setattr(upstream, "OLDEST", "99.0")
    (row,) = [f for f in doctor.examine() if f.what == "OLMo"]
    assert row.state == "unsupported" and "needs at least 99.0" in row.detail


def test_an_unverified_transformer_engine_is_unsupported(monkeypatch):
    monkeypatch.setattr(te, "status", lambda: te.Status("3.1", "Transformer Engine 3.1 is not supported"))
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: object())
    assert doctor._transformer_engine().state == "unsupported"


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("OLMO_LNS_EXPONENT", "abc", "OLMO_LNS_EXPONENT"),
        ("OLMO_LNS_MONITOR", "evry=5", "expected every="),
        ("OLMO_LNS_MONITR", "every=5", "unknown variable OLMO_LNS_MONITR"),
    ],
)
def test_settings_that_are_wrong_fail(monkeypatch, name, value, words):
    monkeypatch.setenv(name, value)
    found = doctor._settings()
    assert found.state == "unsupported" and words in found.detail


def test_the_known_variables_are_those_that_the_package_reads():
    package = Path(doctor.__file__).parent
    text = " ".join(path.read_text() for path in package.rglob("*.py") if path.name != "doctor.py")
    assert set(re.findall(r"OLMO_LNS_[A-Z_]*[A-Z]", text)) == doctor.VARIABLES
