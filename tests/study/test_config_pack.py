"""The config pack from where it is installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from olmo_lns.cli import main
from olmo_lns.study import pack


def test_list_names_every_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "list"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    listed = [line.split()[0] for line in lines]
    repository = Path(__file__).parents[2] / "configs"
    assert listed == sorted(
        str(path.relative_to(repository))
        for path in repository.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    )
    (about,) = [line.split(maxsplit=1)[1] for line in lines if line.startswith("olmo/60M-lns.yaml")]
    assert about == "OLMo, 60M, arm lns"


def test_copy_a_file_and_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "copy", "olmo/60M-lns", "-o", str(tmp_path)]) == 0
    source = pack.folder() / "olmo" / "60M-lns.yaml"
    assert (tmp_path / "60M-lns.yaml").read_bytes() == source.read_bytes()
    assert main(["config", "copy", "study", "-o", str(tmp_path / "mine")]) == 0
    assert (tmp_path / "mine" / "tiny.yaml").is_file()
    assert main(["config", "copy", "olmo/60M-lns", "-o", str(tmp_path)]) == 1
    assert "exists" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["/bin/true", "../tests", "../pyproject.toml"])
def test_nothing_outside_the_pack_is_copied(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "copy", name, "-o", str(tmp_path / "out")]) == 1
    assert f"the pack has no {name!r}" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_an_unknown_name_has_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "copy", "olmo/60M-lsn.yaml"]) == 1
    assert "did you mean 'olmo/60M-lns.yaml'" in capsys.readouterr().err


def test_what_is_copied_says_which_configs_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As commands that bring them to their place; then there is nothing left to say."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    assert main(["config", "copy", "study/llama-c4.yaml", "-o", "here"]) == 0
    command = "olmo-lns config copy olmo/llama-c4 -o olmo/llama-c4"
    assert capsys.readouterr().err == f"note: what was copied names olmo/llama-c4 of the pack: {command}\n"
    assert main(["config", "copy", "study"]) == 0
    notes = capsys.readouterr().err.splitlines()
    assert [note.partition(": olmo-lns ")[2] for note in notes] == [
        f"config copy {name} -o {name}" for name in ("olmo", "megatron", "olmo_core")
    ]
    for note in notes:
        assert main(note.partition(": olmo-lns ")[2].split()) == 0
    assert capsys.readouterr().err == ""
    assert main(["config", "copy", "study", "-o", "again"]) == 0 and not capsys.readouterr().err
    assert main(["config", "copy", "study/tiny.yaml", "-o", "here"]) == 0
    assert "config copy study/tiny-base.yaml -o here/tiny-base.yaml" in capsys.readouterr().err
