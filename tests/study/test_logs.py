"""Logs in the formats of the frameworks and launchers are read; a damaged or mixed log is refused and named."""

import contextlib
import io
import random
import re
import subprocess
import sys
import time

import pytest
from support.studies import megatron_log, olmo_log

from olmo_lns.errors import LNSConfigError
from olmo_lns.study.logs import Curve, find_logs, next_log, read_curve


def read(folder, *texts):
    """Return the curve of attempts with these logs."""
    folder.mkdir(exist_ok=True)
    for number, text in enumerate(texts, start=1):
        (folder / f"attempt-{number:02d}.log").write_text(text)
    return read_curve(folder)


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
        text = megatron_log({1: 11.0, 10: 10.0, 20: 9.0}, total)  # multiples of --log-interval only
        assert read(tmp_path, text + ending).is_done is is_done


@pytest.mark.parametrize("log", [olmo_log, megatron_log])
def test_a_log_that_was_cut_inside_a_number_ends_at_the_step_before(tmp_path, log):
    """The 2 that is left of 2.988 is not the loss of that step."""
    text = "\x1b[1mstart\x1b[0m\n" + log({5: 3.1, 10: 2.988}, total=10)
    curve = read(tmp_path, text)
    assert curve.losses == {5: 3.1, 10: 2.988} and curve.total_steps == 10 and curve.is_done
    for length in (1, -2):  # inside the number, and before it
        cut = read(tmp_path, text[: text.index("2.988") + length])
        assert cut.losses == {5: 3.1} and cut.last == 5 and not cut.is_done
    assert read(tmp_path, "Traceback\n").losses == {} and read_curve(tmp_path / "none") is None


def test_attempts_are_sorted_by_number_and_a_later_one_replaces_the_steps_that_it_repeats(tmp_path):
    names = [f"attempt-{number:02d}" for number in (2, 10, 99, 100, 101)]
    for name in reversed(names):
        (tmp_path / f"{name}.log").touch()
    assert [path.stem for path in find_logs(tmp_path)] == names
    assert next_log(tmp_path).name == "attempt-102.log"  # never the name of a log that exists
    heldout = "eval\n    eval/heldout/CrossEntropyLoss=2.{step}00\n"
    first = olmo_log({1: 3.0, 2: 2.9}) + heldout.format(step=2) + olmo_log({3: 2.8, 4: 2.8}) + heldout.format(step=4)
    second = olmo_log({3: 2.81})
    for texts in ((first, second), (first + "OLMo starts again\n" + second, "")):  # two logs, or both in one
        curve = read(tmp_path, *texts)
        assert curve.losses == {1: 3.0, 2: 2.9, 3: 2.81} and curve.heldout == {2: 2.2} and curve.last == 3
    with pytest.raises(LNSConfigError, match="attempt-02.log: The run has 99 steps in all at step 5, but 10 before"):
        read(tmp_path, first, olmo_log({5: 2.6}, total=99))


@pytest.mark.parametrize("interval", [1, 5])
def test_steps_without_a_loss_are_refused(tmp_path, interval):
    """A lost log would change the mean at the end of its arm alone."""

    def log(first, last):
        return olmo_log({interval * step: 3.0 for step in range(first, last + 1)})

    assert read(tmp_path, log(1, 4), log(3, 10)).last == 10 * interval
    message = f"no line between the steps {4 * interval} and {7 * interval}. Expected one every {interval} steps"
    with pytest.raises(LNSConfigError, match=message):
        read(tmp_path, log(1, 4), log(7, 10))


def test_skipped_steps_and_another_log_interval_are_no_gap_and_the_first_loss_after_a_restart_is_in_no_mean(tmp_path):
    whole = megatron_log({step: 3.0 for step in range(1, 21)})
    skipped = "".join(
        line.replace("lm loss: 3.000000E+00 | ", "") if " 1" in line[20:40] else line for line in whole.splitlines(True)
    )
    curve = read(tmp_path, skipped, megatron_log({step: 3.0 for step in range(25, 101, 5)}))
    assert len(curve.losses) < 36 and curve.logged == [*range(1, 21), *range(25, 101, 5)]
    restarted = megatron_log({1: 9.0, 10: 5.0, 20: 4.0, 30: 3.0}), megatron_log({31: 9.0, 40: 3.0})
    assert read(tmp_path, *restarted).final(0.5) == (3.0, 2)


def test_logs_by_hand_are_read_before_and_after_the_attempts_by_their_steps(tmp_path):
    for name, first in (("slurm-1", 1), ("attempt-01", 3), ("attempt-02", 5), ("console-10", 9), ("console-9", 7)):
        text = olmo_log({step: step for step in (first, first + 1)})
        (tmp_path / f"{name}.log").write_text(text.replace("]\n", "]\x1b[0m\n"))
    assert read_curve(tmp_path).losses == {step: step for step in range(1, 11)}


LOSSES = {step: 4 - 0.3 * step for step in range(8, 13)}
#: Launcher -> the label that it puts before each line of a rank.
LABELS = {
    "srun --label": "{rank}: ",
    "srun --label with ten ranks": " {rank}: ",
    "torchrun --tee 3": "[default{rank}]:",
    "both": "0: [default{rank}]:",
    "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[rank{rank}]:",
    "mpirun --tag-output": "[1,{rank}]<stdout>:",
    "pdsh": "node-{rank}: ",
}


def labeled(text, label, rank):
    return "".join(f"{label.format(rank=rank)}{line}" for line in text.splitlines(keepends=True))


def shuffled(first, second, seed):
    """Mix two lists of texts, each in its order."""
    draw, texts = random.Random(seed), [list(first), list(second)]
    mixed = []
    while any(texts):
        mixed.append(draw.choice([text for text in texts if text]).pop(0))
    return "".join(mixed)


@pytest.mark.parametrize("launcher", LABELS)
@pytest.mark.parametrize("log", [olmo_log, megatron_log])
def test_a_log_with_labels_is_read_also_between_the_lines_of_other_ranks(tmp_path, log, launcher):
    text = log(LOSSES)
    other = "2026-01-01 10:00:00.000\thost:1\tolmo.train:1233\tINFO\t[step=99/100,epoch=0]\nW1127 a warning\n" * 20
    expected = read(tmp_path, text)
    lines = [labeled(part, LABELS[launcher], rank) for rank, part in enumerate((text, other))]
    curve = read(tmp_path, shuffled(*(part.splitlines(keepends=True) for part in lines), seed=1))
    assert curve == expected and len(curve.losses) == len(LOSSES)


def test_what_torchrun_makes_of_a_log_is_read(tmp_path):
    """torchrun repeats its label inside a line that it finds half written."""
    from torch.distributed.elastic.multiprocessing.tail_log import TailLog

    text, log, tee = olmo_log(LOSSES), tmp_path / "stdout", io.StringIO()
    log.touch()
    tail = TailLog("", {0: str(log)}, tee, {0: "[default0]:"}, interval_sec=0.001).start()
    middle = text.index("EntropyLoss")
    for part in (text[:middle], text[middle:]):
        with log.open("a") as file:
            file.write(part)
        time.sleep(0.05)
    tail.stop()
    assert "train/Cross[default0]:EntropyLoss" in tee.getvalue()
    assert read(tmp_path, tee.getvalue()) == read(tmp_path, text)


@pytest.mark.parametrize("log", [olmo_log, megatron_log])
@pytest.mark.parametrize("damage", ["\n", "[rank1]: a warning\n", "\ufffd", ""])
def test_a_log_that_is_damaged_at_any_place_is_refused_or_has_no_wrong_loss(tmp_path, log, damage):
    """A line break, a line of another process, a bad character, or one character that is missing."""
    text = log({10: 10.82, 11: 3.025, 12: 0.9876, 13: 0.5}, total=20)
    truth, refused = read(tmp_path, text).losses, 0
    for place in range(len(damage) % 4, len(text), 4):
        try:
            curve = read(tmp_path, text[:place] + damage + text[place + (not damage) :])
        except LNSConfigError:
            refused += 1
        else:
            assert curve.losses.items() <= truth.items(), text[place - 10 : place + 10]
            assert len(curve.losses) >= 3
    assert refused > 9


@pytest.mark.parametrize("log", [olmo_log, megatron_log])
@pytest.mark.parametrize("unit", ["line", "character"])
def test_a_log_of_two_ranks_is_refused_or_read_from_one_of_them(tmp_path, log, unit):
    first, second = ({step: loss + 0.025 * rank for step, loss in LOSSES.items()} for rank in (0, 1))
    truths = [read(tmp_path, log(losses)).losses for losses in (first, second)]
    texts = [log(first), log(second).replace("host:0", "host:1")]
    for seed in range(10):
        if unit == "line":
            parts = [text.splitlines(keepends=True) for text in texts]
        else:
            draw = random.Random(seed)
            parts = [re.findall(rf"(?s).{{1,{draw.randint(20, 400)}}}", text) for text in texts]
        try:
            losses = read(tmp_path, shuffled(*parts, seed=seed)).losses
        except LNSConfigError:
            continue
        assert any(losses.items() <= truth.items() for truth in truths), shuffled(*parts, seed=seed)


#: A rank of a launch: it prints the log that is in a file, line by line or in parts of any length.
RANK = """
import os, pathlib, random, re, sys, time
rank = int(os.environ["RANK"])
text, draw = pathlib.Path(sys.argv[2 + rank]).read_text(), random.Random(rank)
for part in text.splitlines(True) if sys.argv[1] == "lines" else re.findall("(?s).{1,60}", text):
    sys.stdout.write(part); sys.stdout.flush()
    time.sleep(0.002)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("log", "unit"),
    [
        (olmo_log, "lines"),
        pytest.param(olmo_log, "parts", marks=pytest.mark.exhaustive),
        pytest.param(megatron_log, "lines", marks=pytest.mark.exhaustive),
        (megatron_log, "parts"),
    ],
)
def test_what_torchrun_tees_of_two_ranks_is_read_or_refused(tmp_path, log, unit):
    """In parts, torchrun writes a half line of one rank where the other one's line is not complete either."""
    losses = {step: 10 - step / 8 for step in range(1, 41)}
    script, texts = tmp_path / "rank.py", [log(losses), "W1127 a warning of this rank\n" * 60]
    script.write_text(RANK)
    truth, runs = read(tmp_path / "truth", texts[0]), []
    for second in (texts[1], log({step: loss + 0.025 for step, loss in losses.items()})):
        files = [tmp_path / f"rank-{rank}" for rank in (0, 1)]
        for file, text in zip(files, (texts[0], second), strict=True):
            file.write_text(text)
        command = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "--tee=3", script, unit, *files]
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=True)
        runs.append(done.stdout)
        assert "[default0]:" in done.stdout and "[default1]:" in done.stdout
    if unit == "lines":
        assert read(tmp_path, runs[0]) == truth
    else:
        with contextlib.suppress(LNSConfigError):
            assert read(tmp_path, runs[0]).losses.items() <= truth.losses.items()
    with pytest.raises(LNSConfigError):
        read(tmp_path, runs[1])


@pytest.mark.parametrize("log", [olmo_log, megatron_log])
def test_a_log_with_nul_bytes_is_refused_and_one_that_ends_in_them_too(tmp_path, log):
    """A file system leaves them where a machine crashed before the data reached the disk."""
    text = log(LOSSES)
    for place in (len(text) // 2, len(text) - 1):
        with pytest.raises(LNSConfigError, match="NUL bytes"):
            read(tmp_path, text[:place] + "\0" * 512 + text[place:])


@pytest.mark.parametrize("line", ["worker-0  | {}", "2026-01-01T10:00:00Z {}", "rank0 {}"])
def test_lines_with_an_unknown_label_are_refused(tmp_path, line):
    text = "\n".join(line.format(text) for text in olmo_log(LOSSES).splitlines())
    with pytest.raises(LNSConfigError, match="cannot be read. The line may have an unknown label"):
        read(tmp_path, f"{text}\n")


def test_the_final_loss_of_a_long_run_takes_linear_time():
    curve = Curve()
    for step in range(1, 100_001):
        curve.add_step(step, "100000")
        curve.add_loss(step, 3.0)
    begun = time.process_time()
    assert curve.final(1.0) == (3.0, 100_000)
    assert time.process_time() - begun < 2


def test_a_log_with_other_messages_between_the_steps_is_read_in_linear_time(tmp_path):
    """A message with other metrics comes before the loss of each step. A restart may repeat such a step."""
    steps = {step: 3.0 for step in range(10, 60_001, 10)}
    text = re.sub(r"(.*\[step=.*\n)", r"\1    System/Peak GPU Memory (MB)=1,234\n\1", olmo_log(steps, total=60_000))
    begun = time.process_time()
    assert read(tmp_path, text).losses == steps
    assert time.process_time() - begun < 2
    first = text[: text.index("[step=60/")].rpartition("\n")[0] + "\n"
    again = olmo_log({step: 2.9 for step in (20, 40)}, total=60_000)
    assert read(tmp_path, first + "starts again\n" + again).losses == {10: 3.0, 20: 2.9, 40: 2.9}


@pytest.mark.parametrize("log", [olmo_log, megatron_log])
def test_many_attempts_are_read_and_averaged_in_linear_time(tmp_path, log):
    """300 attempts of 100 steps, each of which repeats the last 10 steps of the one before."""
    begun = time.process_time()
    texts = (log({step: 3.0 for step in range(90 * first + 1, 90 * first + 101)}, total=27_010) for first in range(300))
    curve = read(tmp_path, *texts)
    assert curve.is_done and curve.final(1.0) == (3.0, 27_010)
    assert time.process_time() - begun < 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (olmo_log({1: 3.0, 2: "nan"}), "The loss is nan at step 2"),
        (olmo_log({1: 3.0, 2: "2.#5"}), "The loss '2.#5' at step 2 is not a number"),
        (olmo_log({1: 3.0}) + "\0\0\n" + olmo_log({2: 3.0}), "It has NUL bytes"),
    ],
)
def test_a_damaged_log_is_refused_and_named(tmp_path, text, message):
    with pytest.raises(LNSConfigError, match=f"attempt-01.log: .*{message}"):
        read(tmp_path, text)
