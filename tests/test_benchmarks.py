"""The scripts that measure: their arms are what they say, their pages match the reports, a failed part is reported."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture
def script(monkeypatch):
    """A function that imports a module of scripts/ by its name."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(SCRIPTS)):
            del sys.modules[name]


def test_the_pages_have_what_the_reports_have(script):
    for path, text in script("bench_docs").pages().items():
        assert path.read_text(encoding="utf-8") == text, f"run python scripts/bench_docs.py: docs/{path.name} differs"


def test_the_interval_is_the_longest_that_misses_the_median_in_less_than_a_twentieth(script):
    """With 21 values, P(at most 5 of 21 fair coins) is 1.3 %, and of at most 6 of them 3.9 %."""
    values = torch.randperm(21, generator=torch.Generator().manual_seed(0)).tolist()
    assert script("bench").median_and_interval(values) == (10, 5, 15)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_arms_of_lns_and_of_a_multiplication_compute_the_same_and_stock_does_not(script, monkeypatch, dtype):
    pytest.importorskip("olmo", reason="needs ai2-olmo")
    monkeypatch.setenv("OLMO_LNS_NORM_BACKEND", "torch")  # undone afterwards; the arms write it
    bench = script("bench")
    how = bench.How(torch.device("cpu"), dtype)
    losses = {name: float(bench.step(arm, "tiny", how)()) for name, arm in bench.arms_on(how.device).items()}
    assert list(losses) == ["stock", "stock, again", "lns", "stock, then multiplied"]
    assert losses["stock"] == losses["stock, again"]
    assert losses["lns"] == pytest.approx(losses["stock, then multiplied"], rel=1e-6 if dtype == "fp32" else 1e-3)
    assert losses["lns"] != pytest.approx(losses["stock"], rel=1e-5)


def test_a_part_that_fails_is_reported_with_its_last_lines(script):
    gpu_day = script("gpu_day")
    outcome = gpu_day.run(gpu_day.Part([sys.executable, "-c", "raise SystemExit('no nvcc')"], 60), 60)
    assert (outcome["status"], outcome["reason"]) == ("failed", "exit status 1; no nvcc")
    assert "result" not in outcome


def test_a_part_that_takes_too_long_is_stopped_and_keeps_what_it_measured(script):
    gpu_day = script("gpu_day")
    code = "import sys, time; open(sys.argv[1], 'w').write('[1]'); time.sleep(60)"
    outcome = gpu_day.run(gpu_day.Part([sys.executable, "-I", "-S", "-c", code, "{json}"], 60), 1)
    assert (outcome["status"], outcome["result"]) == ("failed", [1])
    assert outcome["reason"].startswith("stopped after 1 s")


@pytest.mark.slow
@pytest.mark.parametrize(
    "only", [["make test-gpu", "FSDP2 on one device"], pytest.param([], marks=pytest.mark.exhaustive)]
)
def test_the_gpu_day_on_a_cpu_reports_every_part(tmp_path, only):
    pytest.importorskip("olmo", reason="needs ai2-olmo")
    report, tables = tmp_path / "day.json", tmp_path / "day.md"
    command = [sys.executable, SCRIPTS / "gpu_day.py", "--device", "cpu", "--quick", "--python", sys.executable]
    command += ["--only", *only] if only else []
    done = subprocess.run([*command, "--json", report, "--markdown", tables], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    parts = json.loads(report.read_text())["parts"]
    outcomes = {name: part["status"] for name, part in parts.items()}
    gpu = outcomes.pop("make test-gpu")
    assert gpu == ("ok" if torch.cuda.is_available() else "skipped")
    parts_of_all = {"norms", "steps, eager", "FSDP2 on one device", "apply, tiny"}
    assert set(outcomes) == (parts_of_all.intersection(only) if only else parts_of_all)
    assert set(outcomes.values()) == {"ok"}
    for losses in parts["FSDP2 on one device"]["result"]["first_losses"].values():
        assert losses["sharded"] == pytest.approx(losses["whole"], rel=1e-4)
    assert "lns, te" not in tables.read_text()
