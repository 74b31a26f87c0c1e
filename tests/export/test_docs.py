"""docs/export.md: the code that it shows runs, and the options that it names exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.exports import byte_tokenizer, export, save_olmo

from olmo_lns.export.cli import _parser
from olmo_lns.record import accepted

TEXT = (Path(__file__).parents[2] / "docs" / "export.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


def test_use_with_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = byte_tokenizer(tmp_path / "tokenizer.json")
    changes = {"eos_token_id": 0, "pad_token_id": 0, "max_sequence_length": 64}
    save_olmo(tmp_path / "lns", tokenizer=tokenizer, layer_norm_type="lns_rms", embedding_size=64, **changes)
    assert export(tmp_path / "lns", tmp_path / "model", "--format", "hf", "--dtype", "bf16") == 0
    monkeypatch.chdir(tmp_path)
    (code,) = blocks("python")
    capsys.readouterr()
    exec(compile(code, "docs/export.md", "exec"), {})
    assert capsys.readouterr().out.startswith("THE FACTOR IS")


def test_commands_parse() -> None:
    lines = [line.split("#")[0].split() for block in blocks("bash") for line in block.splitlines()]
    commands = [words[2:] for words in lines if words[:2] == ["olmo-lns", "export"]]
    assert len(commands) == 5
    for words in commands:
        _parser().parse_args(words)


def test_overrides_exist() -> None:
    """The one table of differences, in docs/olmo.md."""
    text = (Path(__file__).parents[2] / "docs" / "olmo.md").read_text(encoding="utf-8")
    table = text.split("| checkpoint → run |", 1)[1].split("\n\n", 1)[0]
    named = {word for row in table.splitlines()[2:] for word in re.findall(r"`([a-z-]+)`", row.split("|")[2])}
    assert accepted(",".join(named)) == named
    assert {"lns-to-preln", "preln-to-lns", "folded-to-lns", "exponent"} <= named
