"""The data of the demo: the same bytes every time, split by document, with a tokenizer of bytes."""

import numpy as np
import pytest

from olmo_lns.errors import LNSConfigError
from olmo_lns.study.data import corpora
from olmo_lns.study.data.corpora import build, documents


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return build(tmp_path_factory.mktemp("data"))


def test_two_builds_are_identical_and_take_files_that_every_machine_has(data, tmp_path):
    other = build(tmp_path)
    for name in ("train.npy", "heldout.npy", "tokenizer.json"):
        assert (other / name).read_bytes() == (data / name).read_bytes()
    names = [name for name, _ in documents()]
    assert names[0].startswith("pydoc_data/") and {"ast.py", "json/decoder.py"} <= set(names)
    for part in ("site-packages", "/test/", "_sysconfigdata", "__pycache__"):
        assert not any(part in f"/{name}" for name in names), part


def test_a_run_is_not_continued_on_other_text(data, tmp_path, monkeypatch):
    build(tmp_path)
    monkeypatch.setattr(corpora, "documents", lambda _: [(f"{n}.py", b"x = %d" % n) for n in range(200)])
    with pytest.raises(LNSConfigError, match="train.npy has the text of another Python"):
        build(tmp_path)
    assert (tmp_path / "train.npy").read_bytes() == (data / "train.npy").read_bytes()


def test_the_split_is_by_document_and_complete(data):
    everything = [text for _, text in documents()]
    train, heldout = (np.fromfile(data / f"{name}.npy", np.uint16) for name in ("train", "heldout"))
    ends = np.flatnonzero(heldout == 256)
    assert len(ends) == len(everything) // corpora.HELDOUT_EVERY
    assert len(ends) + np.count_nonzero(train == 256) == len(everything)
    assert len(train) + len(heldout) == sum(map(len, everything)) + len(everything)
    assert len(train) > 5_000_000 and train.max() == train[-1] == 256
    # The sixteenth document is the first that is held out.
    assert bytes(heldout[: ends[0]].astype(np.uint8)) == everything[15]
