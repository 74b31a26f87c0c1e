"""Numbers on the command line that make no sense are wrong usage, before anything is loaded; the group of a command."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest
from support import launch

from olmo_lns import cli
from olmo_lns.arguments import above_zero, at_least, seed


def test_numbers() -> None:
    assert [at_least(1)("+1"), at_least(0)(" 0 "), at_least(2)("100_000")] == [1, 0, 100_000]
    assert [above_zero("1e-3"), above_zero("20e9"), seed(str(2**63 - 1))] == [1e-3, 2e10, 2**63 - 1]
    for parse, text, said in (
        *((at_least(1), text, f"whole number >= 1, found '{text}'") for text in ("0", "-1", "1.5", "x", "")),
        *((above_zero, text, f"above 0, found '{text}'") for text in ("0", "-1", "nan", "inf", "x", "")),
        (seed, str(2**63), "below 2"),
    ):
        with pytest.raises(argparse.ArgumentTypeError, match=said):
            parse(text)


@pytest.mark.parametrize(
    "command",
    [
        "data check x --vocab-size=0",
        "data prepare text x --tokenizer t --eos 0 --out out --sequence=1",
        "data prepare text x --tokenizer t --eos 0 --out out --tokens=0",
        "config check x --gpus=0",
        "config check x --budget=0",
        "study launch study.yaml --out x --workers=0",
        "analyze layer-drop --model x --data y --num-fewshot=-1",
        "analyze all x --data y -o z --tokens=0",
        "demo --learning-rate=0",
        "demo --seeds=-1",
        "verify a b --prompts=0",
    ],
)
def test_every_command_refuses_them(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(command.split())
    flag, _, value = command.rpartition(" ")[2].partition("=")
    error = capsys.readouterr().err
    assert f"argument {flag}" in error and f"found '{value}'" in error


LEFT = """
import os
from pathlib import Path
from olmo_lns.arguments import process_group

def gloo():
    return [task for task in Path("/proc/self/task").iterdir() if "gloo" in (task / "comm").read_text()]

with process_group():
    import torch._dynamo  # imports functions that have the default group as a default argument
    assert gloo(), "no thread of gloo's to look for"
assert not gloo(), "gloo's threads outlive the group"
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc: lists the threads of a process")
def test_no_thread_outlives_the_group(tmp_path):
    launch.run([sys.executable, "-c", LEFT], cwd=tmp_path, env=launch.environment(CUDA_VISIBLE_DEVICES="")).ok()


@pytest.mark.slow
def test_a_world_without_a_rank_is_an_error(tmp_path):
    """Not a group of one, which would do half of the work and say nothing."""
    code = "from olmo_lns.arguments import process_group\nwith process_group(): print('alone')"
    env = launch.environment(WORLD_SIZE="2", RANK=None, CUDA_VISIBLE_DEVICES="")
    result = launch.run([sys.executable, "-c", code], cwd=tmp_path, env=env)
    assert result.code != 0 and "RANK" in result.last_line() and "alone" not in result.text
