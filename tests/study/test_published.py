"""The papers' tables beside a study's own numbers, and parameters saved at equal loss."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from support.studies import REPOSITORY, Built

from olmo_lns import schemes
from olmo_lns.errors import LNSConfigError
from olmo_lns.study.arms import ARMS
from olmo_lns.study.collect.gather import collect
from olmo_lns.study.plan.published import PUBLISHED, corrected
from olmo_lns.study.plan.spec import Study
from olmo_lns.study.report import fit, published_report
from olmo_lns.study.report import scaling as report
from olmo_lns.study.report.fit import Point


@pytest.fixture
def tabled(built: Built) -> Built:
    sizes = built.description["sizes"]
    built.description |= {"sizes": {"130M": sizes["a"], "1B": sizes["b"]}, "published": "lns-1", "more_seeds": {}}
    built.save()
    for run, loss in zip(built.study.runs, (3.2, 3.1, 2.9, 2.8), strict=True):
        log = built.finish(run.name, loss) / "attempt-01.log"
        log.write_text(log.read_text() + f"heldout\n    eval/heldout/CrossEntropyLoss={loss:.3f}\n")
    return built


def test_perplexity_stands_beside_the_published_one(tabled: Built) -> None:
    results = collect(tabled.study, tabled.out)
    text = published_report.beside(tabled.study, results)
    # 1B: 182 batches, and a mean over 183.
    better = f"{math.exp(math.log(17.02) * 183 / 182):.2f}"
    assert better == "17.29"
    assert f"| Pre-LN | {math.exp(3.2):.2f} | 26.73 | {math.exp(2.9):.2f} | 17.02 ({better}) |" in text
    assert "| Mix-LN | – | 26.07 | – | 1414.78 |" in text and "divides the sum of n batches by n + 1" in text
    whole = report.markdown(tabled.study, results, None)
    assert f"| 1B | {math.exp(2.9):.2f} | {math.exp(2.8):.2f} |" in whole and "after 20B tokens" not in whole
    assert "Parameters saved at equal loss" in whole


def test_every_table_names_arms_and_positive_numbers() -> None:
    for table in PUBLISHED.values():
        for cells in table.cells.values():
            assert cells and set(cells) <= set(ARMS) and all(value > 1 for value in cells.values())
    assert corrected("250M", 21.92) == pytest.approx(22.68, abs=0.01) and corrected("130M", 26.73) is None


def test_an_unknown_table_is_named(tabled: Built) -> None:
    tabled.description["published"] = "lns1"
    with pytest.raises(LNSConfigError, match="published 'lns1' .did you mean 'lns-1'"):
        tabled.save()


def test_parameters_saved_follow_the_two_laws() -> None:
    sizes = (1_000_000, 10_000_000, 100_000_000)
    base = [Point("s", n, 1, 20 * n**-0.1, None) for n in sizes]
    other = [replace(point, loss=point.loss * 0.5**0.1) for point in base]  # as if of twice the parameters
    assert fit.saved_parameters(other, base) == (100_000_000, pytest.approx(5e7), False)
    size, needed, outside = fit.saved_parameters(base, other) or (0, 0, False)
    assert (size, needed, outside) == (100_000_000, pytest.approx(2e8), True)
    assert fit.saved_parameters(other, base[:1]) is None


@pytest.mark.parametrize("path", sorted((REPOSITORY / "configs" / "study").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_shipped_study_runs_the_arms_of_its_table(path: Path) -> None:
    if not (name := yaml.safe_load(path.read_text()).get("published")):
        pytest.skip("no table of the papers")
    study, cells = Study.load(path), PUBLISHED[name].cells
    assert any(size in cells for size in study.sizes)
    for size in set(study.sizes) & set(cells):
        arms = {run.arm for run in study.runs if run.size == size}
        assert set(cells[size]) <= arms, size


def test_the_tiny_study_has_every_scheme() -> None:
    study = Study.load(REPOSITORY / "configs" / "study" / "tiny-schemes.yaml")
    assert {ARMS[name].scheme.name for name in study.arms} == {
        name for name in schemes.names() if not schemes.definition(name).olmo_only
    }
    assert {run.shape.tokens for run in study.runs[:2]} == {204_800}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny-schemes", "evidence-controls", "evidence-tokens"])
def test_every_model_of_a_shipped_study_trains(name: str) -> None:
    """Each run's own config, fewer blocks: OLMo builds it, and its loss has a gradient in every parameter."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("olmo", reason="needs ai2-olmo")
    from olmo.model import OLMo

    seen = set()
    for run in Study.load(REPOSITORY / "configs" / "study" / f"{name}.yaml").runs:
        if (run.arm, kind := str(run.loaded.model)) in seen:
            continue
        seen.add((run.arm, kind))
        torch.manual_seed(1)
        model = OLMo(run.loaded.model.update_with(n_layers=4))
        rows = torch.randint(0, 256, (2, 64))
        logits = model(rows).logits[:, :-1, :257]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        assert 4 < loss.item() < 9, run.name
        assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters()), run.name
        if "nogain" in run.size:
            assert not [key for key, _ in model.named_parameters() if "norm" in key or "ln_f" in key]
    assert len(seen) >= 3
