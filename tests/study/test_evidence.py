"""docs/evidence/analysis.py on the committed tables: its contrasts, its page and its figure."""

import csv
import importlib.util
import math
import statistics
import subprocess
import sys

import pytest
from support.studies import REPOSITORY

pytest.importorskip("scipy", reason="needs scipy")
pd = pytest.importorskip("pandas", reason="needs pandas")
FOLDER = REPOSITORY / "docs" / "evidence"


@pytest.fixture(scope="module")
def analysis():
    spec = importlib.util.spec_from_file_location("analysis", FOLDER / "analysis.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_analysis_writes_its_page_and_its_figure(tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    page, figure = tmp_path / "page.md", tmp_path / "figure.png"
    words = [sys.executable, str(FOLDER / "analysis.py"), "--page", str(page), "--figure", str(figure)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert figure.read_bytes().startswith(b"\x89PNG")
    committed = (REPOSITORY / "docs" / "evidence-runs.md").read_text(encoding="utf-8")
    assert page.read_text(encoding="utf-8") == committed


def test_the_main_contrast_equals_its_computation_by_hand(analysis):
    """The seeds are 2 to 5, at 16 tokens a parameter; 3.182 is Student's t at 3 degrees of freedom."""
    with (FOLDER / "runs.csv").open(newline="") as file:
        loss = {(row["size"], row["arm"], row["seed"]): float(row["heldout"]) for row in csv.DictReader(file)}
    gaps = [loss["24x0.01to3328", "lns", s] - loss["24x0.003to3328", "preln", s] for s in "2345"]
    half = 3.182 * statistics.stdev(gaps) / math.sqrt(4)
    runs = analysis.read(FOLDER)
    found = analysis.contrasts(runs[runs.table == "runs"])
    row = found[(found.width == 32) & (found.tokens == 6815744) & (found.contrast == "lns − preln")].iloc[0]
    assert (row["mean"], row["±"]) == pytest.approx((statistics.fmean(gaps), half), abs=1e-4)
    assert (row.seeds, row.by, row.rates) == (4, "other seeds", "0.01, 0.003")


def test_branches_of_a_trunk_are_one_trajectory(analysis):
    runs = analysis.read(FOLDER)
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
    assert 0.1 < best.parabola["preln"] < 0.2
    found = analysis.paired(runs, "lns", "preln")
    assert (found["mean"], found["seeds"], found["by"]) == (pytest.approx(-0.2), 1, "other seeds")
    one_rate = setting(preln={0.1: [2.0], 0.2: [1.9]}, lns={0.1: [1.8]})
    assert analysis.paired(one_rate, "lns", "preln") is None  # no rate of LNS was chosen: it has one only
    alone = setting(preln={0.1: [2.0], 0.2: [1.9]}, lns={0.1: [1.8], 0.2: [1.7]})
    assert analysis.paired(alone, "lns", "preln")["by"] == "the choosing seed"


@pytest.mark.slow
def test_the_exact_statements_about_lns_hold():
    done = subprocess.run([sys.executable, str(FOLDER / "equivalences.py")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
