"""Several budgets from one run: the learning rate is constant in the trunk and falls in each branch."""

import pytest
from support.studies import REPOSITORY

from olmo_lns.study import cli
from olmo_lns.study.collect import folder as logs
from olmo_lns.study.collect.gather import collect, identity
from olmo_lns.study.launch import start as launch
from olmo_lns.study.launch.start import examine
from olmo_lns.study.plan import cost as plan
from olmo_lns.study.plan.check import arm_problems
from olmo_lns.study.plan.spec import Study


@pytest.fixture
def branched(built):
    built.description |= {"sizes": {"a": built.description["sizes"]["a"]}, "horizons": [8, 16], "decay": 0.25}
    built.description.pop("more_seeds")
    built.save()
    return built


def test_a_branched_study_has_a_trunk_and_a_branch_for_each_horizon(branched):
    study = branched.study
    assert [run.name for run in study.runs[:3]] == ["a_trunk-preln-s1", "ato8-preln-s1", "ato16-preln-s1"]
    trunk, first, second = study.runs[:3]
    assert [run.shape.steps for run in study.runs[:3]] == [12, 8, 16]
    assert [run.start_checkpoint for run in (first, second)] == [f"{trunk.name}/step{n}-unsharded" for n in (6, 12)]
    words = launch.command(study, second, branched.out)
    assert f"--load_path={branched.out}/a_trunk-preln-s1/step12-unsharded" in words
    assert "--scheduler.warmup_min_lr=${optimizer.learning_rate}" in words
    flops = {row["run"]: row["flops"] for row in plan.rows(study, 0.4)}
    assert flops[second.name] == pytest.approx(flops[trunk.name] / 3)
    assert examine(second, branched.out, held=False).state == "not started"
    assert [arm_problems(run.arm, run.settings, run.engine) for run in study.runs] == [[]] * 6


def test_the_rate_is_constant_in_the_trunk_and_falls_in_a_branch(branched):
    """OLMo's own schedulers warm up, keep the rate, and from the start of the branch lower it linearly to a tenth."""
    from olmo.optim import build_scheduler

    trunk, _, branch = branched.study.runs[:3]
    before, after = (build_scheduler(run.loaded) for run in (trunk, branch))
    assert [before.get_lr(1e-3, step, 12) for step in (1, 2, 11)] == pytest.approx([5e-4, 1e-3, 1e-3])
    assert [after.get_lr(1e-3, step, 16) for step in (12, 14, 16)] == pytest.approx([1e-3, 5.5e-4, 1e-4])


def test_a_change_of_the_trunk_changes_the_identity_of_its_branches(branched):
    known = [identity(run) for run in branched.study.runs]
    assert len(set(known)) == 6
    branched.description["sizes"]["a"]["scheduler.t_warmup"] = 3  # a setting of the trunk alone
    branched.save()
    changed = [identity(run) for run in branched.study.runs]
    assert [old == new for old, new in zip(known, changed, strict=True)] == [False] * 6


def test_a_branch_does_not_start_without_its_trunk(branched, capsys):
    runs = [run for run in branched.study.runs if run.name == "ato8-lns-s1"]
    assert launch.run_here(branched.study, runs, branched.out) == 1
    assert "goes on from a_trunk-lns-s1/step6-unsharded, which is not in" in capsys.readouterr().err


@pytest.mark.exhaustive
@pytest.mark.slow
def test_branches_continue_from_a_checkpoint_of_the_trunk(tmp_path):
    """In real training the first loss of a branch is the trunk's: weights and batch are the same."""
    pytest.importorskip("olmo", reason="needs ai2-olmo")
    path = tmp_path / "micro.yaml"
    sizes = "{s: {model.n_layers: 2, model.d_model: 32, model.n_heads: 2, scheduler.t_warmup: 2}}"
    path.write_text(
        f"name: micro\nconfig: {REPOSITORY}/configs/study/tiny-base.yaml\ndata: demo\nsizes: {sizes}\n"
        "horizons: [8, 16]\ndecay: 0.25\nfinished: runs.csv\n"
        "arms: [preln, lns]\nseeds: [1]\nlaunch: {threads: 1, workers: 2}\n"
    )
    out = tmp_path / "out"
    (tmp_path / "runs.csv").touch()
    for _ in range(2):  # the second launch finds everything done
        assert cli.main(["launch", str(path), "--out", str(out), "--run"]) == 0
    curves = {
        size: logs.merge(logs.read(log) for log in logs.attempts(out / f"{size}-lns-s1"))
        for size in ("s_trunk", "sto8", "sto16")
    }
    assert [(min(c.losses), c.last) for c in curves.values()] == [(1, 12), (7, 8), (13, 16)]
    assert curves["sto8"].losses[7] == curves["s_trunk"].losses[7]
    study = Study.load(path)
    assert [result.status for result in collect(study, out)] == ["complete"] * 6
    assert cli.main(["collect", str(path), "--out", str(out)]) == 0
    assert launch.run_here(study, study.runs, tmp_path / "elsewhere") == 0  # all of them are in the table
