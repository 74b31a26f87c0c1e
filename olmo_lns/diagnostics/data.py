"""Batches from ``--data``: token ids, text, JSON lines or a Hugging Face data set, all streamed."""

from __future__ import annotations

import importlib.util
import itertools
import json
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from olmo_lns.errors import LNSError, one_line
from olmo_lns.study.data.check import record_of

#: Tokens of a file, or characters of a plain text, per read.
BLOCK = 1 << 20
#: Files of token ids, and of records.
IDS, RECORDS = (".npy", ".bin"), (".jsonl", ".json")


def read_batches(
    source: str,
    length: int,
    *,
    vocabulary: int,
    tokenizer: Callable[[], Any],
    batch_size: int = 8,
    max_tokens: int | None = None,
    token_dtype: str = "uint16",
    text_field: str = "text",
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield batches of ``input_ids`` (int64) and ``attention_mask`` (1 = real token), right-padded with 0.

    :param source: a ``.npy`` file (NumPy's format or OLMo's raw ids), a text file, JSON lines with text, or a Hugging
        Face data set ``name[,config][:split]`` (also a local folder).
    :param length: tokens of a sequence. :param tokenizer: called once, only when there is text.
    :param max_tokens: token limit, to which the last sequence is cut; None reads everything.
    :param token_dtype: dtype of raw token files (OLMo's). :param text_field: field of JSON lines and data sets.
    :raises LNSError: no such data, or an id outside ``vocabulary``.
    """
    check_source(source)
    path = Path(source)
    if path.suffix in IDS:
        chunks = _ids(path, token_dtype)
    else:
        chunks = _encoded(_texts(source, text_field), tokenizer(), separate=path.suffix in (*RECORDS, ""))
    sequences = _sequences(chunks, length, max_tokens)
    while group := list(itertools.islice(sequences, batch_size)):
        yield _collate(group, vocabulary, source)


def check_source(source: str) -> None:
    """Check ``--data`` before the model is loaded.

    :raises LNSError: a missing file, or a data set without the package ``datasets``.
    """
    path = Path(source)
    if path.suffix in (*IDS, *RECORDS, ".txt") and not path.is_file():
        raise LNSError(f"--data: no such file: {path}")
    if not path.is_file() and importlib.util.find_spec("datasets") is None:
        raise LNSError(f"--data: {source} is not a file, and a data set needs: pip install datasets")


def _sequences(chunks: Iterable[np.ndarray], length: int, remaining: int | None) -> Iterator[np.ndarray]:
    """Yield the sequences of the chunks until the token limit; the last one may be shorter."""
    rest = np.empty(0, np.int64)
    for chunk in chunks:
        rest = np.concatenate([rest, chunk[:remaining].astype(np.int64)])
        full = len(rest) // length * length
        yield from rest[:full].reshape(-1, length)
        rest = rest[full:]
        if remaining is not None and (remaining := remaining - len(chunk)) <= 0:
            break
    if len(rest):
        yield rest


def _ids(path: Path, token_dtype: str) -> Iterator[np.ndarray]:
    with path.open("rb") as file:
        numpy_format = file.read(6) == b"\x93NUMPY"
    record_dtype = record_of(path).get("dtype", token_dtype)
    if not numpy_format and record_dtype != token_dtype:
        raise LNSError(
            f"{path}: the record beside it has dtype {record_dtype}, expected {token_dtype} (see --token-dtype)"
        )
    try:
        if numpy_format:
            array = np.load(path, mmap_mode="r")
        else:  # an empty file cannot be mapped
            array = np.memmap(path, token_dtype, "r") if path.stat().st_size else np.empty(0, token_dtype)
    except (TypeError, ValueError) as error:  # unknown dtype, or a wrong number of bytes
        raise LNSError(f"{path}: not an array of token ids ({error}): see --token-dtype, or rewrite it") from None
    odd_tokens = array[1:BLOCK:2]  # of ids below a million, in a file of twice the width
    if not numpy_format and odd_tokens.size >= 32 and array[:BLOCK].max() > 255 and odd_tokens.max() < 16:
        raise LNSError(
            f"{path}: every second token is 0 or close to 0: the file seems to have a wider dtype than {token_dtype} "
            "(see --token-dtype)"
        )
    if not np.issubdtype(array.dtype, np.integer):
        raise LNSError(f"{path}: found an array of {array.dtype}, expected integer token ids")
    for start in range(0, array.size, BLOCK):
        yield np.asarray(array.reshape(-1)[start : start + BLOCK])


def _texts(source: str, field: str) -> Iterator[str]:
    """Yield the texts of a file or of a data set; of a plain text, whole lines of about 1 MB."""
    path = Path(source)
    try:
        if path.is_file() and path.suffix not in RECORDS:
            with path.open(encoding="utf-8") as file:
                while block := file.readlines(BLOCK):
                    yield "".join(block)
            return
        for number, record in enumerate(_records(source), start=1):
            text = record.get(field) if isinstance(record, dict) else None
            if not isinstance(text, str):
                description = sorted(record) if isinstance(record, dict) else type(record).__name__
                raise LNSError(
                    f"--data: record {number} has {description}, expected text in {field!r} (see --text-field)"
                )
            yield text
    except (OSError, ValueError, RuntimeError) as error:  # bad UTF-8 or JSON, errors of the hub
        raise LNSError(f"--data: {source} cannot be read: {one_line(error)}") from error


def _records(source: str) -> Iterator[Any]:
    if Path(source).is_file():
        with open(source, "rb") as file:
            yield from (json.loads(line) for line in file if line.strip())
        return
    import datasets

    name, _, split = source.partition(":")
    name, _, config = name.partition(",")
    yield from datasets.load_dataset(name, config or None, split=split or "train", streaming=True)


def _encoded(texts: Iterable[str], tokenizer: Any, *, separate: bool) -> Iterator[np.ndarray]:
    """Yield the ids of each text. :param separate: end each text with the tokenizer's end token."""
    end = [tokenizer.eos_token_id] if separate and tokenizer.eos_token_id is not None else []
    for text in texts:
        yield np.asarray([*tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], *end], np.int64)


def _collate(group: list[np.ndarray], vocabulary: int, source: str) -> dict[str, torch.Tensor]:
    low, high = min(int(sequence.min()) for sequence in group), max(int(sequence.max()) for sequence in group)
    if low < 0 or high >= vocabulary:
        raise LNSError(
            f"{source}: found token id {low if low < 0 else high}, expected 0..{vocabulary - 1}: "
            "the data was tokenised with another vocabulary (or has another --token-dtype)"
        )
    ids = [torch.from_numpy(sequence.astype(np.int64)) for sequence in group]
    mask = [torch.ones_like(sequence) for sequence in ids]
    return {"input_ids": pad_sequence(ids, True), "attention_mask": pad_sequence(mask, True)}
