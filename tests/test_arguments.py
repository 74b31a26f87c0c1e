"""Numbers on the command line that make no sense are wrong usage, before anything is loaded."""

from __future__ import annotations

import argparse

import pytest

from olmo_lns import cli
from olmo_lns.arguments import above_zero, at_least


def test_whole_numbers() -> None:
    assert [at_least(1)("+1"), at_least(0)(" 0 "), at_least(2)("100_000")] == [1, 0, 100_000]
    for smallest, text in ((1, "0"), (0, "-1"), (1, "1.5"), (1, "x"), (1, ""), (2, "1")):
        with pytest.raises(argparse.ArgumentTypeError, match=f"whole number >= {smallest}, found '{text}'"):
            at_least(smallest)(text)


def test_numbers_above_zero() -> None:
    assert [above_zero("1e-3"), above_zero("20e9"), above_zero("2")] == [1e-3, 2e10, 2.0]
    for text in ("0", "-1", "nan", "inf", "x", ""):
        with pytest.raises(argparse.ArgumentTypeError, match=f"above 0, found '{text}'"):
            above_zero(text)


@pytest.mark.parametrize(
    "command",
    [
        "data check x --vocab-size=0",
        "data check x --sequence=0",
        "data prepare text x --tokenizer t --eos 0 --out out --sequence=1",
        "data prepare text x --tokenizer t --eos 0 --out out --shard=0",
        "data prepare text x --tokenizer t --eos 0 --out out --tokens=0",
        "config check x --gpus=0",
        "config check x --budget=0",
        "study launch study.yaml --out x --workers=0",
        "study all study.yaml --out x --workers=-1",
        "analyze layer-drop --model x --data y --num-fewshot=-1",
        "analyze variance --model x --data y --tokens=0",
        "demo --steps=0",
        "demo --learning-rate=0",
        "verify a b --prompts=0",
    ],
)
def test_every_command_refuses_them(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(command.split())
    flag, _, value = command.rpartition(" ")[2].partition("=")
    error = capsys.readouterr().err
    assert f"argument {flag}" in error and f"found '{value}'" in error
