import json

import numpy as np
import pytest
import torch

from olmo_lns.diagnostics.data import read_batches
from olmo_lns.errors import LNSError


class Letters:
    """Encodes a, b, c, ... as 1, 2, 3, ...; 0 ends a document."""

    eos_token_id = 0

    def __call__(self, text, **_):
        return {"input_ids": [ord(c) - ord("a") + 1 for c in text if c.isalpha()]}


def read(source, length, *, tokenizer=Letters, vocabulary=256, **options):
    """Return batches of rows without their padding."""
    batches = list(read_batches(str(source), length, vocabulary=vocabulary, tokenizer=tokenizer, **options))
    assert all(batch["input_ids"].dtype == torch.int64 for batch in batches)
    return [
        [row[: int(n)].tolist() for row, n in zip(b["input_ids"], b["attention_mask"].sum(1), strict=True)]
        for b in batches
    ]


def test_raw_and_numpy_files_of_tokens_are_read_without_a_tokenizer(tmp_path):
    values = np.arange(20)
    values.astype(np.uint16).tofile(tmp_path / "raw.npy")
    np.save(tmp_path / "flat.npy", values)
    np.save(tmp_path / "rows.npy", values.reshape(4, 5))
    for name in ("raw", "flat", "rows"):
        found = read(tmp_path / f"{name}.npy", 8, batch_size=2, tokenizer=None)
        assert found == [[[*range(8)], [*range(8, 16)]], [[16, 17, 18, 19]]]
        assert read(tmp_path / f"{name}.npy", 7, batch_size=2, max_tokens=9) == [[[*range(7)], [7, 8]]]
    values.astype(np.uint32).tofile(tmp_path / "wide.npy")
    assert read(tmp_path / "wide.npy", 20, token_dtype="uint32") == [[values.tolist()]]


def test_text_and_json_lines_are_packed(tmp_path):
    (tmp_path / "x.txt").write_text("abc\nde\n")
    assert read(tmp_path / "x.txt", 4) == [[[1, 2, 3, 4], [5]]]  # plain text has no document ends
    lines = [{"text": "abc"}, {"text": "de"}, {"text": "fghij"}]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert read(tmp_path / "x.jsonl", 4) == [[[1, 2, 3, 0], [4, 5, 0, 6], [7, 8, 9, 10], [0]]]
    (tmp_path / "body.jsonl").write_text('{"body": "ab"}\n')
    assert read(tmp_path / "body.jsonl", 8, text_field="body") == [[[1, 2, 0]]]


def test_a_split_of_a_hugging_face_data_set_is_read(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_text('{"text": "abc"}\n')
    (tmp_path / "set" / "validation.jsonl").write_text('{"text": "xyz"}\n')
    assert read(tmp_path / "set", 8) == [[[1, 2, 3, 0]]]
    assert read(f"{tmp_path / 'set'}:validation", 8) == [[[24, 25, 26, 0]]]
    with pytest.raises(LNSError, match="nothing could not be read"):
        read(tmp_path / "nothing", 8)


BAD = {
    "ids.npy": ([1, 100, 3], "has the token id 100. The model has the ids 0 to 99"),
    "float.npy": ([0.0, 1.0], "Token ids are integers"),
    "odd.npy": (b"abc", "not a multiple of the data-type size"),
    "x.jsonl": (b'{"text": "ab"}\nnot json\n', "x.jsonl could not be read: Expecting value"),
    "body.jsonl": (b'{"body": "ab"}\n', r"record 1 has \['body'\]. Expected text in the field 'text'"),
    "binary.txt": (b"\xff\xfe\x00", "binary.txt could not be read: .*codec"),
    "wide.npy": (np.arange(300).astype(np.uint32).tobytes(), "a wider dtype than uint16"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused(tmp_path, name):
    content, message = BAD[name]
    (tmp_path / name).write_bytes(content) if isinstance(content, bytes) else np.save(tmp_path / name, content)
    with pytest.raises(LNSError, match=message):
        read(tmp_path / name, 8, vocabulary=100)


def test_a_file_is_not_read_against_its_record(tmp_path):
    np.arange(300).astype(np.uint32).tofile(tmp_path / "train-00000.npy")
    (tmp_path / "train.json").write_text(json.dumps({"dtype": "uint32"}))
    with pytest.raises(LNSError, match="has dtype uint32, but --token-dtype is uint16"):
        read(tmp_path / "train-00000.npy", 8, vocabulary=512)
