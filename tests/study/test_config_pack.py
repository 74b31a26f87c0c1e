"""The config pack from where it is installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from olmo_lns.cli import main
from olmo_lns.study import config_pack


def test_list_names_every_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "list"]) == 0
    listed = capsys.readouterr().out.split()
    repository = Path(__file__).parents[2] / "configs"
    assert listed == sorted(
        str(path.relative_to(repository))
        for path in repository.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    )


def test_copy_a_file_and_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "copy", "olmo/60M-lns", "-o", str(tmp_path)]) == 0
    source = config_pack.folder() / "olmo" / "60M-lns.yaml"
    assert (tmp_path / "60M-lns.yaml").read_bytes() == source.read_bytes()
    assert main(["config", "copy", "study", "-o", str(tmp_path / "mine")]) == 0
    assert (tmp_path / "mine" / "tiny.yaml").is_file()
    assert main(["config", "copy", "olmo/60M-lns", "-o", str(tmp_path)]) == 1
    assert "exists" in capsys.readouterr().err


def test_an_unknown_name_has_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "copy", "olmo/60M-lsn.yaml"]) == 1
    assert "did you mean 'olmo/60M-lns.yaml'" in capsys.readouterr().err
