"""Batches from what ``--data`` names: token ids, text, JSON lines or a Hugging Face data set, all streamed."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from olmo_lns.errors import LNSError, one_line

#: Characters of a plain-text file tokenised at a time.
TEXT_BLOCK = 1 << 20
#: Files of token ids, and of records.
IDS, RECORDS = (".npy", ".bin"), (".jsonl", ".json")


@dataclass(frozen=True)
class DataOptions:
    """How to cut the data.

    :param sequence_length: tokens a sequence. :param batch_size: sequences a batch.
    :param max_tokens: stop after this many real tokens (the last sequence is cut to fit); None reads everything.
    :param max_sequences: stop after this many sequences.
    :param token_dtype: of raw token files without a header (OLMo's). :param text_field: of JSON lines and data sets.
    """

    sequence_length: int
    batch_size: int = 8
    max_tokens: int | None = None
    max_sequences: int | None = None
    token_dtype: str = "uint16"
    text_field: str = "text"


def read_batches(
    source: str, options: DataOptions, *, vocabulary: int, tokenizer: Callable[[], Any]
) -> Iterator[dict[str, torch.Tensor]]:
    """Batches with ``input_ids`` (int64) and ``attention_mask`` (1 = real token), right-padded with 0.

    :param source: a ``.npy`` file (NumPy's format or OLMo's raw ids), a text file, JSON lines with text, or a Hugging
        Face data set ``name[,config][:split]`` (also a local folder).
    :param tokenizer: called once, only when there is text.
    :raises LNSError: nothing there, no token in it, or an id outside ``vocabulary``.
    """
    check_source(source)
    path = Path(source)
    if path.suffix in IDS:
        sequences = _from_ids(path, options)
    else:
        plain = path.is_file() and path.suffix not in RECORDS
        texts = _text_blocks(path) if plain else _texts(source, options.text_field)
        sequences = _from_texts(texts, options, tokenizer, separate=not plain)
    sequences = itertools.islice(_limited(sequences, options.max_tokens), options.max_sequences)
    batches = iter(lambda: list(itertools.islice(sequences, options.batch_size)), [])
    for number, group in enumerate(itertools.chain(batches, [[]])):
        if group:
            yield _collate(group, vocabulary, source)
        elif not number:
            raise LNSError(f"{source} holds no token: give a file or data set with at least one sequence")


def check_source(source: str) -> None:
    """Check ``--data`` before the model is loaded.

    :raises LNSError: a file that is not there, or a data set without its package.
    """
    path = Path(source)
    if path.suffix in (*IDS, *RECORDS, ".txt") and not path.is_file():
        raise LNSError(f"--data: no such file: {path}")
    if not path.is_file() and importlib.util.find_spec("datasets") is None:
        raise LNSError(f"--data: {source} isn't a file, and data sets need: pip install datasets")


def _limited(sequences: Iterable[np.ndarray], left: int | None) -> Iterator[np.ndarray]:
    """The sequences that are not empty, until ``left`` tokens are reached; the last one is cut there."""
    for sequence in sequences:
        sequence = sequence[:left]
        if len(sequence):
            yield sequence
        if left is not None and (left := left - len(sequence)) == 0:
            return


def _from_ids(path: Path, options: DataOptions) -> Iterator[np.ndarray]:
    with path.open("rb") as file:
        numpy_format = file.read(6) == b"\x93NUMPY"
    try:
        if numpy_format:
            array = np.load(path, mmap_mode="r")
        else:  # an empty file cannot be mapped
            dtype, size = np.dtype(options.token_dtype), path.stat().st_size
            array = np.memmap(path, dtype=dtype, mode="r") if size else np.empty(0, dtype)
    except (TypeError, ValueError) as error:  # no such dtype, or another number of bytes
        raise LNSError(f"{path}: not an array of token ids ({error}): see --token-dtype, or make it anew") from None
    if not np.issubdtype(array.dtype, np.integer) or array.ndim not in (1, 2):
        raise LNSError(
            f"{path}: found an array of {array.dtype} and shape {array.shape}, expected integer token ids "
            "of shape (tokens,) or (sequences, length)"
        )
    for row in array if array.ndim == 2 else [array]:
        for start in range(0, len(row), options.sequence_length):
            yield np.asarray(row[start : start + options.sequence_length])


def _texts(source: str, field: str) -> Iterator[str]:
    """The texts of JSON lines or of a data set."""
    records = _json_lines(Path(source)) if Path(source).is_file() else _data_set(source)
    for record in records:
        text = record.get(field) if isinstance(record, dict) else None
        if not isinstance(text, str):
            found = sorted(record) if isinstance(record, dict) else type(record).__name__
            raise LNSError(f"--data: found a record with {found}, expected text in {field!r} (see --text-field)")
        yield text


def _json_lines(path: Path) -> Iterator[Any]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                if line.strip():
                    yield json.loads(line)
            except ValueError as error:  # bad UTF-8 is one, too
                raise LNSError(f"{path}:{number}: not JSON ({error}): expected one object a line") from None


def _data_set(source: str) -> Iterable[Any]:
    import datasets

    name, _, split = source.partition(":")
    name, _, config = name.partition(",")
    try:
        found: Iterable[Any] = datasets.load_dataset(name, config or None, split=split or "train", streaming=True)
    except (OSError, ValueError, RuntimeError) as error:
        text = f"--data: {source} is neither a file nor a data set that can be read: {one_line(error)}"
        raise LNSError(text) from error
    return found


def _text_blocks(path: Path) -> Iterator[str]:
    """Whole lines, about a megabyte at a time: a token never spans two blocks that a line break did not separate."""
    try:
        with path.open(encoding="utf-8") as file:
            while block := file.readlines(TEXT_BLOCK):
                yield "".join(block)
    except UnicodeDecodeError:
        raise LNSError(f"{path}: not UTF-8 text; token ids must be in a .npy file") from None


def _from_texts(
    texts: Iterable[str], options: DataOptions, tokenizer: Callable[[], Any], *, separate: bool
) -> Iterator[np.ndarray]:
    """Full sequences of the texts, one after the other. :param separate: the tokenizer's end token ends each text."""
    length, rest = options.sequence_length, np.empty(0, np.int64)
    loaded = functools.cache(tokenizer)  # once, and only where there is text
    for text in texts:
        ids = np.asarray(loaded()(text, add_special_tokens=False, verbose=False)["input_ids"], np.int64)
        end = loaded().eos_token_id if separate else None
        rest = np.concatenate([rest, ids, [] if end is None else [end]]).astype(np.int64)
        full = len(rest) // length * length
        yield from rest[:full].reshape(-1, length)
        rest = rest[full:]
    yield rest


def _collate(group: list[np.ndarray], vocabulary: int, source: str) -> dict[str, torch.Tensor]:
    low, high = min(int(sequence.min()) for sequence in group), max(int(sequence.max()) for sequence in group)
    if low < 0 or high >= vocabulary:
        raise LNSError(
            f"{source}: found token id {low if low < 0 else high}, expected 0..{vocabulary - 1}: "
            "the data was tokenised with another vocabulary than the model's (or has another --token-dtype)"
        )
    ids = [torch.from_numpy(sequence.astype(np.int64)) for sequence in group]
    mask = [torch.ones_like(sequence) for sequence in ids]
    return {"input_ids": pad_sequence(ids, True), "attention_mask": pad_sequence(mask, True)}
