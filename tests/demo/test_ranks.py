"""The demo is of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from olmo_lns import cli

pytest.importorskip("olmo", reason="needs ai2-olmo")


@pytest.mark.parametrize(
    ("world", "message"),
    [
        ("2", "the demo runs in one process: found WORLD_SIZE=2"),
        ("two", "WORLD_SIZE=two: expected a whole number >= 1"),
    ],
)
def test_ranks_do_not_write_the_same_files(
    world: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", world)
    assert cli.main(["demo", "--steps", "6", "--layers", "4", "--d-model", "32", "--out", str(tmp_path / "out")]) == 1
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()
