"""Loss curves are read from logs in real formats, and each kind of damage is named."""

import pytest
from support.studies import megatron_log, olmo_log

from olmo_lns.errors import LNSConfigError
from olmo_lns.study.collect import folder as logs
from olmo_lns.study.collect.folder import attempts
from olmo_lns.study.engines.megatron import printed_arguments


def write(path, text):
    path.write_text(text)
    return path


def test_a_console_log_of_megatron_gives_its_losses_and_arguments(tmp_path):
    head = "------------------------ arguments ------------------------\n"
    head += "  adam_beta2 ...................................... 0.95\n"
    head += "  layernorm_scaling ............................... True\n"
    head += "-------------------- end of arguments ---------------------\n  not_one ..... 3\n"
    text = head + megatron_log({10: "1.082000E+01", 20: "9.500000E+00"})
    for step, where in (
        (10, ""),
        (20, " on validation set"),
        (30, " on test set"),
    ):  # as Megatron's evaluate_and_print_results prints them
        text += (
            f" validation loss at iteration {step}{where} | lm loss value: 9.{step}0000E+00 | lm loss PPL: 1.0E+04 | \n"
        )
    path = write(tmp_path / "a.log", text)
    curve = logs.read(path)
    assert curve.losses == {10: 10.82, 20: 9.5} and curve.total == 100 and curve.heldout == {10: 9.1, 20: 9.2}
    assert printed_arguments(path) == {"adam_beta2": "0.95", "layernorm_scaling": "True"}


@pytest.mark.parametrize("name", ["olmo.log", "megatron.log", "table.csv"])
def test_a_log_that_was_cut_inside_a_number_ends_at_the_step_before(tmp_path, name):
    """The 2 that is left of 2.9876 is not the loss of that step."""
    whole = {"olmo.log": "\x1b[1mstart\x1b[0m\n" + olmo_log({9: "3.1", 10: "2.9876"}, total=10)}
    whole["megatron.log"] = megatron_log({9: "3.1", 10: "2.9876"}, total=10)
    text = whole.get(name, "step,train/CrossEntropyLoss\n9,3.1\n10,2.9876\n")
    curve = logs.read(write(tmp_path / name, text))
    assert curve.losses == {9: 3.1, 10: 2.9876} and curve.total == (None if name == "table.csv" else 10)
    for length in (1, -2):  # inside the number, and before it
        cut = logs.read(write(tmp_path / name, text[: text.index("2.9876") + length]))
        assert cut.losses == {9: 3.1} and cut.last == 9
    assert logs.read(write(tmp_path / "c.log", "Traceback\n")).losses == {}


def test_attempts_are_sorted_by_number_and_not_by_name(tmp_path):
    for number in (2, 10, 99, 100, 101):
        write(tmp_path / f"attempt-{number:02d}.log", "")
    assert [path.stem for path in attempts(tmp_path)] == [f"attempt-{n}" for n in ("02", "10", "99", "100", "101")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (olmo_log({1: 3.0, 2: "nan"}), "loss is nan at step 2"),
        (megatron_log({10: "NaN"}), "loss is nan at step 10"),
        (olmo_log({1: 3.0, 2: "2.#5"}), "loss '2.#5' at step 2 is not a number"),
        (olmo_log({2: 3.0, 1: 2.5}), "step 1 comes after step 2"),
        (megatron_log({20: 3.0, 10: 2.5}), "step 10 comes after step 20"),
        (olmo_log({1: 3.0}).replace("train/CrossEntropyLoss", "train/Other") + olmo_log({2: 2.0}), "step 1 has no"),
        (olmo_log({1: 3.0}) + "\0\0\0", "NUL bytes"),
    ],
)
def test_a_damaged_log_is_refused_and_named(tmp_path, text, message):
    with pytest.raises(LNSConfigError, match=message) as caught:
        logs.read(write(tmp_path / "bad.log", text))
    assert "bad.log" in str(caught.value)


def test_a_resumed_run_replaces_the_steps_that_it_repeats(tmp_path):
    def attempt(number, losses, total=10):
        return logs.read(write(tmp_path / f"attempt-0{number}.log", olmo_log(losses, total=total)))

    first, second = attempt(1, {1: 3.0, 2: 2.9, 3: 2.8}), attempt(2, {3: 2.81, 4: 2.7})
    assert logs.merge([first, second]).losses == {1: 3.0, 2: 2.9, 3: 2.81, 4: 2.7}
    with pytest.raises(LNSConfigError, match=r"\[10, 99\] total steps"):
        logs.merge([first, attempt(3, {5: 2.6}, total=99)])
    with pytest.raises(LNSConfigError, match="no loss between steps 3 and 8"):  # a log is missing
        logs.merge([first, attempt(3, {8: 2.5, 9: 2.4, 10: 2.3})])
    (tmp_path / "bad.log").write_bytes(olmo_log({1: 3.0}).encode() + b"\xff\xfe\x80\n")
    with pytest.raises(LNSConfigError, match="not text at byte"):
        logs.read(tmp_path / "bad.log")


def test_a_csv_table_gives_its_losses(tmp_path):
    path = write(tmp_path / "a.csv", "step,train/CrossEntropyLoss\n1,3.0\n2,\n3,2.5\n")
    assert logs.read(path).losses == {1: 3.0, 3: 2.5}
    with pytest.raises(LNSConfigError, match="no step or loss column"):
        logs.read(write(tmp_path / "b.csv", "a,b\n1,2\n"))


def test_the_final_loss_is_the_mean_over_the_last_part_of_a_run(tmp_path):
    curve = logs.read(write(tmp_path / "a.log", olmo_log({step: float(step) + 1 for step in range(1, 11)})))
    mean, std, count = curve.final(0.2, 10)
    assert (mean, count) == (10.5, 2) and std == pytest.approx(0.70710678)
    with pytest.raises(LNSConfigError, match="log more often"):
        logs.Curve({10: 3.0}, 1000, "a.log").final(0.01, 1000)


def test_heldout_losses_of_all_attempts_are_merged(tmp_path):
    """OLMo prints a held-out loss after the lines of the step at which it was measured."""

    def evaluated(loss):
        return f"2026-01-01 10:00:00.000\thost:0\tolmo.train:967\tINFO\theldout\n    eval/heldout/CrossEntropyLoss={loss}\n"

    first = olmo_log({1: 3.0, 2: 2.9}, total=4) + evaluated(2.95) + olmo_log({3: 2.8}, total=4)
    write(tmp_path / "1.log", first)
    write(tmp_path / "2.log", olmo_log({3: 2.81, 4: 2.7}, total=4) + evaluated(2.75))
    curve = logs.merge(logs.read(tmp_path / name) for name in ("1.log", "2.log"))
    assert curve.heldout == {2: 2.95, 4: 2.75} and curve.losses == {1: 3.0, 2: 2.9, 3: 2.81, 4: 2.7}
