"""The demo from end to end on a tiny model, its description, and its errors where it cannot run."""

import csv
import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest

from olmo_lns import cli, demo

pytest.importorskip("olmo", reason="needs ai2-olmo")

REPOSITORY = Path(__file__).resolve().parents[2]
TINY = ["demo", "--steps", "4", "--layers", "4", "--arms", "preln,lns", "--out"]


@pytest.fixture(autouse=True)
def _own_environment():
    """Restore the environment: the demo sets the variables that its config reads."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out, printed = tmp_path_factory.mktemp("demo"), io.StringIO()
    with mock.patch.dict(os.environ), mock.patch.object(sys, "stdout", printed):
        assert cli.main([*TINY, str(out)]) == 0
    return out, printed.getvalue()


def test_the_demo_prints_the_factors_of_lns_and_the_numbers_of_each_arm(finished):
    out, text = finished
    assert text.count("LayerNorm Scaling on: 8 norms (lns_rms); s = 1 (block 1) to 0.5 (block 4)") == 1
    for arm in ("preln", "lns"):
        folder = out / f"rate0.01-{arm}-s1"
        with (folder / "variance-step4.csv").open() as file:
            variance = [float(row["variance"]) for row in csv.DictReader(file)]
        log = (folder / "attempt-01.log").read_text()
        (row,) = [line.split() for line in text.splitlines() if line.split()[:1] == [arm]]
        assert row[2] in log and row[3] in log.partition("heldout\n")[2]
        assert row[4:] == [f"{variance[0]:.3g}", f"{variance[1]:.3g}", f"{variance[3]:.3g}", f"{variance[3] / variance[0]:.2g}"]  # fmt: skip
    assert "Shown: after 8,192 tokens V is " in text and (out / "demo.png").stat().st_size > 20_000


def test_a_second_call_trains_nothing_and_refuses_other_settings(finished, capsys):
    out = finished[0]
    before = {path: path.stat().st_mtime_ns for path in out.glob("*/*.log")}
    assert cli.main([*TINY, str(out)]) == 0
    assert finished[1].splitlines()[-3:] == capsys.readouterr().out.splitlines()[-3:]
    assert cli.main([*TINY, str(out), "--steps", "7"]) == 1
    assert "use another --out" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in out.glob("*/*.log")} == before


@pytest.mark.slow
def test_an_interrupted_demo_goes_on_from_its_checkpoints(tmp_path):
    command = [sys.executable, "-m", "olmo_lns", "demo", "--arms", "lns", "--steps", "300", "--layers", "2"]
    folder = tmp_path / "out" / "rate0.01-lns-s1"
    log = folder / "attempt-01.log"
    process = subprocess.Popen([*command, "--out", str(tmp_path / "out")], stdout=subprocess.PIPE, text=True)
    while process.poll() is None and not (log.exists() and "[step=40/" in log.read_text()):
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate()
    assert process.returncode == 130 and "To resume: olmo-lns demo --arms lns --steps 300" in out
    assert subprocess.run([*command, "--out", str(tmp_path / "out")]).returncode == 0
    logs = log.read_text() + (folder / "attempt-02.log").read_text()
    assert logs.count("[step=1/") == 1 and logs.count("[step=300/") == 1


@pytest.mark.parametrize(("words", "tokens"), [((), 425_984), (("--long",), 6_815_744)])
def test_each_arm_has_the_best_rate_of_the_evidence(words, tokens, tmp_path):
    with (REPOSITORY / "docs" / "evidence" / "runs.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if (row["layers"], row["width"]) == ("24", "32")]
    rows = [row for row in rows if int(row["tokens"]) == tokens and row["seed"] == "1" and row["heldout"]]
    study = demo.describe(demo.parser().parse_args([*words, "--out", str(tmp_path)]))
    for size, arms in study["only"].items():
        for arm in arms:
            best = min((row for row in rows if row["arm"] == arm), key=lambda row: float(row["heldout"]))
            assert float(best["learning_rate"]) == study["sizes"][size]["optimizer.learning_rate"]


@pytest.mark.parametrize(
    ("arms", "setting", "said"),
    [
        ("preln,lsn", "", "(did you mean 'lns'?)"),
        ("lns", "WORLD_SIZE=2", "the demo runs in one process: found WORLD_SIZE=2"),
        ("lns", "OLMO_LNS_INITIALIZATION=upstream", "OLMO_LNS_INITIALIZATION=upstream"),
    ],
)
def test_a_demo_that_cannot_run_is_refused_before_it_writes(arms, setting, said, tmp_path, monkeypatch, capsys):
    if setting:
        monkeypatch.setenv(*setting.split("="))
    assert cli.main(["demo", "--out", str(tmp_path / "out"), "--arms", arms]) == 1
    assert said in capsys.readouterr().err and not (tmp_path / "out").exists()
