"""The numbers of a report equal an independent computation, and the papers' numbers are shown beside them."""

import math

import pytest

pytest.importorskip("matplotlib", reason="needs matplotlib")
pytest.importorskip("pandas", reason="needs pandas")
pytest.importorskip("scipy", reason="needs scipy")

import numpy as np
import yaml
from support.studies import REPOSITORY

from olmo_lns.study import cli
from olmo_lns.study.collect.gather import Result, collect
from olmo_lns.study.plan.spec import Study, published
from olmo_lns.study.report import scaling as report
from olmo_lns.study.report.scaling import best, complete, difference, summary


def results(study, losses):
    return [
        Result(r.name, r.size, r.arm, r.seed, 100 if r.group == "a" else 200, "complete" if loss else "incomplete", 1, 1,
               1, loss, 0.0, 1, loss, None, "x")
        for r in study.runs if (loss := losses.get(r.name, 9.0)) != 9.0
    ]  # fmt: skip


def test_seeds_are_averaged_and_paired_and_incomplete_runs_are_left_out(built):
    built.description["more_seeds"] = {"a": [2, 3]}
    built.save()
    losses = {"a-preln-s1": 3.0, "a-preln-s2": 4.0, "a-lns-s1": 2.9, "a-lns-s2": 3.7, "a-lns-s3": 1.0, "b-lns-s1": None}
    found = complete(built.study, results(built.study, losses))
    (row,) = summary(found, "lns").itertuples()
    assert (row.Index, row.seeds, row.parameters) == ("a", 3, 100)
    assert (row.mean, row.std) == pytest.approx((np.mean([2.9, 3.7, 1.0]), np.std([2.9, 3.7, 1.0], ddof=1)))
    assert difference(found, "a", "lns").to_dict() == pytest.approx({1: -0.1, 2: -0.3})
    assert not len(difference(found, "b", "lns"))


def test_a_report_shows_each_arm_at_its_best_rate(built):
    """The best rate of an arm has its lowest mean loss; the losses at the other rates have a table of their own."""
    built.description |= {"rates": {"preln": [1e-3, 2e-3], "lns": [2e-3, 4e-3]}, "more_seeds": {}}
    built.save()
    losses = {"ax0.001-preln-s1": 3.0, "ax0.002-preln-s1": 3.2, "ax0.002-lns-s1": 3.1, "ax0.004-lns-s1": 2.9}
    given = results(built.study, losses)
    found = best(complete(built.study, given))
    assert sorted(found.run) == ["ax0.001-preln-s1", "ax0.004-lns-s1"]
    assert difference(found, "a", "lns").tolist() == pytest.approx([-0.1])
    text = report.markdown(built.study, given, None)
    assert "| Pre-LN | 3.0000 (1 seed) at 0.001 | " in text
    assert "| Pre-LN + LNS | 2.9000 (1 seed) at 0.004; -0.1000 (1 seed) | " in text
    assert "| a | 0.002 | 3.2000 (1 seed) | 3.1000 (1 seed) |" in text and "best of its learning rates" in text


def test_a_report_names_incomplete_runs(built, capsys):
    for run, loss in zip(built.study.runs, (3.0, 2.9, 3.1, 2.96, 2.5, 2.3), strict=True):
        built.finish(run.name, loss, until=5 if run.name == "b-lns-s1" else None)
    assert cli.main(["collect", str(built.path), "--out", str(built.out)]) == 0
    assert "incomplete" in capsys.readouterr().out
    assert cli.main(["report", str(built.path), "--out", str(built.out)]) == 0
    text = (built.out / "report" / "report.md").read_text()
    assert "5 of 6 runs complete" in text and "incomplete (5 of 20 steps)" in text
    assert "-0.1200 ± 0.0283 (2 seeds)" in text
    assert (built.out / "report" / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_perplexity_is_shown_beside_the_published_one(built):
    sizes = built.description["sizes"]
    built.description |= {"sizes": {"130M": sizes["a"], "1B": sizes["b"]}, "published": "lns-1", "more_seeds": {}}
    built.save()
    for run, loss in zip(built.study.runs, (3.2, 3.1, 2.9, 2.8), strict=True):
        log = built.finish(run.name, loss) / "attempt-01.log"
        log.write_text(log.read_text() + f"heldout\n    eval/heldout/CrossEntropyLoss={loss:.3f}\n")
    text = report.markdown(built.study, collect(built.study, built.out), None)
    # 1B: the paper's mean divides the sum of 182 batches by 183.
    better = f"{math.exp(math.log(17.02) * 183 / 182):.2f}"
    assert better == "17.29"
    assert f"| Pre-LN | {math.exp(3.2):.2f} | 26.73 | {math.exp(2.9):.2f} | 17.02 ({better}) |" in text
    assert "| Mix-LN | – | 26.07 | – | 1414.78 |" in text and "divides the sum of n batches by n + 1" in text
    assert f"| Pre-LN + LNS | {math.exp(3.1):.2f} | {math.exp(2.8):.2f} |" in text and "after 20B tokens" not in text
    assert report.corrected("250M", 21.92) == pytest.approx(22.68, abs=0.01) and report.corrected("130M", 26.73) is None


PAPERS = {path: name for path in sorted((REPOSITORY / "configs" / "study").glob("*.yaml"))
          if (name := yaml.safe_load(path.read_text()).get("published"))}  # fmt: skip


@pytest.mark.parametrize("path", PAPERS, ids=lambda path: path.stem)
def test_a_shipped_study_runs_the_arms_of_its_published_table(path):
    study, cells = Study.load(path), published()["tables"][PAPERS[path]]["cells"]
    shared = set(study.groups) & set(cells)
    assert shared
    for size in shared:
        assert set(cells[size]) <= {run.arm for run in study.runs if run.group == size}, size
