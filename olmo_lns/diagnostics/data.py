"""Batches from what ``--data`` names: token ids, text, JSON lines or a Hugging Face data set.

Everything streams: memory does not depend on the number of tokens.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, Mapping

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from olmo_lns import hub
from olmo_lns.errors import LNSError, one_line

#: Characters of a plain-text file tokenised at a time.
TEXT_BLOCK = 1 << 20
TOKEN_FIELDS = ("input_ids", "tokens")
#: Files of token ids, and of records.
IDS, RECORDS = (".npy", ".bin"), (".jsonl", ".json")


@dataclass(frozen=True)
class DataOptions:
    """How to cut the data.

    :param sequence_length: tokens a sequence. :param batch_size: sequences a batch.
    :param max_tokens: stop after this many real tokens (the last sequence is cut to fit); None reads everything.
    :param max_sequences: stop after this many sequences.
    :param pack: join documents into full sequences; False keeps one document a sequence, cut and padded.
    :param token_dtype: of raw token files without a header (OLMo's). :param text_field: of JSON lines and data sets.
    :param rank: of ``world`` processes; batches are dealt out in turn.
    """

    sequence_length: int
    batch_size: int = 8
    max_tokens: int | None = None
    max_sequences: int | None = None
    pack: bool = True
    token_dtype: str = "uint16"
    text_field: str = "text"
    rank: int = 0
    world: int = 1


def read_batches(
    source: str, options: DataOptions, *, vocabulary: int, tokenizer: Callable[[], Any]
) -> Iterator[dict[str, torch.Tensor]]:
    """Batches with ``input_ids`` (int64) and ``attention_mask`` (1 = real token), right-padded with 0.

    :param source: a ``.npy`` file (NumPy's format or OLMo's raw ids), a text file, JSON lines with text or
        ids, or a Hugging Face data set ``name[,config][:split]`` (also a local folder).
    :param tokenizer: called once, only when there is text.
    :raises LNSError: nothing there, no token in it, or an id outside ``vocabulary``.
    """
    check_source(source, pack=options.pack)
    path = Path(source)
    if path.suffix in IDS:
        sequences = _from_ids(path, options)
    else:
        sequences = _from_documents(_documents(source), options, tokenizer, separate=path.suffix in (*RECORDS, ""))
    sequences = itertools.islice(_limited(sequences, options.max_tokens), options.max_sequences)
    for number in itertools.count():
        group = list(itertools.islice(sequences, options.batch_size))
        if not group and not number:
            raise LNSError(f"{source} holds no token: give a file or data set with at least one sequence")
        if not group:
            return
        _check_ids(group, vocabulary, source)
        if number % options.world == options.rank:
            yield _collate(group)


def check_source(source: str, *, pack: bool = True) -> None:
    """Check ``--data`` before the model is loaded.

    :raises LNSError: a file that is not there, a data set without its package, or plain text that is not to be packed.
    """
    path = Path(source)
    if path.suffix in (*IDS, *RECORDS, ".txt") and not path.is_file():
        raise LNSError(f"--data: no such file: {path}")
    if not path.is_file() and importlib.util.find_spec("datasets") is None:
        raise LNSError(f"{source} is no file, and data sets need: pip install datasets")
    if not pack and path.is_file() and path.suffix not in (*IDS, *RECORDS):
        raise LNSError(f"--no-pack: {path} is plain text and has no documents; give JSON lines or leave the option out")


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
    except (TypeError, ValueError) as error:  # no such dtype, or bytes that are no whole number of it
        raise LNSError(f"{path}: no array of token ids ({error}): see --token-dtype, or make the file anew") from None
    if not np.issubdtype(array.dtype, np.integer) or array.ndim not in (1, 2):
        raise LNSError(
            f"--data: found an array of {array.dtype} and shape {array.shape}, expected integer token ids "
            "of shape (tokens,) or (sequences, length)"
        )
    for row in array if array.ndim == 2 else [array]:
        for start in range(0, len(row), options.sequence_length):
            yield np.asarray(row[start : start + options.sequence_length])


def _documents(source: str) -> Iterable[Any]:
    """Records of JSON lines or a data set, or blocks of a text file."""
    path = Path(source)
    if path.is_file():
        return _json_lines(path) if path.suffix in RECORDS else _text_blocks(path)
    import datasets

    name, _, split = source.partition(":")
    name, _, config = name.partition(",")
    if not Path(name).exists() and not hub.reachable():
        raise LNSError(f"--data: {source} is neither a file nor a data set here, and the hub cannot be reached")
    try:
        found: Iterable[Any] = datasets.load_dataset(name, config or None, split=split or "train", streaming=True)
    except (OSError, ValueError, RuntimeError) as error:
        text = f"--data: {source} is neither a file nor a data set that can be read: {one_line(error)}"
        raise LNSError(text) from error
    return found


def _json_lines(path: Path) -> Iterator[Any]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                yield json.loads(line)
            except ValueError as error:  # bad UTF-8 is one, too
                raise LNSError(f"{path}:{number}: not JSON ({error}): expected one object a line") from None


def _text_blocks(path: Path) -> Iterator[str]:
    """Whole lines, about a megabyte at a time: a token never spans two blocks that a line break did not separate."""
    try:
        with path.open(encoding="utf-8") as file:
            while block := file.readlines(TEXT_BLOCK):
                yield "".join(block)
    except UnicodeDecodeError:
        raise LNSError(f"{path}: not UTF-8 text; token ids must be in a .npy file") from None


def _from_documents(
    documents: Iterable[Any], options: DataOptions, tokenizer: Callable[[], Any], *, separate: bool
) -> Iterator[np.ndarray]:
    """Sequences of the documents, packed or one each. :param separate: an id ends each document that came as text."""
    length, rest = options.sequence_length, np.empty(0, np.int64)
    loaded = functools.cache(tokenizer)  # once, and only where there is text
    for document in documents:
        content = _content(document, options.text_field)
        if text := isinstance(content, str):
            content = loaded()(content, add_special_tokens=False, verbose=False)["input_ids"]
        ids = _ids(content)
        if not options.pack:
            yield ids[:length]
            continue
        end = loaded().eos_token_id if text and separate else None
        rest = np.concatenate([rest, ids, [] if end is None else [end]]).astype(np.int64)
        full = len(rest) // length * length
        for start in range(0, full, length):
            yield rest[start : start + length]
        rest = rest[full:]
    yield rest


def _content(document: Any, text_field: str) -> Any:
    """The text of a document, or its ids."""
    if isinstance(document, str):
        return document
    fields = document if isinstance(document, Mapping) else {}
    found = next((fields[field] for field in TOKEN_FIELDS if field in fields), None)
    if found is not None:
        return _ids(found)
    if not isinstance(found := fields.get(text_field), str):
        raise LNSError(
            f"--data: found a record with {sorted(fields) or type(document).__name__}, expected text in "
            f"{text_field!r} (see --text-field) or ids in {' or '.join(map(repr, TOKEN_FIELDS))}"
        )
    return found


def _ids(values: Any) -> np.ndarray:
    try:
        array = np.asarray(values)
    except ValueError:  # lists of unequal length
        array = np.empty((0, 0))
    if array.ndim != 1 or not (np.issubdtype(array.dtype, np.integer) or array.size == 0):
        raise LNSError(f"--data: found {str(values)[:60]} as ids, expected one list of integers")
    return array.astype(np.int64)


def _check_ids(group: list[np.ndarray], vocabulary: int, source: str) -> None:
    low, high = min(int(sequence.min()) for sequence in group), max(int(sequence.max()) for sequence in group)
    if low < 0 or high >= vocabulary:
        raise LNSError(
            f"{source}: found token id {low if low < 0 else high}, expected 0..{vocabulary - 1}: "
            "the data was tokenised with another vocabulary than the model's (or has another --token-dtype)"
        )


def _collate(group: list[np.ndarray]) -> dict[str, torch.Tensor]:
    ids = [torch.from_numpy(sequence.astype(np.int64)) for sequence in group]
    mask = [torch.ones_like(sequence) for sequence in ids]
    return {"input_ids": pad_sequence(ids, True), "attention_mask": pad_sequence(mask, True)}


def track(
    batches: Iterable[dict[str, torch.Tensor]], what: str, total: int | None
) -> Iterator[dict[str, torch.Tensor]]:
    """Pass batches through and show the tokens done and the remaining time on stderr."""
    from rich.console import Console
    from rich.progress import Progress, TextColumn

    columns = (*Progress.get_default_columns(), TextColumn("{task.completed:,.0f} tokens"))
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(what, total=total)
        for batch in batches:
            yield batch
            progress.advance(task, int(batch["attention_mask"].sum()))
        progress.update(task, total=progress.tasks[0].completed)  # the data may end early
