"""Collecting a study: an incomplete run is not averaged, and runs that cannot be compared are refused."""

import json

import pytest
from support.studies import REPOSITORY, megatron_log, olmo_log

from olmo_lns.errors import LNSConfigError
from olmo_lns.study import cli
from olmo_lns.study.collect.gather import collect, read_results, write_results
from olmo_lns.study.plan.check import compare_planned
from olmo_lns.study.plan.spec import Study

RUNS = ("a-preln-s1", "a-lns-s1", "a-preln-s2", "a-lns-s2", "b-preln-s1", "b-lns-s1")


def finish_all(built):
    for name, loss in zip(RUNS, (3.0, 2.9, 3.1, 2.96, 2.5, 2.3), strict=True):
        built.finish(name, loss)
    return built.study


def test_a_complete_study_gives_the_final_loss_of_each_run(built):
    study = finish_all(built)
    results = collect(study, built.out)
    assert [r.run for r in results] == list(RUNS) and {r.status for r in results} == {"complete"}
    # The last 10 % of 20 steps are steps 19 and 20; their losses are final + 0.05 and final.
    assert [r.loss for r in results] == pytest.approx([3.025, 2.925, 3.125, 2.985, 2.525, 2.325])
    write_results(results, built.out / "results.csv")
    assert read_results(built.out / "results.csv") == results


def test_an_incomplete_run_is_listed_without_a_final_loss(built):
    study = finish_all(built)
    built.finish("a-lns-s2", 1.0, until=19)
    results = {r.run: r for r in collect(study, built.out)}
    cut = results["a-lns-s2"]
    assert (cut.status, cut.step, cut.loss) == ("incomplete", 19, None) and cut.last_loss == pytest.approx(1.05)


def test_a_missing_run_is_refused_unless_missing_runs_are_allowed(built):
    for name in RUNS[:-1]:
        built.finish(name, 3.0)
    study = built.study
    with pytest.raises(LNSConfigError, match="run b-lns-s1 is missing"):
        collect(study, built.out)
    results = collect(study, built.out, allow_missing=True)
    assert (results[-1].run, results[-1].status, results[-1].loss) == ("b-lns-s1", "missing", None)


def test_a_run_killed_in_its_first_seconds_is_shown_as_missing(built):
    """The run has its stamp but no config.yaml of OLMo yet, so nothing can be compared with the other arm."""
    for name in RUNS:
        built.finish(name, 3.0, precision="amp_bf16")  # OLMo's launcher sets it, the description does not
    folder = built.out / "b-lns-s1"
    (folder / "config.yaml").unlink()
    (folder / "attempt-01.log").write_text("starting\n")
    result = collect(built.study, built.out)[-1]
    assert (result.run, result.status, result.step, result.loss) == ("b-lns-s1", "missing", 0, None)


def _log(built, text):
    (built.out / "b-lns-s1" / "attempt-01.log").write_text(text)


def again(built, key, value):
    """Change one key in the stamp of the last run."""
    path = built.out / "b-lns-s1" / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: _log(b, olmo_log({1: 3.0}, total=999)), "counts to 999 steps, the study's config to 20"),
        (
            lambda b: b.finish("b-lns-s1", 2.3, **{"model.layer_norm_type": "rms"}),
            "b-lns-s1 is not its arm: model.layer_norm_type='rms'",
        ),
        (
            lambda b: b.finish("a-lns-s1", 2.9, global_train_batch_size=16),
            "a-preln-s1 and a-lns-s1 differ in more than the arm: global_train_batch_size is 8 and 16",
        ),
        (lambda b: b.finish("a-lns-s1", 2.9, **{"optimizer.learning_rate": 2e-3}), "learning_rate is 0.001 and 0.002"),
        # The file has the same path and size but other content; then a variable changes what is trained.
        (lambda b: again(b, "data", [{"sha256": "0"}]), "b-preln-s1 and b-lns-s1 differ .*: data is .*train.npy"),
        (
            lambda b: again(b, "environment", {"OLMO_LNS_SCHEME": "lns"}),
            "environment is {} and {'OLMO_LNS_SCHEME': 'lns'}",
        ),
    ],
    ids=["length", "arm", "batch", "rate", "data", "environment"],
)
def test_runs_that_cannot_be_compared_are_refused_with_the_difference(built, change, message):
    study = finish_all(built)
    change(built)
    with pytest.raises(LNSConfigError, match=message):
        collect(study, built.out)


@pytest.mark.parametrize(
    ("name", "value"), [("OLMO_LNS_SCHEME", "lns:exponent=0.25"), ("OLMO_LNS_INITIALIZATION", "plain")]
)
def test_nothing_starts_under_an_environment_variable_that_would_change_an_arm(built, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    for command in (["launch", "--run"], ["stamp"]):
        with pytest.raises(LNSConfigError, match=f"{name}={value}: an arm sets its scheme"):
            cli.main([command[0], str(built.path), "--out", str(built.out), *command[1:]])
    assert not built.out.exists()


def test_arms_that_start_from_different_checkpoints_are_refused(built):
    """A start from a checkpoint in the run's own folder is a restart and no difference between arms."""
    study = finish_all(built)
    for name in RUNS:
        built.finish(name, 3.0, load_path=str(built.out / name / "step10-unsharded"))
    assert len(collect(study, built.out)) == len(RUNS)
    built.finish("a-preln-s1", 3.0, load_path="/elsewhere/step100")
    built.finish("a-lns-s1", 3.0, load_path="/elsewhere/step200")
    with pytest.raises(LNSConfigError, match="load_path is '/elsewhere/step100' and '/elsewhere/step200'"):
        collect(study, built.out)
    built.finish("a-lns-s1", 3.0, load_path="/elsewhere/step100")
    assert len(collect(study, built.out)) == len(RUNS)
    built.finish("a-lns-s1", 3.0, load_path=str(built.out / "a-lns-s10" / "step10"))  # another run's folder
    with pytest.raises(LNSConfigError, match="load_path is '/elsewhere/step100' and .*a-lns-s10"):
        collect(study, built.out)


def test_a_description_whose_arms_differ_in_other_settings_is_refused_before_it_runs(built):
    built.description["arms"] = {"preln": {}, "lns": {"global_train_batch_size": 16}}
    built.save()
    for command in (["plan"], ["launch", "--out", str(built.out)]):
        with pytest.raises(LNSConfigError, match="differ in more than the arm"):
            cli.main([command[0], str(built.path), *command[1:]])


def test_arms_that_differ_under_a_later_seed_are_refused(built):
    built.description |= {"seeds": [], "more_seeds": {"a": {"preln": [1, 2], "lns": [2]}, "b": {"preln": [1]}}}
    built.description["arms"] = {"preln": {}, "lns": {"global_train_batch_size": 16}}
    built.save()
    with pytest.raises(LNSConfigError, match="a-preln-s2 and a-lns-s2 differ in more than the arm"):
        compare_planned(built.study.runs)


def megatron_study(tmp_path):
    path = tmp_path / "megatron.yaml"
    path.write_text(
        f"name: m\nframework: megatron\nconfig: {REPOSITORY}/configs/megatron/{{size}}-{{arm}}.yaml\n"
        "sizes:\n  60M: {train-iters: 40}\narms: [preln, lns]\nfinal_fraction: 0.5\n"
    )
    return Study.load(path), tmp_path / "out"


def megatron_run(out, name, **arguments):
    shown = {"global_batch_size": 256, "seed": 6198, "save": f"/runs/{name}", "layernorm_scaling": "lns" in name}
    shown |= {"no_scaled_init": "lns" not in name, "data_path": "['/data/x']", "rank": 0} | arguments
    block = "".join(f"  {key} {'.' * (48 - len(key))} {value}\n" for key, value in sorted(shown.items()))
    head = f"------------------------ arguments ------------------------\n{block}-------------------- end of arguments -----\n"
    (out / name).mkdir(parents=True, exist_ok=True)
    (out / name / "attempt-01.log").write_text(head + megatron_log({10: 5.0, 20: 4.0, 30: 3.0, 40: 2.0}, total=40))


def test_runs_of_megatron_are_collected_and_compared(tmp_path):
    """Arms on other data or from another checkpoint are refused; a start from the run's own folder is a restart."""
    study, out = megatron_study(tmp_path)
    first, second = (run.name for run in study.runs)
    megatron_run(out, first, load=f"/runs/{first}/")
    megatron_run(out, second)
    results = collect(study, out)
    assert [(r.status, r.loss, r.points, r.parameters) for r in results] == [("complete", 2.5, 2, 85_074_432)] * 2
    for changed, message in (
        ({"data_path": "['/data/y']"}, r"data_path is .*x.* and .*y"),
        ({"load": "/elsewhere"}, "load is None and '/elsewhere'"),
    ):
        megatron_run(out, second, **changed)
        with pytest.raises(LNSConfigError, match=message):
            collect(study, out)
