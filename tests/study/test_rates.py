"""The report of rates, depths and tokens: what it says of a table whose numbers are known, and of an incomplete one."""

from __future__ import annotations

import csv
import math
from dataclasses import asdict, fields
from pathlib import Path

import pytest
from support.studies import REPOSITORY, Built

from olmo_lns.errors import LNSConfigError
from olmo_lns.study import cli, rates, rates_report
from olmo_lns.study.arms import ARMS
from olmo_lns.study.results import Result, read_results


def run(
    arm: str, rate: float, loss: float, *, seed: int = 1, layers: int = 24, steps: int = 100, variant: str = ""
) -> Result:
    size = f"{layers}x{rate:g}to{steps}" + (f"_{variant}" if variant else "")
    return Result(
        f"{size}-{arm}-s{seed}", size, arm, seed, 1000, "complete", steps, steps, 1024 * steps, loss + 0.5, 0.1, 5,
        loss, 60.0, "test", loss, layers, 64, rate,
    )  # fmt: skip


@pytest.fixture
def table() -> list[Result]:
    """Pre-LN is best at 1e-3, LNS at 3e-3; LNS is behind after 100 steps and ahead after 200, on seeds 2 and 3."""
    found = []
    for steps, shift in ((100, 0.1), (200, -0.2)):
        for rate, one, other in ((3e-4, 2.2, 2.5), (1e-3, 2.0, 2.3), (3e-3, 2.1, 2.0 + shift), (1e-2, 2.4, 2.6)):
            found += [run("preln", rate, one, steps=steps), run("lns", rate, other, steps=steps)]
        for seed, noise in ((2, 0.01), (3, -0.01)):
            found.append(run("preln", 1e-3, 2.0, seed=seed, steps=steps))
            found.append(run("lns", 3e-3, 2.0 + shift + noise, seed=seed, steps=steps))
    return found


def test_rates_are_chosen_on_one_seed_and_reported_on_the_others(table: list[Result]) -> None:
    short, long = rates.groups(table)
    assert short.choosing == 1 and short.rates == [3e-4, 1e-3, 3e-3, 1e-2]
    best = short.best("lns")
    assert best is not None and (best.rate, best.loss, best.edge) == (3e-3, 2.1, "")
    gap = short.gap("lns", "preln")
    assert gap is not None and not gap.chosen_on and gap.values == pytest.approx((0.11, 0.09))
    # Two values at +-0.01: standard error 0.01, Student's t with one degree of freedom 12.706.
    assert rates.interval(gap.values) == pytest.approx(0.12706, rel=1e-4)
    series = [(group.tokens, group.gap("lns", "preln").mean) for group in (short, long)]  # type: ignore[union-attr]
    assert rates.crossings(series) == [(102_400, 204_800)]
    text = rates_report.sections(table)["tokens"]
    assert "changes its sign between 102K and 205K tokens" in text and "+0.100 ± 0.127 (2 seeds) against preln" in text


def test_an_edge_a_hole_and_a_missing_seed_are_named(table: list[Result]) -> None:
    cut = [r for r in table if r.seed == 1 and r.steps == 100 and r.learning_rate != 3e-4]
    cut.remove(next(r for r in cut if r.arm == "preln" and r.learning_rate == 3e-3))
    cut.append(run("preln", 1e-3, 2.1, variant="qk"))
    missing = rates_report.sections(cut)["missing"]
    for line in (
        "the best rate of preln, 0.001, is the lowest tried",
        "preln was not run at 0.003 (seed 1)",
        "no seed but the one that chose the rates",
        "24 blocks, width 64, 102K tokens, qk: not both of lns and preln",
        "No depth was trained at several budgets",
    ):
        assert line in missing
    gap = rates.groups(cut)[0].gap("lns", "preln")
    assert gap is not None and gap.chosen_on
    assert "(the seed that chose the rates)" in rates_report.sections(cut)["best"]


def test_arms_with_another_head_are_compared_with_each_other() -> None:
    group = rates.groups([run(arm, 1e-3, 2.0) for arm in ("preln", "lns", "preln_head", "lns_head", "lnsbefore")])[0]
    found = {arm: rates_report.base_of(arm, group) for arm in group.arms}
    assert found["lns_head"] == "preln_head" and found["lns"] == found["lnsbefore"] == found["preln_head"] == "preln"


def test_a_trunk_is_no_end_point(table: list[Result]) -> None:
    assert rates.groups([*table, run("lns", 3e-3, 0.5, variant="trunk")]) == rates.groups(table)


def test_the_interval() -> None:
    assert rates.interval([1.0]) is None
    assert rates.interval([0.0, 1.0, 2.0, 3.0, 4.0]) == pytest.approx(2.7764 * math.sqrt(2.5 / 5), rel=1e-4)


def write(path: Path, rows: list[Result]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["identity", *(field.name for field in fields(Result))])
        writer.writeheader()
        writer.writerows({"identity": str(n), **asdict(row)} for n, row in enumerate(rows))
    return path


def test_figures_and_page_from_the_table_alone(table: list[Result], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    deeper = [run(r.arm, r.learning_rate or 0, (r.heldout or 0) + 0.1, layers=48) for r in table if r.steps == 100]
    path = write(tmp_path / "runs.csv", [*table, *deeper])
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n<!-- study:best -->\nold\n<!-- /study -->\n\nown words\n")
    command = ["report", str(path), "--report", str(tmp_path / "report"), "--page", str(page)]
    assert cli.main(command) == 0
    assert {p.name for p in (tmp_path / "report").iterdir()} == {"report.md", "rates.png", "depth.png", "tokens.png"}
    first = page.read_text()
    assert ARMS["lns"].label in first and "own words" in first and "old" not in first
    assert cli.main(command) == 0 and page.read_text() == first
    page.write_text("# No regions\n")
    with pytest.raises(
        LNSConfigError, match="page.md: no region <!-- study:NAME --> … <!-- /study --> to fill; names: "
    ):
        cli.main(command)
    page.write_text("<!-- study:bests -->\n<!-- /study -->\n")
    with pytest.raises(LNSConfigError, match="no part 'bests'"):
        cli.main(command)
    with pytest.raises(LNSConfigError, match="can be reported only"):
        cli.main(["collect", str(path), "--out", str(tmp_path)])


def test_a_study_over_rates_has_this_report(built: Built, capsys: pytest.CaptureFixture[str]) -> None:
    """Through collect, from logs as OLMo writes them: depth and rate stand in the tables."""
    sizes = built.description["sizes"]
    built.description["sizes"] = {f"{n}x": sizes["a"] | {"optimizer.learning_rate": n * 1e-3} for n in (1, 2)}
    built.description |= {"more_seeds": {}, "finished": "runs.csv"}
    (built.path.parent / "runs.csv").touch()
    built.save()
    for n, each in enumerate(built.study.runs):
        built.finish(each.name, 2.0 + n / 10)
    out = ["--out", str(built.out)]
    assert cli.main(["collect", str(built.path), *out]) == cli.main(["report", str(built.path), *out]) == 0
    found = read_results(built.out / "results.csv")
    assert [(r.layers, r.width, r.learning_rate) for r in found] == [(2, 48, 1e-3)] * 2 + [(2, 48, 2e-3)] * 2
    assert "| Pre-LN | **2.025** | 2.225 |" in (built.out / "report" / "report.md").read_text()
    # A table from before the columns were there is read, and its place filled in by the next collect.
    table = built.path.parent / "runs.csv"
    whole = table.read_text()
    table.write_text("\n".join(line.rsplit(",", 3)[0] for line in whole.splitlines()) + "\n")
    assert cli.main(["report", str(table)]) == 0
    assert "its row has no depth and rate" in (table.parent / "report" / "report.md").read_text()
    assert cli.main(["collect", str(built.path), *out]) == 0 and table.read_text() == whole


def test_the_page_says_what_the_table_says() -> None:
    """docs/evidence.md against docs/evidence/runs.csv: the command on the page has been run."""
    from olmo_lns.study import finished

    page = REPOSITORY / "docs" / "evidence.md"
    parts = rates_report.sections(finished.read(REPOSITORY / "docs" / "evidence" / "runs.csv"), "evidence/report/")
    assert page.read_text() == rates_report.fill(page.read_text(), parts, page)
