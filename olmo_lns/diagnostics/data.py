"""Stream batches from ``--data``: token ids, text, JSON lines or a Hugging Face data set."""

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
from olmo_lns.token_files import NUMPY_HEADER, read_record

#: Number of tokens, or of characters of a plain text, to read at once.
READ_SIZE = 1 << 20
#: Suffixes of files with token ids, and with JSON records.
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
    :param length: tokens in a sequence.
    :param tokenizer: function that returns the tokenizer. It is called once, and only for text.
    :param max_tokens: number of tokens to read, which can shorten the last sequence. None reads everything.
    :param token_dtype: dtype of OLMo's raw token files.
    :param text_field: field of JSON lines and data sets that has the text.
    :raises LNSError: if the data does not exist, or has an id outside ``vocabulary``.
    """
    check_source(source)
    path = Path(source)
    if path.suffix in IDS:
        chunks = _ids(path, token_dtype)
    else:
        chunks = _encode(_texts(source, text_field), tokenizer(), separate=path.suffix in (*RECORDS, ""))
    sequences = _sequences(chunks, length, max_tokens)
    while group := list(itertools.islice(sequences, batch_size)):
        yield _collate(group, vocabulary, source)


def check_source(source: str) -> None:
    """Check ``--data`` before the model is loaded.

    :raises LNSError: if a file is missing, or a data set needs the package ``datasets``.
    """
    path = Path(source)
    if path.suffix in (*IDS, *RECORDS, ".txt") and not path.is_file():
        raise LNSError(f"--data: the file {path} was not found. Pass the path of a file, or the name of a data set.")
    if not path.is_file() and importlib.util.find_spec("datasets") is None:
        raise LNSError(
            f"--data: {source} is not a file. The package datasets, which reads data sets, is missing. Run: pip "
            "install datasets"
        )


def _sequences(chunks: Iterable[np.ndarray], length: int, max_tokens: int | None) -> Iterator[np.ndarray]:
    """Yield sequences of ``length`` tokens up to the token limit. The last sequence can be shorter."""
    pending = np.empty(0, np.int64)
    for chunk in chunks:
        pending = np.concatenate([pending, chunk[:max_tokens].astype(np.int64)])
        full = len(pending) // length * length
        yield from pending[:full].reshape(-1, length)
        pending = pending[full:]
        if max_tokens is not None:
            max_tokens -= len(chunk)
            if max_tokens <= 0:
                break
    if len(pending):
        yield pending


def _ids(path: Path, token_dtype: str) -> Iterator[np.ndarray]:
    with path.open("rb") as file:
        is_npy = file.read(len(NUMPY_HEADER)) == NUMPY_HEADER
    recorded = read_record(path).get("dtype", token_dtype)
    if not is_npy and recorded != token_dtype:
        raise LNSError(
            f"The record beside {path} has dtype {recorded}, but --token-dtype is {token_dtype}. Pass --token-dtype "
            f"{recorded}."
        )
    try:
        if is_npy:
            array = np.load(path, mmap_mode="r")
        else:  # np.memmap refuses an empty file
            array = np.memmap(path, token_dtype, "r") if path.stat().st_size else np.empty(0, token_dtype)
    except (TypeError, ValueError) as error:  # unknown dtype, or a wrong number of bytes
        raise LNSError(
            f"{path} is not an array of token ids: {error}. Pass its dtype with --token-dtype, or write the file again."
        ) from None
    high = array[1:READ_SIZE:2]  # the upper halves of ids below a million, if the file has twice the width
    if not is_npy and high.size >= 32 and array[:READ_SIZE].max() > 255 and high.max() < 16:
        raise LNSError(
            f"In {path} every second token is 0 or close to 0. The file seems to have a wider dtype than "
            f"{token_dtype}. Pass its dtype with --token-dtype."
        )
    if not np.issubdtype(array.dtype, np.integer):
        raise LNSError(f"{path} has an array of {array.dtype}. Token ids are integers. Write the file again.")
    for start in range(0, array.size, READ_SIZE):
        yield np.asarray(array.reshape(-1)[start : start + READ_SIZE])


def _texts(source: str, field: str) -> Iterator[str]:
    """Yield the texts of a file or data set. A plain text file comes in groups of lines of about 1 MB."""
    path = Path(source)
    try:
        if path.is_file() and path.suffix not in RECORDS:
            with path.open(encoding="utf-8") as file:
                while lines := file.readlines(READ_SIZE):
                    yield "".join(lines)
            return
        for number, record in enumerate(_records(source), start=1):
            text = record.get(field) if isinstance(record, dict) else None
            if not isinstance(text, str):
                content = sorted(record) if isinstance(record, dict) else type(record).__name__
                raise LNSError(
                    f"--data: record {number} has {content}. Expected text in the field {field!r}. Pass another field "
                    "with --text-field."
                )
            yield text
    except (OSError, ValueError, RuntimeError) as error:  # invalid UTF-8 or JSON, or an error of the hub
        raise LNSError(
            f"--data: {source} could not be read: {one_line(error)}. Pass token ids, text, JSON lines or a data set."
        ) from error


def _records(source: str) -> Iterator[Any]:
    if Path(source).is_file():
        with open(source, "rb") as file:
            yield from (json.loads(line) for line in file if line.strip())
        return
    import datasets

    name, _, split = source.partition(":")
    name, _, config = name.partition(",")
    yield from datasets.load_dataset(name, config or None, split=split or "train", streaming=True)


def _encode(texts: Iterable[str], tokenizer: Any, *, separate: bool) -> Iterator[np.ndarray]:
    """Yield the token ids of each text. :param separate: append the tokenizer's end token to each text."""
    end = [tokenizer.eos_token_id] if separate and tokenizer.eos_token_id is not None else []
    for text in texts:
        yield np.asarray([*tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], *end], np.int64)


def _collate(sequences: list[np.ndarray], vocabulary: int, source: str) -> dict[str, torch.Tensor]:
    low = min(int(sequence.min()) for sequence in sequences)
    high = max(int(sequence.max()) for sequence in sequences)
    if low < 0 or high >= vocabulary:
        raise LNSError(
            f"{source} has the token id {low if low < 0 else high}. The model has the ids 0 to {vocabulary - 1}. "
            "Pass data of the model's tokenizer, or the dtype of the file with --token-dtype."
        )
    ids = [torch.from_numpy(sequence.astype(np.int64)) for sequence in sequences]
    mask = [torch.ones_like(sequence) for sequence in ids]
    return {"input_ids": pad_sequence(ids, True), "attention_mask": pad_sequence(mask, True)}
