"""A file that cannot be written to its end: what was there stays, and half of a new one is not left."""

from __future__ import annotations

import resource
from contextlib import contextmanager
from typing import Iterator

import pytest
from support.studies import Built

from olmo_lns.errors import LNSConfigError
from olmo_lns.study import cli
from olmo_lns.study.collect import gather as collect
from olmo_lns.study.collect import stamp as stamps
from olmo_lns.study.collect.finished import Finished


@contextmanager
def no_file_above(size: int) -> Iterator[None]:
    """Writing beyond it fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_stamp_is_whole_or_not_there(built: Built) -> None:
    run = built.study.runs[0]
    with pytest.raises(OSError, match="File too large"), no_file_above(100):
        stamps.stamp(built.study, run, built.out)
    assert list((built.out / run.name).iterdir()) == []
    path = stamps.stamp(built.study, run, built.out)
    assert path.stat().st_size > 100 and list((built.out / run.name).iterdir()) == [path]


def test_the_table_of_finished_runs_is_kept(built: Built) -> None:
    built.description["finished"] = "runs.csv"
    (built.path.parent / "runs.csv").touch()
    built.save()
    for run in built.study.runs:
        built.finish(run.name, 2.5)
    path = Finished(built.study).add(built.study, collect.collect(built.study, built.out))
    assert path is not None
    before, around = path.read_bytes(), sorted(path.parent.iterdir())
    table = Finished(built.study)
    with pytest.raises(OSError, match="File too large"), no_file_above(len(before) // 2):
        table.add(built.study, [])
    assert path.read_bytes() == before and sorted(path.parent.iterdir()) == around


@pytest.mark.parametrize(
    ("name", "text"),
    [("run.json", '{"arm": "lns"}'), ("run.json", "{"), ("attempt-01.json", ""), ("attempt-01.json", "[1]"),
     ("attempt-01.json", "\udcff")],
    ids=["lacks settings", "cut", "empty", "list", "bytes"],
)  # fmt: skip
def test_a_broken_record_is_one_line_that_names_it(
    built: Built, name: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = built.study.runs[0].name
    path = built.finish(run, 2.5, until=5 if name != "run.json" else None) / name
    path.write_text(text, errors="surrogateescape")
    command = "collect" if name == "run.json" else "status"
    words = [command, str(built.path), "--out", str(built.out), *(["--allow-missing"] if command == "collect" else [])]
    with pytest.raises(LNSConfigError, match="damaged: .*: restore it, or remove it") as error:
        cli.main(words)
    assert str(error.value).startswith(f"{path}: ") and "\n" not in str(error.value)
