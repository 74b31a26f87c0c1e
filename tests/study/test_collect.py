"""The results of a study are read from its runs, and runs that cannot be compared are refused."""

import json
from pathlib import Path

import pytest
from support.studies import REPOSITORY, megatron_log, olmo_log

from olmo_lns.errors import LNSConfigError
from olmo_lns.study import cli
from olmo_lns.study.collect import collect, read_results
from olmo_lns.study.describe import Study
from olmo_lns.study.engines import ENGINES
from olmo_lns.study.engines.base import flatten
from olmo_lns.study.planning import compare_arms

RUNS = ("a-preln-s1", "a-lns-s1", "a-preln-s2", "a-lns-s2", "b-preln-s1", "b-lns-s1")


def finish_all(built):
    for name, loss in zip(RUNS, (3.0, 2.9, 3.1, 2.96, 2.5, 2.3), strict=True):
        built.finish(name, loss)
    return built.study


def test_a_complete_study_has_the_final_loss_of_each_run_and_an_incomplete_run_none(built):
    study = finish_all(built)
    results = collect(study, built.out)
    assert [*results.run] == list(RUNS) and {*results.status} == {"complete"}
    # The last 10 % of 20 steps are steps 19 and 20; their losses are final + 0.05 and final.
    assert [*results.loss] == pytest.approx([3.025, 2.925, 3.125, 2.985, 2.525, 2.325])
    built.finish("a-lns-s2", 1.0, until=19)
    assert cli.main(["collect", str(built.path), "--out", str(built.out)]) == 0
    table = read_results(built.out / "results.csv").set_index("run")
    assert table.loss.tolist() == pytest.approx([*results.loss[:3], float("nan"), 2.525, 2.325], nan_ok=True)
    cut = table.loc["a-lns-s2"]
    assert (cut.status, cut.step) == ("incomplete", 19)


def test_a_missing_run_is_refused_unless_missing_runs_are_allowed(built):
    for name in RUNS[:-1]:
        built.finish(name, 3.0)
    with pytest.raises(LNSConfigError, match="Run b-lns-s1 is missing"):
        collect(built.study, built.out)
    last = collect(built.study, built.out, allow_missing=True).iloc[-1]
    assert (last.run, last.status, last.step) == ("b-lns-s1", "missing", 0) and last.loss != last.loss
    (built.out / "b-lns-s1").mkdir()
    (built.out / "b-lns-s1" / "attempt-01.log").write_text("starting\n")  # killed in its first seconds
    assert collect(built.study, built.out).status.iloc[-1] == "missing"


def test_runs_that_cannot_be_compared_are_refused_with_the_difference(built):
    built.description |= {"sizes": {"b": built.description["sizes"]["b"]}, "more_seeds": {}}
    built.save()
    study = built.study
    for run in study.runs:
        built.finish(run.name, 2.5)
    for changed, message in (
        ({"model.layer_norm_type": "rms"}, "b-lns-s1 does not match its arm. model.layer_norm_type is 'rms'"),
        ({"optimizer.weight_decay": 0.3}, "b-preln-s1 and b-lns-s1 differ in optimizer.weight"),
        ({"global_train_batch_size": 16}, "settings. global_train_batch_size is 16 in the folder and 8 in this study"),
        ({"optimizer.learning_rate": 2e-3}, "optimizer.learning_rate is 0.002 in the folder and 0.001 in this study"),
        ({"data.paths": ["/elsewhere.npy"]}, "differ in data.paths: the first has"),
    ):
        built.finish("b-lns-s1", 2.3, **changed)
        with pytest.raises(LNSConfigError, match=message):
            collect(study, built.out)


def test_a_setting_that_nobody_knows_is_reported_and_refuses_nothing(built, caplog):
    runs = [run for run in built.study.runs if run.name in ("b-preln-s1", "b-lns-s1")]
    settings = {run.name: run.settings | {"a_newer_option": run.arm} for run in runs}
    compare_arms(runs, settings)
    assert "a_newer_option ('preln' in b-preln-s1, 'lns' in b-lns-s1)" in caplog.text


def test_of_every_setting_it_is_known_whether_it_changes_the_loss():
    """OLMo's by its own config, Megatron's model by its parser's recorded arguments."""
    from olmo.config import TrainConfig
    from omegaconf import OmegaConf

    config = OmegaConf.to_container(OmegaConf.structured(TrainConfig))
    arguments = json.loads((Path(__file__).parents[1] / "support" / "megatron_arguments.json").read_text())
    megatron = {name: None for recorded in arguments.values() for name in recorded}
    for name, settings in (("olmo", flatten(config)), ("megatron", megatron)):
        engine = ENGINES[name]
        for key in settings:
            known = [bool(keys.match(key)) for keys in (engine.compared_keys, engine.ignored_keys)]
            assert sum(known) == 1 or key in engine.arm_keys, f"{name}: {key} is in {sum(known)} sets"


@pytest.mark.parametrize(
    "key", ["enable_hyper_connections", "enable_mhc_connections", "encoder_num_layers", "decoder_seq_length"]
)
def test_a_setting_of_megatron_that_changes_the_model_is_compared(key):
    engine = ENGINES["megatron"]
    assert engine.compared_keys.match(key) and not engine.ignored_keys.match(key)


def test_a_log_of_another_length_is_refused_and_a_restart_is_no_difference(built):
    built.description |= {"sizes": {"b": built.description["sizes"]["b"]}, "more_seeds": {}}
    built.save()
    study, names = built.study, ["b-preln-s1", "b-lns-s1"]
    for name in names:  # the machine, and the run's own checkpoint
        built.finish(name, 3.0, load_path=str(built.out / name / "step10-unsharded"), device_train_microbatch_size=1)
    assert len(collect(study, built.out)) == len(names)
    (built.out / "b-lns-s1" / "attempt-01.log").write_text(olmo_log({1: 3.0}, total=999))
    with pytest.raises(LNSConfigError, match="has 999 steps, but its config has 20"):
        collect(study, built.out)


def test_a_description_whose_arms_differ_in_other_settings_is_refused_before_it_runs(built):
    built.description |= {"seeds": [], "more_seeds": {"a": {"preln": [1, 2], "lns": [2]}, "b": {"preln": [1]}}}
    for key, value in (("global_train_batch_size", 16), ("load_path", "/elsewhere/step100")):
        built.description["arms"] = {"preln": {}, "lns": {key: value}}
        built.save()
        for words in (["plan", str(built.path)], ["launch", str(built.path), "--out", str(built.out)]):
            with pytest.raises(LNSConfigError, match=f"a-preln-s2 and a-lns-s2 differ in {key}: the first"):
                cli.main(words)


def megatron_run(out, run, **arguments):
    shown = {"seed": 1234, "save": f"/runs/{run.name}", "layernorm_scaling": "lns" in run.name, "rank": 0}
    shown |= {**run.settings, "no_scaled_init": "lns" not in run.name, "data_path": "['/data/x']"} | arguments
    block = "".join(f"  {key} {'.' * (48 - len(key))} {value}\n" for key, value in sorted(shown.items()))
    head = f"------------------------ arguments ------------------------\n{block}-------------------- end of arguments -----\n"
    (out / run.name).mkdir(parents=True, exist_ok=True)
    (out / run.name / "attempt-01.log").write_text(head + megatron_log({10: 5.0, 20: 4.0, 30: 3.0, 40: 2.0}, total=40))


def test_runs_of_megatron_are_collected_and_compared(tmp_path):
    (tmp_path / "megatron.yaml").write_text(
        f"name: m\nframework: megatron\nconfig: {REPOSITORY}/configs/megatron/{{size}}-{{arm}}.yaml\n"
        "sizes:\n  60M: {train-iters: 40}\narms: [preln, lns]\nfinal_fraction: 0.5\n"
    )
    study, out = Study.load(tmp_path / "megatron.yaml"), tmp_path / "out"
    first, second = study.runs
    megatron_run(out, first, load=f"/runs/{first.name}/", micro_batch_size=1)
    megatron_run(out, second)
    results = collect(study, out)
    assert [(r.status, r.loss, r.points, r.parameters) for r in results.itertuples()] == [
        ("complete", 2.5, 2, 85_074_432)
    ] * 2
    for changed, message in (
        ({"data_path": "['/data/y']"}, r"differ in data_path: .*x.*y"),
        ({"num_layers": 9}, "other settings. num_layers is '9' in the folder and 8 in this study"),
        ({"layernorm_scaling_exponent": 0.25}, "does not match its arm. layernorm_scaling_exponent is 0.25"),
    ):
        megatron_run(out, second, **changed)
        with pytest.raises(LNSConfigError, match=message):
            collect(study, out)


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (lambda text: "", "cut"),
        (lambda text: text[: len(text) // 2].rpartition(",")[0], "cut"),
        (lambda text: text + text, "Unable to parse string"),
        (lambda text: text + text.splitlines(keepends=True)[1], "named twice"),
        (lambda text: text.replace("run,", "name,", 1), "run"),
        (lambda text: text.replace("3.0", "3.\0", 1), "NUL bytes"),
    ],
    ids=["empty", "cut in a row", "two headers", "a run twice", "another column", "NUL bytes"],
)
def test_damaged_results_are_refused_and_named(tmp_path, damage, found):
    head = "run,size,arm,seed,parameters,status,has_settings,step,steps,tokens,loss,points,heldout"
    rows = [f"a-{arm}-s1,a,{arm},1,100,complete,True,10,10,100,3.0,1," for arm in ("preln", "lns")]
    whole = "\n".join([head, *rows, ""])
    (path := tmp_path / "results.csv").write_text(whole.replace("\n", "\r\n"))
    assert list(read_results(path)["loss"]) == [3.0, 3.0]  # Windows' line ends are no damage
    path.write_text(damage(whole))
    with pytest.raises(LNSConfigError, match=f"results.csv cannot be read: .*({found})"):
        read_results(path)
