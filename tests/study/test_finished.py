"""The table of finished runs: a run in it is not trained again, and no other run is taken for it."""

import resource
from contextlib import contextmanager

import pytest

from olmo_lns.errors import LNSConfigError
from olmo_lns.study import cli
from olmo_lns.study.collect import folder as logs
from olmo_lns.study.collect import gather as collect
from olmo_lns.study.collect.gather import Finished, identity
from olmo_lns.study.launch import start as launch
from olmo_lns.study.plan.spec import Study


@pytest.fixture
def tabled(built):
    """Finish every run of size b, each with a held-out loss, and collect them into the table."""
    built.description["finished"] = "runs.csv"
    built.description["sizes"].pop("a")
    built.description.pop("more_seeds")
    built.save()
    (built.path.parent / "runs.csv").touch()
    for run, loss in zip(built.study.runs, (2.5, 2.3), strict=True):
        log = built.finish(run.name, loss) / "attempt-01.log"
        log.write_text(log.read_text() + f"heldout\n    eval/heldout/CrossEntropyLoss={loss + 0.1:.3f}\n")
    assert cli.main(["collect", str(built.path), "--out", str(built.out)]) == 0
    return built


def test_a_run_in_the_table_is_neither_trained_again_nor_missing(tabled, tmp_path, capsys):
    study, there = tabled.study, tmp_path / "other_machine"
    assert launch.run_here(study, study.runs, there) == 0
    assert capsys.readouterr().out.count("finished, as ") == 2
    assert [path.name for path in there.iterdir()] == [".lock"]
    results = collect.collect(study, there)
    assert [(r.run, r.heldout) for r in results] == [("b-preln-s1", 2.6), ("b-lns-s1", 2.4)]
    assert [r.source for r in results] == ["synthetic"] * 2
    before = (tmp_path / "runs.csv").read_text()
    assert str(tmp_path) not in before
    assert cli.main(["collect", str(tabled.path), "--out", str(there)]) == 0
    assert (tmp_path / "runs.csv").read_text() == before


def test_status_shows_a_run_in_the_table_as_finished(tabled, tmp_path, capsys):
    there = tmp_path / "other_machine"
    capsys.readouterr()
    assert cli.main(["status", str(tabled.path), "--out", str(there)]) == 0
    first, second, last, missing = capsys.readouterr().out.splitlines()
    assert first == f"{'b-preln-s1':<32} finished    step 20 of 20: in {tmp_path / 'runs.csv'}"
    assert second.startswith("b-lns-s1") and last == "2 finished"
    assert missing == f"{there} does not exist: nothing was started there"
    table = (tmp_path / "runs.csv").read_text()
    (tmp_path / "runs.csv").write_text(table[: table.rindex("\n", 0, -1) + 40])
    assert cli.main(["status", str(tabled.path), "--out", str(there)]) == 0
    assert (
        f"cannot be compared with these runs: {tmp_path / 'runs.csv'}: not a table of finished runs"
        in capsys.readouterr().out
    )
    (tmp_path / "runs.csv").write_text(table)
    (tmp_path / "data" / "train.npy").unlink()
    assert cli.main(["status", str(tabled.path), "--out", str(there)]) == 0
    shown = capsys.readouterr().out
    assert f"{tmp_path / 'runs.csv'} cannot be compared with these runs: data file" in shown
    assert "2 not started" in shown


def test_a_run_is_identified_by_the_settings_and_data_that_decide_its_result(tabled, tmp_path):
    first = identity(tabled.study.runs[0])
    assert first != identity(tabled.study.runs[1])
    size = tabled.description["sizes"].pop("b")
    for name, changed, same in (
        ("renamed", {}, True),
        ("rate", {"optimizer.learning_rate": 2e-3}, False),
        ("folder", {"save_interval_unsharded": 7}, True),
    ):
        tabled.description["sizes"] = {name: size | changed}
        tabled.save()
        assert (identity(tabled.study.runs[0]) == first) is same, name
        known = Finished(tabled.study).result(tabled.study.runs[0])
        assert (known is not None and known.run == f"{name}-preln-s1") is same
    (tmp_path / "data" / "train.npy").write_bytes(bytes(reversed(range(256))) * 64)
    assert identity(tabled.study.runs[0]) != first


def test_a_table_with_other_columns_is_refused(tabled, tmp_path):
    (tmp_path / "runs.csv").write_text("a,b\n1,2\n")
    with pytest.raises(LNSConfigError, match="not a table of finished runs: columns a, b"):
        Finished(Study.load(tabled.path))


@pytest.mark.parametrize("command", [["launch", "--run"], ["collect", "--allow-missing"]], ids=" ".join)
def test_a_missing_table_is_named_and_not_created(built, command, capsys):
    built.description["finished"] = "../nothere/runs.csv"
    built.save()
    table = built.path.parent / "../nothere/runs.csv"
    with pytest.raises(LNSConfigError, match="no such table: remove the line from the description") as error:
        cli.main([command[0], str(built.path), "--out", str(built.out), *command[1:]])
    assert str(error.value).startswith(f"finished: {table}: ")
    assert not table.parent.exists()


@contextmanager
def no_file_above(size):
    """Make a write beyond this size fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_stamp_is_written_whole_or_not_at_all(built):
    run = built.study.runs[0]
    with pytest.raises(OSError, match="File too large"), no_file_above(100):
        logs.stamp(built.study, run, built.out)
    assert list((built.out / run.name).iterdir()) == []
    path = logs.stamp(built.study, run, built.out)
    assert path.stat().st_size > 100 and list((built.out / run.name).iterdir()) == [path]


def test_a_failed_write_leaves_the_table_as_it_was(built):
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
    [
        ("run.json", '{"arm": "lns"}'),
        ("attempt-01.json", ""),
        ("attempt-01.json", "[1]"),
        ("attempt-01.json", "\udcff"),
    ],
    ids=["lacks settings", "empty", "list", "bytes"],
)
def test_a_damaged_record_gives_a_one_line_error_that_names_it(built, name, text, capsys):
    run = built.study.runs[0].name
    path = built.finish(run, 2.5, until=5 if name != "run.json" else None) / name
    path.write_text(text, errors="surrogateescape")
    command = "collect" if name == "run.json" else "status"
    words = [command, str(built.path), "--out", str(built.out), *(["--allow-missing"] if command == "collect" else [])]
    with pytest.raises(LNSConfigError, match="damaged: .*: restore it, or remove it") as error:
        cli.main(words)
    assert str(error.value).startswith(f"{path}: ") and "\n" not in str(error.value)
