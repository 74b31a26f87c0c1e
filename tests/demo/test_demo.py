"""The demo from end to end on a tiny model, and its errors where it cannot run."""

import contextlib
import csv
import io
import os
import signal
import time
from pathlib import Path
from unittest import mock

import pytest
import yaml
from support.launch import fork_command

from olmo_lns import cli
from olmo_lns.study.describe import Study

pytest.importorskip("olmo", reason="needs ai2-olmo")

REPOSITORY = Path(__file__).resolve().parents[2]


def described(folder, arms, steps, layers):
    """Write the description of a small demo."""
    size = {"max_duration": steps, "scheduler.t_warmup": 1, "model.n_layers": layers}
    study = {"name": "small", "config": "demo-base.yaml", "data": "demo", "arms": arms, "sizes": {"tiny": size}}
    path = folder / f"{steps}.yaml"
    path.write_text(yaml.safe_dump({**study, "seeds": [1], "final_fraction": 0.01}))
    return str(path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A demo of two arms that Ctrl-C interrupted, and that a second call has finished."""
    folder = tmp_path_factory.mktemp("demo")
    words = ["demo", described(folder, ["preln", "lns"], 24, 4), "--out", str(folder / "out")]
    process = fork_command(words, folder / "printed")
    # The first run that trains still has most of its steps to do, and the other one has no more behind it.
    while process.is_alive() and not any("[step=2/" in log.read_text() for log in folder.glob("out/*/attempt-01.log")):
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    process.join()
    printed = io.StringIO()
    with mock.patch.dict(os.environ), contextlib.redirect_stdout(printed):
        assert cli.main(words) == 0
    return words, folder / "out", printed.getvalue(), (process.exitcode, (folder / "printed").read_text())


@pytest.mark.slow
def test_the_demo_prints_the_factors_of_lns_and_the_numbers_of_each_arm(finished):
    _, out, text, _ = finished
    assert text.count("LayerNorm Scaling on: 8 norms (lns_rms); s = 1 (block 1) to 0.5 (block 4)") == 1
    for arm in ("preln", "lns"):
        folder = out / f"tiny-{arm}-s1"
        with (folder / "variance-step24.csv").open() as file:
            variance = [float(row["variance"]) for row in csv.DictReader(file)]
        log = "".join(path.read_text() for path in sorted(folder.glob("attempt-*.log")))
        (row,) = [line.split() for line in text.splitlines() if line.split()[:1] == [arm]]
        assert row[2] in log and row[3] in log.partition("heldout\n")[2]
        blocks = [f"{variance[block - 1]:.3g}" for block in (1, 2, 4)]
        assert row[4:] == [*blocks, f"{variance[3] / variance[0]:.2g}"]
    assert (out / "demo.png").stat().st_size > 20_000


@pytest.mark.slow
def test_a_second_call_trains_nothing_and_refuses_other_settings(finished, tmp_path, capsys):
    words, out, text, _ = finished
    before = {path: path.stat().st_mtime_ns for path in out.glob("*/*.log")}
    with mock.patch.dict(os.environ):
        assert cli.main(words) == 0
        assert text.splitlines()[-3:] == capsys.readouterr().out.splitlines()[-3:]
        assert cli.main(["demo", described(tmp_path, ["preln", "lns"], 7, 4), "--out", str(out)]) == 1
    err = capsys.readouterr().err
    assert "max_duration is 24 in the folder and 7 in this study. Pass another --out" in err
    assert {path: path.stat().st_mtime_ns for path in out.glob("*/*.log")} == before


@pytest.mark.slow
def test_an_interrupted_demo_goes_on_from_its_checkpoints(finished):
    _, out, _, (code, text) = finished
    assert code == 130 and "To resume: olmo-lns demo" in text
    for arm in ("preln", "lns"):
        logs = "".join(path.read_text() for path in sorted((out / f"tiny-{arm}-s1").glob("attempt-*.log")))
        assert logs.count("[step=1/") == 1 and logs.count("[step=24/") == 1
        assert (out / f"tiny-{arm}-s1" / "attempt-02.log").exists(), "the signal did not end this run"


def test_a_description_without_the_measures_of_the_demo_is_refused_before_training(tmp_path, capsys):
    assert cli.main(["demo", "tiny", "--out", str(tmp_path / "out")]) == 1
    assert "Add an evaluator heldout" in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize(("name", "tokens"), [("demo", 425_984), ("demo-long", 6_815_744)])
def test_each_arm_has_the_best_rate_of_the_evidence(name, tokens):
    with (REPOSITORY / "docs" / "evidence" / "runs.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if (row["layers"], row["width"]) == ("24", "32")]
    rows = [row for row in rows if int(row["tokens"]) == tokens and row["seed"] == "1" and row["heldout"]]
    for run in Study.load(name).runs:
        best = min((row for row in rows if row["arm"] == run.arm), key=lambda row: float(row["heldout"]))
        assert float(best["learning_rate"]) == run.overrides["optimizer.learning_rate"]
