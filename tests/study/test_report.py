"""The numbers of a report equal an independent computation, and the papers' numbers are shown beside them."""

import math

import pytest

pytest.importorskip("matplotlib", reason="needs matplotlib")
pytest.importorskip("pandas", reason="needs pandas")

import pandas as pd

from olmo_lns.study import cli
from olmo_lns.study import reporting as report
from olmo_lns.study.collect import collect


def results(study, losses):
    rows = [
        {"run": r.name, "size": r.size_and_rate, "arm": r.arm, "seed": r.seed, "parameters": 100, "status": "complete", "step": 1,
         "steps": 1, "tokens": 1, "loss": losses[r.name], "loss_std": 0.0, "points": 1, "heldout": None,
         "has_settings": True}
        for r in study.runs if losses.get(r.name)
    ]  # fmt: skip
    return pd.DataFrame(rows)


def test_a_report_shows_each_arm_at_its_best_rate(built):
    """The best rate of an arm has its lowest mean loss; the losses at the other rates have a table of their own."""
    built.description |= {"rates": {"preln": [1e-3, 2e-3], "lns": [2e-3, 4e-3]}, "more_seeds": {}}
    built.save()
    losses = {"ax0.001-preln-s1": 3.0, "ax0.002-preln-s1": 3.2, "ax0.002-lns-s1": 3.1, "ax0.004-lns-s1": 2.9}
    table = results(built.study, losses)
    text = report.markdown(built.study, report.complete(built.study, table), None)
    assert "| Pre-LN | 3.0000 (n = 1) at 0.001 | " in text
    assert "| Pre-LN + LNS | 2.9000 (n = 1) at 0.004; -0.1000 (n = 1) | " in text
    assert "| a | 0.002 | 3.2000 (n = 1) | 3.1000 (n = 1) |" in text and "at its best rate" in text


def test_unfinished_runs_are_in_no_number(built, capsys):
    for run, loss in zip(built.study.runs, (3.0, 2.9, 3.1, 2.96, 2.5, 2.3), strict=True):
        built.finish(run.name, loss, until=5 if run.name == "b-lns-s1" else None)
    for command in ("collect", "report"):
        assert cli.main([command, str(built.path), "--out", str(built.out)]) == 0
    text = (built.out / "report" / "report.md").read_text()
    assert "5 of 6 runs are complete" in text and "-0.1200 ± 0.0283 (n = 2)" in text
    assert (built.out / "report" / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_runs_that_saved_no_settings_are_named_as_not_compared(built):
    for run in built.study.runs:
        built.finish(run.name, 3.0)
    (built.out / "a-lns-s1" / "config.yaml").unlink()
    text = report.markdown(built.study, report.complete(built.study, collect(built.study, built.out)), None)
    assert "It could not compare 1 of them, which saved no settings: a-lns-s1." in text


def test_a_report_without_a_run_claims_no_comparison(built):
    table = results(built.study, {run.name: 3.0 for run in built.study.runs}).assign(status="incomplete")
    text = report.markdown(built.study, report.complete(built.study, table), None)
    assert "0 of 6 runs are complete" in text and "compared" not in text and "collect them again" in text


def test_perplexity_is_shown_beside_the_published_one(built):
    sizes = built.description["sizes"]
    built.description |= {"sizes": {"130M": sizes["a"], "1B": sizes["b"]}, "published": "lns-1", "more_seeds": {}}
    built.save()
    for run, loss in zip(built.study.runs, (3.2, 3.1, 2.9, 2.8), strict=True):
        log = built.finish(run.name, loss) / "attempt-01.log"
        log.write_text(log.read_text() + f"heldout\n    eval/heldout/CrossEntropyLoss={loss:.3f}\n")
    runs = report.complete(built.study, collect(built.study, built.out))
    text = report.markdown(built.study, runs, None)
    one, other = (f"{math.exp(loss):.2f} (n = 1)" for loss in (3.2, 2.9))
    assert f"| Pre-LN | {one} | 26.73 | {other} | 17.02 |" in text and f"| Pre-LN | {one} | {other} |" in text
    assert "| Mix-LN | – | 26.07 | – | 1414.78 |" in text and "divides the sum of n batches by n + 1" in text


def test_only_seeds_that_both_arms_have_are_compared(built):
    built.description["more_seeds"] = {"a": [2, 3]}
    built.save()
    table = results(built.study, {"a-preln-s1": 3.0, "a-lns-s1": 2.9, "a-lns-s3": 1.0})
    differences = report.difference(report.complete(built.study, table), "a", "lns")
    assert differences.to_dict() == pytest.approx({1: -0.1})
