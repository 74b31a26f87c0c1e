"""docs/evidence: the script on the committed tables, the numbers of the page, the experiments' schemes."""

import csv
import importlib.util
import math
import os
import statistics
import subprocess
import sys

import pytest
from support.studies import REPOSITORY

pytest.importorskip("scipy", reason="needs scipy")
np = pytest.importorskip("numpy")
pd = pytest.importorskip("pandas", reason="needs pandas")
FOLDER = REPOSITORY / "docs" / "evidence"
PAGE = (REPOSITORY / "docs" / "evidence.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def analysis():
    spec = importlib.util.spec_from_file_location("analysis", FOLDER / "analysis.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def signed(number):
    return f"{number:+.3f}".replace("-", "−")


def test_the_page_has_every_published_difference_and_the_figure_is_drawn(analysis, tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    rows = analysis.published()
    assert len(rows) == 21
    by_hand = {"d_preln": math.log(11.74 / 12.36), "d_scaled_init": math.log(11.74 / 12.29)}
    found = rows[(rows.source == "ProRes") & (rows["size"] == "350M")].iloc[0]
    assert found[list(by_hand)].to_dict() == pytest.approx(by_hand, abs=1e-12)
    for number in rows[["d_preln", "d_scaled_init"]].to_numpy().ravel():
        assert math.isnan(number) or signed(number) in PAGE, number
    analysis.draw(rows, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_has_the_contrasts_of_three_seeds_or_more(analysis):
    """Each setting at its longest: LNS against both baselines, with its interval."""
    runs = analysis.read()
    longest = runs.groupby(["table", "width", "layers", "variant"]).tokens.transform("max") == runs.tokens
    several = runs.groupby(analysis.SETTING).seed.transform("nunique") > 2
    found = analysis.contrasts(runs[longest & several])
    shown = found[(found.seeds > 2) & found.contrast.isin(["lns − preln", "lns − preln_scaled_init"])]
    assert len(shown) == 7
    for _, row in shown.iterrows():
        assert f"{signed(row['mean'])} ± {row['±']:.3f} ({row.seeds}" in PAGE


def test_the_main_contrast_equals_its_computation_by_hand(analysis):
    """The seeds are 2 to 5, at 16 tokens a parameter; 3.182 is Student's t at 3 degrees of freedom."""
    with (FOLDER / "runs.csv").open(newline="") as file:
        loss = {(row["size"], row["arm"], row["seed"]): float(row["heldout"]) for row in csv.DictReader(file)}
    gaps = [loss["24x0.01to3328", "lns", s] - loss["24x0.003to3328", "preln", s] for s in "2345"]
    half = 3.182 * statistics.stdev(gaps) / math.sqrt(4)
    runs = analysis.read()
    found = analysis.contrasts(runs[(runs.table == "runs") & (runs.width == 32) & (runs.tokens == 6815744)])
    row = found[(found.contrast == "lns − preln")].iloc[0]
    assert (row["mean"], row["±"]) == pytest.approx((statistics.fmean(gaps), half), abs=1e-4)
    assert (row.seeds, row.by, row.rates) == (4, "other seeds", "0.01, 0.003")


def test_of_the_six_planned_contrasts_holm_leaves_one(analysis):
    # 0.01 × 4, 0.02 × 3, 0.021 × 2 raised to the 0.06 before it, 0.5 × 1.
    assert analysis.holm(np.array([0.021, 0.5, 0.01, 0.02])) == pytest.approx([0.06, 0.5, 0.04, 0.06])
    rows = analysis.planned(analysis.read())
    assert len(rows) == 6 and rows.contrast[rows["p, Holm"] < 0.05].tolist() == ["lnsvalue − preln"]


def test_branches_of_a_trunk_are_one_trajectory(analysis):
    runs = analysis.read()
    mine = runs[(runs.table == "runs") & (runs.source == "evidence-tokens") & (runs.arm == "lns") & (runs.seed == 1)]
    assert len(mine[mine.learning_rate == 0.01]) == 6 and mine[mine.learning_rate == 0.01].trajectory.nunique() == 1
    assert runs[runs.source == "evidence-cpu"].trajectory.is_unique


def setting(**arms):
    rows = [(arm, rate, seed, loss) for arm, by in arms.items() for rate, losses in by.items()
            for seed, loss in enumerate(losses, start=1)]  # fmt: skip
    return pd.DataFrame(rows, columns=["arm", "learning_rate", "seed", "nats"])


def test_the_seed_that_chose_a_rate_is_left_out_of_the_contrast_where_there_are_others(analysis):
    runs = setting(preln={0.1: [2.0, 2.1], 0.2: [1.9, 2.2], 0.4: [2.3]}, lns={0.1: [2.1], 0.2: [1.8, 2.0], 0.4: [1.9]})
    seed, best = analysis.choose(runs)
    assert seed == 1 and best.rate.to_dict() == {"lns": 0.2, "preln": 0.2}
    found = analysis.paired(runs, "lns", "preln")
    assert (found["mean"], found["seeds"], found["by"]) == (pytest.approx(-0.2), 1, "other seeds")
    one_rate = setting(preln={0.1: [2.0], 0.2: [1.9]}, lns={0.1: [1.8]})
    assert analysis.paired(one_rate, "lns", "preln") is None  # no rate of LNS was chosen: it has one only
    alone = setting(preln={0.1: [2.0], 0.2: [1.9]}, lns={0.1: [1.8], 0.2: [1.7]})
    assert analysis.paired(alone, "lns", "preln")["by"] == "the choosing seed"


def test_the_experiments_load_by_an_entry_point(tmp_path):
    """Neither process imports them: a description's arm and a scheme's type load the module by its entry point."""
    about = tmp_path / "experiments-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: experiments\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[olmo_lns.schemes]\nexperiments = experiments\n")
    code = """
from olmo_lns.schemes import Scheme
from olmo_lns.arms import ARMS, arm_from_text
assert arm_from_text("lnsvalue").color == "#393B79" and arm_from_text("lnsuniform:factor=0.25").scheme.values == (("factor", 0.25),)
names = ("lnsvalue", "lnsrate", "lnsstart", "lnsuniform", "lnsreversed")
value, rate, start, uniform, back = (Scheme.of(name).plan(4, 16, "ff") for name in names)
assert Scheme.of("lnsvalue").plan(4, 16, "attn").output_scale == value.norm_scale == rate.norm_scale == 0.5
assert dict(rate.init_factors) == {"qkv": 2.0, "ff_in": 2.0} and dict(start.init_factors) == {"qkv": 0.5, "ff_in": 0.5}
assert start.norm_scale == 1 and uniform.norm_scale == 0.35 and back.norm_scale == 13**-0.5 and set(names) <= {*ARMS}
"""
    environment = {**os.environ, "PYTHONPATH": f"{FOLDER}{os.pathsep}{tmp_path}"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_exact_statements_about_lns_hold(analysis, capsys):
    pytest.importorskip("torch")
    analysis.equivalences()
    assert len(capsys.readouterr().out.splitlines()) == len(analysis.STATEMENTS) + 2
