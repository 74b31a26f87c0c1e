"""Sources of text that cannot be read: one line that names the file, and the line of it."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from olmo_lns.errors import LNSConfigError
from olmo_lns.study.data.documents import documents

_LINE = b'{"text": "a"}\n'


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("short.jsonl.gz", gzip.compress(_LINE * 5000)[:-20], "after line .*cannot be read"),
        ("plain.jsonl.gz", _LINE, "after line 0: cannot be read: .*gzip"),
        ("latin.jsonl", _LINE + b'{"text": "\xe9"}\n', "cannot be read: .*utf-8"),
        ("number.jsonl", _LINE + b'{"text": 5}\n', "line 2: 'text' is no text but int"),
        ("null.jsonl", b'{"text": null}\n', "line 1: 'text' is no text but NoneType"),
        ("other.jsonl", b'{"body": "a"}\n', "line 1: no JSON object with 'text'"),
    ],
)
def test_lines_that_are_no_text(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(LNSConfigError, match=f"{name}.*{message}"):
        list(documents("jsonl", [str(tmp_path / name)]))


def test_a_hub_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    def offline(*_: object, **__: object) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(LNSConfigError, match="allenai/c4 cannot be read from the hub: no network"):
        list(documents("c4", ["train"]))
