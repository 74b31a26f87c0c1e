import importlib.metadata
import json
import os
import subprocess
import sys

import pytest

from olmo_lns import doctor
from olmo_lns.norm import transformer_engine as te


def run(*words, **environment):
    env = {**os.environ, "COLUMNS": "200", **environment}
    return subprocess.run([sys.executable, "-m", "olmo_lns", "doctor", *words], capture_output=True, text=True, env=env)


def test_settings_that_cannot_work_fail_with_their_reasons():
    done = run(OLMO_LNS_DISABLE="1", OLMO_LNS_INITIALIZATION="maybe", OLMO_LNS_NORM_BACKEND="te")
    assert done.returncode == 1 and "OLMO_LNS_DISABLE=1 is set" in done.stdout
    assert "OLMO_LNS_INITIALIZATION='maybe'" in done.stdout
    assert te.availability().problem is None or "Transformer Engine is not installed" in done.stdout


def test_an_olmo_that_cannot_be_imported_is_a_note(monkeypatch):
    """After ``pip install ai2-olmo`` alone, OLMo lacks packages."""
    monkeypatch.setattr(doctor.extras, "problems", lambda name: (["datasets"], []))
    (row,) = [f for f in doctor.examine() if f.what == "OLMo"]
    assert row.state == "note" and "lacks datasets" in row.detail and "olmo-lns[olmo]" in row.detail


def test_an_unverified_transformer_engine_is_unsupported(monkeypatch):
    monkeypatch.setattr(te, "availability", lambda: te.Availability("3.1", "Transformer Engine 3.1 is not supported"))
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: object())
    assert doctor._transformer_engine().state == "unsupported"


def test_wrong_values_of_settings_are_unsupported(monkeypatch):
    assert doctor._settings().detail.startswith("schemes preln, lns, postln, ")
    for name, value, words in (
        ("OLMO_LNS_INITIALIZATION", "plane", "expected one of plain, upstream"),
        ("OLMO_LNS_MONITOR", "evry=5", "expected every="),
    ):
        with monkeypatch.context() as context:
            context.setenv(name, value)
            found = doctor._settings()
        assert found.state == "unsupported" and words in found.detail
    monkeypatch.setenv("OLMO_LNS_INITIALIZATION", "plain")
    assert doctor._settings().detail == "OLMO_LNS_INITIALIZATION=plain"


def test_the_doctor_imports_no_framework():
    code = "import sys; from olmo_lns import doctor; doctor.examine(); print({'olmo', 'olmo_core', 'megatron.core', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_rows_as_json_hold_one_for_each_extra():
    wrong = run("--require", "jax")
    assert wrong.returncode == 2 and "invalid choice: 'jax'" in wrong.stderr
    done = run("--json")
    found = {row["what"]: row for row in json.loads(done.stdout)}
    assert done.returncode == 0 and found["OLMo"]["state"] == "ok" and "extra te" in found
    assert {f"extra {name}" for name in doctor.extras.names()} <= set(found)


def no_metadata(name):
    raise importlib.metadata.PackageNotFoundError(name)


def test_a_required_package_that_is_absent_fails(capsys, monkeypatch):
    """The metadata is real; only the look-up of OLMo fails, as where it is not installed."""
    real, version = doctor.importlib.util.find_spec, importlib.metadata.version
    absent = lambda name: (no_metadata if name == "ai2-olmo" else version)(name)  # noqa: E731
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None if name == "olmo" else real(name))
    monkeypatch.setattr(importlib.metadata, "version", absent)
    assert doctor.main(["--require", "olmo"]) == 1
    out = capsys.readouterr()
    assert out.err == "olmo-lns doctor: --require olmo: OLMo is absent: pip install 'olmo-lns[olmo]'\n"
    assert doctor.main(["--require", "megatron", "--require", "test"]) == 0
    assert doctor.main([]) == 0


def test_transformers_is_judged_by_its_version(monkeypatch, tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    row = doctor.transformers_row()
    assert (row.found, row.state) == (transformers.__version__, "ok") and "lns_llama" in row.detail
    (tmp_path / "transformers").mkdir()  # a checkout on the path, without metadata
    (tmp_path / "transformers" / "__init__.py").write_text('__version__ = "4.40.0"\n')
    monkeypatch.setattr(doctor, "tree_of", lambda module: tmp_path)
    assert doctor.transformers_row().state == "note"
