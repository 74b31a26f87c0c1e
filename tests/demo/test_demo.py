"""The demo from end to end on a tiny model, its description, and its errors where it cannot run."""

import csv
import io
import os
import sys
from pathlib import Path
from unittest import mock

import pytest

from olmo_lns import cli, demo
from olmo_lns.diagnostics.results import Report
from olmo_lns.record import Record
from olmo_lns.schemes import LNS
from olmo_lns.study.collect import COMPLETE, read_results

pytest.importorskip("olmo", reason="needs ai2-olmo")

REPOSITORY = Path(__file__).resolve().parents[2]
TINY = ["demo", "--steps", "6", "--layers", "4", "--out"]


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


def described(out, *words):
    return demo.describe(demo.parser().parse_args([*words, "--out", str(out)]))


def test_the_demo_prints_the_factors_of_lns_and_the_numbers_of_each_arm(finished):
    out, text = finished
    lines = text.splitlines()
    assert lines[0].startswith(f"3 runs of 6 steps in {out}")
    (at,) = [n for n, line in enumerate(lines) if line == "Pre-LN + LNS, learning rate 0.01, seed 1: the run has started"]  # fmt: skip
    assert lines[at + 1].startswith("  LayerNorm Scaling on: 8 norms (lns_rms); s = 1 (block 1) to 0.5 (block 4)")
    assert text.count("LayerNorm Scaling on") == 1 and "Shown: after 12,288 tokens V is " in text
    results = [*read_results(out / "results.csv").itertuples()]
    assert [result.status for result in results] == [COMPLETE] * 3
    for result in results:
        variance = Report.read(out / result.run / "variance-step6.json").result
        assert len(variance.variance) == 4 and variance.tokens == demo.TOKENS
        growth = f"{variance.variance[3] / variance.variance[0]:.2g}"
        (row,) = [line.split() for line in lines if line.split()[:1] == [result.arm]]
        assert row[2:4] == [f"{result.loss:.3f}", f"{result.heldout:.3f}"] and row[-1] == growth
        assert Report.read(out / result.run / "variance-step0.json").result.variance != variance.variance
    assert (out / "demo.png").stat().st_size > 20_000
    assert Record.read(out / "rate0.01-lns-s1" / "step6-unsharded") == Record(LNS, "rms", "plain")


def test_a_second_call_trains_nothing_and_refuses_other_settings(finished, capsys):
    out = finished[0]
    before = sorted(out.glob("*/attempt-*"))
    assert cli.main([*TINY, str(out)]) == 0
    assert cli.main(["study", "plan", str(out / "study.yaml")]) == 0
    assert "3 runs (Pre-LN, Pre-LN + scaled init, Pre-LN + LNS)" in capsys.readouterr().out
    described_before = (out / "study.yaml").read_bytes()
    assert cli.main([*TINY, str(out), "--steps", "7"]) == 1
    err = capsys.readouterr().err
    assert "was started with other settings: " in err and "use another --out" in err and err.count("\n") == 1
    assert sorted(out.glob("*/attempt-*")) == before and (out / "study.yaml").read_bytes() == described_before


@pytest.mark.parametrize(("end", "code", "said"), [(KeyboardInterrupt, 130, "To go on: "), (1, 1, "")])
def test_an_interrupt_prints_how_to_go_on_and_a_failure_returns_1(end, code, said, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "run_here", mock.Mock(side_effect=[end] if isinstance(end, int) else end))
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    assert cli.main([*TINY, str(tmp_path)]) == code
    assert (
        f"{said}olmo-lns demo --steps 6 --layers 4 --out {tmp_path}" if said else "3 runs"
    ) in capsys.readouterr().out


@pytest.mark.parametrize(("words", "tokens"), [((), 425_984), (("--long",), 6_815_744)])
def test_each_arm_has_the_best_rate_of_the_evidence(words, tokens, tmp_path):
    with (REPOSITORY / "docs" / "evidence" / "runs.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if (row["layers"], row["width"]) == ("24", "32")]
    rows = [row for row in rows if int(row["tokens"]) == tokens and row["seed"] == "1" and row["heldout"]]
    for run in described(tmp_path, *words).runs:
        best = min((row for row in rows if row["arm"] == run.arm), key=lambda row: float(row["heldout"]))
        assert float(best["learning_rate"]) == run.overrides["optimizer.learning_rate"]


def test_options_choose_the_arms_the_steps_and_the_layers(tmp_path):
    runs = described(tmp_path, "--arms", "lns,preln", "--steps", "9", "--layers", "3").runs
    assert {(run.arm, run.seed) for run in runs} == {("lns", 1), ("preln", 1)}
    asked = {"optimizer.learning_rate": 0.01, "max_duration": 9, "model.n_layers": 3}
    assert all(run.overrides | asked == run.overrides for run in runs)


@pytest.mark.parametrize(
    ("arms", "setting", "said"),
    [
        ("preln,postln", "", "--arms preln,postln: expected some of preln, preln_scaled_init, lns"),
        ("lns", "WORLD_SIZE=2", "the demo runs in one process: found WORLD_SIZE=2"),
        ("lns", "OLMO_LNS_INITIALIZATION=upstream", "OLMO_LNS_INITIALIZATION=upstream"),
    ],
)
def test_a_demo_that_cannot_run_is_refused_before_it_writes(arms, setting, said, tmp_path, monkeypatch, capsys):
    if setting:
        monkeypatch.setenv(*setting.split("="))
    assert cli.main(["demo", "--out", str(tmp_path / "out"), "--arms", arms]) == 1
    assert said in capsys.readouterr().err and not (tmp_path / "out").exists()
