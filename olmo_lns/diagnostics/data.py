"""Batches from what ``--data`` names: token ids, text, JSON lines or a Hugging Face data set.

Everything streams: memory does not depend on the number of tokens.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, Mapping

import numpy as np
import torch

from olmo_lns import hub
from olmo_lns.errors import LNSError

__all__ = ["DataOptions", "check_source", "read_batches", "track"]

#: Characters of a plain-text file tokenised at a time.
TEXT_BLOCK = 1 << 20
TOKEN_FIELDS = ("input_ids", "tokens")


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
    sequences = itertools.islice(_limited(_sequences(source, options, tokenizer), options), options.max_sequences)
    empty = True
    for number in itertools.count():
        group = list(itertools.islice(sequences, options.batch_size))
        if not group:
            break
        empty = False
        _check_ids(group, vocabulary, source)
        if number % options.world == options.rank:
            yield _collate(group)
    if empty:
        raise LNSError(f"{source} holds no token: give a file or data set with at least one sequence")


def check_source(source: str, *, pack: bool = True) -> None:
    """What can be said of ``--data`` before the model is loaded.

    :raises LNSError: a file that is not there, a data set without its package, or plain text that is not to be packed.
    """
    path = Path(source)
    if path.suffix in (".npy", ".bin", ".txt", ".jsonl", ".json") and not path.is_file():
        raise LNSError(f"--data: no such file: {path}")
    if path.suffix not in (".npy", ".bin") and not path.is_file() and importlib.util.find_spec("datasets") is None:
        raise LNSError(f"{source} is no file, and data sets need: pip install datasets")
    if not pack and path.is_file() and path.suffix not in (".npy", ".bin", ".jsonl", ".json"):
        raise LNSError(
            f"--no-pack: {path} is plain text and has no documents; give JSON lines, or leave the option out"
        )


def _limited(sequences: Iterable[np.ndarray], options: DataOptions) -> Iterator[np.ndarray]:
    left = options.max_tokens
    for sequence in sequences:
        if len(sequence) == 0:
            continue
        if left is not None:
            sequence = sequence[:left]
            left -= len(sequence)
        if len(sequence):
            yield sequence
        if left == 0:
            return


def _sequences(source: str, options: DataOptions, tokenizer: Callable[[], Any]) -> Iterator[np.ndarray]:
    path = Path(source)
    if path.suffix in (".npy", ".bin"):
        yield from _from_tokens(_open(path), options)
        return
    if path.is_file() and path.suffix in (".jsonl", ".json"):
        documents: Iterable[Any] = _json_lines(path)
    elif path.is_file():
        documents = _text_blocks(path)
    elif path.suffix in (".txt", ".jsonl", ".json"):
        raise LNSError(f"--data: no such file: {source}")
    else:
        documents = _data_set(source)
    yield from _from_documents(documents, options, tokenizer, separate=path.suffix in (".jsonl", ".json", ""))


def _open(path: Path) -> Callable[[str], np.ndarray]:
    if not path.is_file():
        raise LNSError(f"--data: no such file: {path}")
    with path.open("rb") as file:
        numpy_format = file.read(6) == b"\x93NUMPY"

    def load(dtype: str) -> np.ndarray:
        if numpy_format:
            try:
                return np.load(path, mmap_mode="r")
            except ValueError as error:
                raise LNSError(f"{path}: damaged, or not an array of numbers: {error}") from None
        try:
            np.dtype(dtype)
        except TypeError:
            raise LNSError(f"--token-dtype: found {dtype!r}, expected a NumPy integer type such as uint16") from None
        if path.stat().st_size % np.dtype(dtype).itemsize:
            raise LNSError(f"{path}: {path.stat().st_size} bytes are no whole number of {dtype}; see --token-dtype")
        # An empty file cannot be mapped.
        return np.memmap(path, dtype=dtype, mode="r") if path.stat().st_size else np.empty(0, dtype)

    return load


def _from_tokens(load: Callable[[str], np.ndarray], options: DataOptions) -> Iterator[np.ndarray]:
    array = load(options.token_dtype)
    if not np.issubdtype(array.dtype, np.integer) or array.ndim not in (1, 2):
        raise LNSError(
            f"--data: found an array of {array.dtype} and shape {array.shape}, expected integer token ids "
            "of shape (tokens,) or (sequences, length)"
        )
    length = options.sequence_length
    for row in array if array.ndim == 2 else [array]:
        for start in range(0, len(row), length):
            yield np.asarray(row[start : start + length])


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


def _data_set(source: str) -> Iterable[Any]:
    try:
        import datasets
    except ImportError:
        raise LNSError(f"{source} is no file, and data sets need: pip install datasets") from None
    name, _, split = source.partition(":")
    name, _, config = name.partition(",")
    if not Path(name).exists() and not hub.reachable():
        raise LNSError(f"--data: {source} is neither a file nor a data set here, and the hub cannot be reached")
    try:
        return datasets.load_dataset(name, config or None, split=split or "train", streaming=True)
    except (OSError, ValueError, RuntimeError) as error:
        first = (str(error).strip().splitlines() or [""])[0][:200]
        raise LNSError(f"--data: {source} is neither a file nor a data set that can be read: {first}") from error


def _from_documents(
    documents: Iterable[Any], options: DataOptions, tokenizer: Callable[[], Any], *, separate: bool
) -> Iterator[np.ndarray]:
    encode = _encoder(options, tokenizer)
    length = options.sequence_length
    if not options.pack:
        for document in documents:
            yield encode(document)[0][:length]
        return
    rest = np.empty(0, np.int64)
    for document in documents:
        ids, end = encode(document)
        rest = np.concatenate([rest, ids, [end] if separate and end is not None else []]).astype(np.int64)
        full = len(rest) // length * length
        for start in range(0, full, length):
            yield rest[start : start + length]
        rest = rest[full:]
    yield rest


def _encoder(options: DataOptions, tokenizer: Callable[[], Any]) -> Callable[[Any], tuple[np.ndarray, int | None]]:
    """Document -> its ids and the id that ends a document (None where the document came as ids)."""
    loaded: list[Any] = []

    def encode(document: Any) -> tuple[np.ndarray, int | None]:
        if isinstance(document, Mapping):
            ids = next((document[field] for field in TOKEN_FIELDS if field in document), None)
            if ids is not None:
                return _ids(ids), None
            text = document.get(options.text_field)
        else:
            text = document
        if not isinstance(text, str):
            fields = sorted(document) if isinstance(document, Mapping) else type(document).__name__
            raise LNSError(
                f"--data: found a record with {fields}, expected text in {options.text_field!r} (see --text-field) "
                f"or ids in {' or '.join(map(repr, TOKEN_FIELDS))}"
            )
        if not loaded:
            loaded.append(tokenizer())
        ids = loaded[0](text, add_special_tokens=False, verbose=False)["input_ids"]
        return np.asarray(ids, np.int64), loaded[0].eos_token_id

    return encode


def _ids(values: Any) -> np.ndarray:
    try:
        array = np.asarray(values)
    except ValueError:  # lists of unequal length
        array = np.empty((0, 0))
    if array.ndim != 1 or not (np.issubdtype(array.dtype, np.integer) or array.size == 0):
        raise LNSError(f"--data: found {str(values)[:60]} as ids, expected one list of integers")
    return array.astype(np.int64)


def _check_ids(group: Iterable[np.ndarray], vocabulary: int, source: str) -> None:
    for sequence in group:
        low, high = int(sequence.min()), int(sequence.max())
        if low < 0 or high >= vocabulary:
            raise LNSError(
                f"{source}: found token id {low if low < 0 else high}, expected 0..{vocabulary - 1}: "
                "the data was tokenised with another vocabulary than the model's (or has another --token-dtype)"
            )


def _collate(group: list[np.ndarray]) -> dict[str, torch.Tensor]:
    width = max(map(len, group))
    ids, mask = np.zeros((len(group), width), np.int64), np.zeros((len(group), width), np.int64)
    for row, sequence in enumerate(group):
        ids[row, : len(sequence)] = sequence
        mask[row, : len(sequence)] = 1
    return {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}


def track(
    batches: Iterable[dict[str, torch.Tensor]], what: str, total: int | None
) -> Iterator[dict[str, torch.Tensor]]:
    """Pass batches through and show tokens done, speed and remaining time on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f} tokens"),
        TextColumn("{task.fields[speed]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=False) as progress:
        task = progress.add_task(what, total=total, speed="")
        for batch in batches:
            yield batch
            progress.advance(task, int(batch["attention_mask"].sum()))
            speed = progress.tasks[0].speed
            progress.update(task, speed=f"{speed:,.0f}/s" if speed else "")
        progress.update(task, total=progress.tasks[0].completed)  # the data may end early
