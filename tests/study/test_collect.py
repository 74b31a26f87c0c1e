"""Logs in real formats are read, damage is named, and runs that cannot be compared are refused."""

import pytest
from support.studies import REPOSITORY, megatron_log, olmo_log

from olmo_lns.errors import LNSConfigError
from olmo_lns.study import cli
from olmo_lns.study.collect import collect, curve_of, read_results
from olmo_lns.study.describe import Study
from olmo_lns.study.files import attempts, next_attempt

RUNS = ("a-preln-s1", "a-lns-s1", "a-preln-s2", "a-lns-s2", "b-preln-s1", "b-lns-s1")


def read(folder, *texts):
    """Return the curve of attempts with these logs."""
    for number, text in enumerate(texts, start=1):
        (folder / f"attempt-{number:02d}.log").write_text(text)
    return curve_of(folder)


def test_a_console_log_of_megatron_has_its_losses(tmp_path):
    text = megatron_log({10: "1.082000E+01", 20: "9.500000E+00"})
    for step, where in ((10, ""), (20, " on validation set"), (30, " on test set")):  # as Megatron prints them
        text += (
            f" validation loss at iteration {step}{where} | lm loss value: 9.{step}0000E+00 | lm loss PPL: 1.0E+04 | \n"
        )
    curve = read(tmp_path, text)
    assert curve.losses == {10: 10.82, 20: 9.5} and curve.total_steps == 100 and curve.heldout == {10: 9.1, 20: 9.2}
    assert not curve.is_done
    end = "[after training is done] datetime: 2026-01-01 10:00:00 \n"
    for total, ending, is_done in ((20, "", True), (27, end, True), (27, "", False)):
        text = megatron_log({1: "11", 10: "10", 20: "9"}, total)  # multiples of --log-interval only
        assert read(tmp_path, text + ending).is_done is is_done


@pytest.mark.parametrize("log", [olmo_log, megatron_log])
def test_a_log_that_was_cut_inside_a_number_ends_at_the_step_before(tmp_path, log):
    """The 2 that is left of 2.9876 is not the loss of that step."""
    text = "\x1b[1mstart\x1b[0m\n" + log({5: "3.1", 10: "2.9876"}, total=10)
    curve = read(tmp_path, text)
    assert curve.losses == {5: 3.1, 10: 2.9876} and curve.total_steps == 10 and curve.is_done
    for length in (1, -2):  # inside the number, and before it
        cut = read(tmp_path, text[: text.index("2.9876") + length])
        assert cut.losses == {5: 3.1} and cut.last == 5 and not cut.is_done
    assert read(tmp_path, "Traceback\n").losses == {} and curve_of(tmp_path / "none") is None


def test_attempts_are_sorted_by_number_and_a_later_one_replaces_the_steps_that_it_repeats(tmp_path):
    names = [f"attempt-{number:02d}" for number in (2, 10, 99, 100, 101)]
    for name in reversed(names):
        (tmp_path / f"{name}.log").touch()
    assert [path.stem for path in attempts(tmp_path)] == names
    assert next_attempt(tmp_path).name == "attempt-102.log"  # never the name of a log that exists
    heldout = "eval\n    eval/heldout/CrossEntropyLoss=2.{step}\n"
    first = olmo_log({1: 3.0, 2: 2.9}) + heldout.format(step=2) + olmo_log({3: 2.8, 4: 2.8}) + heldout.format(step=4)
    second = olmo_log({3: 2.81})
    for texts in ((first, second), (first + second, "")):  # two logs, or both in one
        curve = read(tmp_path, *texts)
        assert curve.losses == {1: 3.0, 2: 2.9, 3: 2.81} and curve.heldout == {2: 2.2} and curve.last == 3
    with pytest.raises(LNSConfigError, match="attempt-02.log: 99 total steps at step 5, 10 before"):
        read(tmp_path, first, olmo_log({5: 2.6}, total=99))


@pytest.mark.parametrize("interval", [1, 5])
def test_steps_without_a_loss_are_refused(tmp_path, interval):
    """A lost log would change the mean at the end of its arm alone."""

    def log(first, last):
        return olmo_log({interval * step: 3.0 for step in range(first, last + 1)})

    assert read(tmp_path, log(1, 4), log(3, 10)).last == 10 * interval
    message = f"no log line between the steps {4 * interval} and {7 * interval}, .* distance is {interval}:"
    with pytest.raises(LNSConfigError, match=message):
        read(tmp_path, log(1, 4), log(7, 10))


def test_skipped_steps_and_another_log_interval_are_no_gap_and_the_first_loss_after_a_restart_is_in_no_mean(tmp_path):
    whole = megatron_log({step: 3.0 for step in range(1, 21)})
    skipped = "".join(
        line.replace("lm loss: 3.0 | ", "") if " 1" in line[20:40] else line for line in whole.splitlines(True)
    )
    curve = read(tmp_path, skipped, megatron_log({step: 3.0 for step in range(25, 101, 5)}))
    assert len(curve.losses) < 36 and curve.logged == [*range(1, 21), *range(25, 101, 5)]
    restarted = megatron_log({1: 9.0, 10: 5.0, 20: 4.0, 30: 3.0}), megatron_log({31: 9.0, 40: 3.0})
    assert read(tmp_path, *restarted).final(0.5) == (3.0, 2)


def test_logs_by_hand_are_read_before_and_after_the_attempts_by_their_steps(tmp_path):
    for name, first in (("slurm-1", 1), ("attempt-01", 3), ("attempt-02", 5), ("console-10", 9), ("console-9", 7)):
        text = olmo_log({step: step for step in (first, first + 1)})
        (tmp_path / f"{name}.log").write_text(text.replace("]\n", "]\x1b[0m\n"))
    assert curve_of(tmp_path).losses == {step: step for step in range(1, 11)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (olmo_log({1: 3.0, 2: "nan"}), "loss is nan at step 2"),
        (olmo_log({1: 3.0, 2: "2.#5"}), "loss '2.#5' at step 2 is not a number"),
        (olmo_log({1: 3.0}) + "\0\0\n" + olmo_log({2: 3.0}), "it has NUL bytes"),
    ],
)
def test_a_damaged_log_is_refused_and_named(tmp_path, text, message):
    with pytest.raises(LNSConfigError, match=f"attempt-01.log: .*{message}"):
        read(tmp_path, text)


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
    with pytest.raises(LNSConfigError, match="run b-lns-s1 is missing"):
        collect(built.study, built.out)
    last = collect(built.study, built.out, allow_missing=True).iloc[-1]
    assert (last.run, last.status, last.step) == ("b-lns-s1", "missing", 0) and last.loss != last.loss
    (built.out / "b-lns-s1").mkdir()
    (built.out / "b-lns-s1" / "attempt-01.log").write_text("starting\n")  # killed in its first seconds
    assert collect(built.study, built.out).status.iloc[-1] == "missing"


def test_runs_that_cannot_be_compared_are_refused_with_the_difference(built):
    study = finish_all(built)
    for changed, message in (
        ({"model.layer_norm_type": "rms"}, "b-lns-s1 is not its arm: model.layer_norm_type='rms'"),
        ({"optimizer.weight_decay": 0.3}, "b-preln-s1 and b-lns-s1 differ in more than the arm: optimizer.weight"),
        ({"global_train_batch_size": 16}, "settings: global_train_batch_size is 16 in the folder, 8 in this study"),
        ({"optimizer.learning_rate": 2e-3}, "optimizer.learning_rate is 0.002 in the folder, 0.001 in this study"),
        ({"data.paths": ["/elsewhere.npy"]}, "differ in more than the arm: data.paths"),
    ):
        built.finish("b-lns-s1", 2.3, **changed)
        with pytest.raises(LNSConfigError, match=message):
            collect(study, built.out)


def test_a_log_of_another_length_is_refused_and_a_restart_is_no_difference(built):
    study = finish_all(built)
    for name in RUNS:  # the machine, and the run's own checkpoint
        built.finish(name, 3.0, load_path=str(built.out / name / "step10-unsharded"), device_train_microbatch_size=1)
    assert len(collect(study, built.out)) == len(RUNS)
    (built.out / "b-lns-s1" / "attempt-01.log").write_text(olmo_log({1: 3.0}, total=999))
    with pytest.raises(LNSConfigError, match="counts to 999 steps, the study's config to 20"):
        collect(study, built.out)


def test_a_description_whose_arms_differ_in_other_settings_is_refused_before_it_runs(built):
    built.description |= {"seeds": [], "more_seeds": {"a": {"preln": [1, 2], "lns": [2]}, "b": {"preln": [1]}}}
    for key, value in (("global_train_batch_size", 16), ("load_path", "/elsewhere/step100")):
        built.description["arms"] = {"preln": {}, "lns": {key: value}}
        built.save()
        for words in (["plan", str(built.path)], ["launch", str(built.path), "--out", str(built.out)]):
            with pytest.raises(LNSConfigError, match=f"a-preln-s2 and a-lns-s2 differ in more than the arm: {key}"):
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
        ({"data_path": "['/data/y']"}, r"data_path is .*x.* and .*y"),
        ({"num_layers": 9}, "other settings: num_layers is '9' in the folder, 8 in this study"),
        ({"layernorm_scaling_exponent": 0.25}, "is not its arm: layernorm_scaling_exponent=0.25"),
    ):
        megatron_run(out, second, **changed)
        with pytest.raises(LNSConfigError, match=message):
            collect(study, out)
