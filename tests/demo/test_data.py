"""The data of the demo: the same bytes every time, split by document, with a tokenizer of bytes."""

import numpy as np

from olmo_lns.study.data import corpora
from olmo_lns.study.data.corpora import build, documents


def test_two_builds_are_identical_complete_and_split_by_document(tmp_path):
    data, other = build(tmp_path / "a"), build(tmp_path / "b")
    assert other.digest == data.digest
    everything = [text for _, text in documents()]
    names = [name for name, _ in documents()]
    assert names[0].startswith("pydoc_data/") and {"ast.py", "json/decoder.py"} <= set(names)
    for part in ("site-packages", "/test/", "_sysconfigdata", "__pycache__"):
        assert not any(part in f"/{name}" for name in names), part
    train, heldout = (np.fromfile(path, np.uint16) for path in (data.train, data.heldout))
    assert len(train) == data.train_tokens > 5_000_000 and train.max() == data.eos_token_id == train[-1] == 256
    assert np.array_equal(train, np.fromfile(other.train, np.uint16))
    assert (heldout == 256).sum() == len(everything) // corpora.HELDOUT_EVERY
    assert len(train) + len(heldout) == sum(map(len, everything)) + len(everything)
    # The sixteenth document is the first that is held out.
    assert bytes(heldout[: len(everything[15])].astype(np.uint8)) == everything[15]


def test_existing_files_are_kept_and_damaged_files_are_rebuilt(tmp_path, monkeypatch):
    monkeypatch.setattr(corpora, "documents", lambda _: [(f"{n}.py", b"x = %d" % n) for n in range(200)])
    built = build(tmp_path)
    content, before = built.train.read_bytes(), built.train.stat().st_mtime_ns
    assert build(tmp_path) == built and built.train.stat().st_mtime_ns == before
    built.train.write_bytes(content[:100])
    assert build(tmp_path) == built and built.train.read_bytes() == content
