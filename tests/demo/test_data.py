"""The data of the demo: the same bytes every time, split by document, with a tokenizer of bytes."""

import numpy as np
import pytest

from olmo_lns.study.data import corpora
from olmo_lns.study.data.corpora import build, documents


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return build(tmp_path_factory.mktemp("data"))


def test_two_builds_are_identical_and_take_files_that_every_machine_has(data, tmp_path):
    other = build(tmp_path)
    assert other.digest == data.digest
    assert other.train.read_bytes() == data.train.read_bytes()
    assert other.heldout.read_bytes() == data.heldout.read_bytes()
    names = [name for name, _ in documents()]
    assert names[0].startswith("pydoc_data/") and {"ast.py", "json/decoder.py"} <= set(names)
    for part in ("site-packages", "/test/", "_sysconfigdata", "__pycache__"):
        assert not any(part in f"/{name}" for name in names), part


def test_the_split_is_by_document_and_complete(data):
    everything = [text for _, text in documents()]
    ends = {path: np.flatnonzero(np.fromfile(path, np.uint16) == 256) for path in (data.train, data.heldout)}
    assert len(ends[data.train]) + len(ends[data.heldout]) == len(everything)
    assert len(ends[data.heldout]) == len(everything) // corpora.HELDOUT_EVERY
    assert data.train_tokens + data.heldout_tokens == sum(map(len, everything)) + len(everything)
    tokens = np.memmap(data.train, dtype=np.uint16, mode="r")
    assert len(tokens) == data.train_tokens > 5_000_000 and tokens.max() == data.eos_token_id == tokens[-1] == 256
    # The sixteenth document is the first that is held out.
    held_out = np.fromfile(data.heldout, np.uint16)[: ends[data.heldout][0]]
    assert bytes(held_out.astype(np.uint8)) == everything[15]


def test_existing_files_are_kept_and_damaged_files_are_rebuilt(tmp_path, monkeypatch):
    monkeypatch.setattr(corpora, "documents", lambda _: [(f"{n}.py", b"x = %d" % n) for n in range(200)])
    built = build(tmp_path)
    content, before = built.train.read_bytes(), built.train.stat().st_mtime_ns
    assert build(tmp_path) == built and built.train.stat().st_mtime_ns == before
    built.train.write_bytes(content[:100])
    assert build(tmp_path) == built and built.train.read_bytes() == content
