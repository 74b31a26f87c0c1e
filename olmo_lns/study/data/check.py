"""Find and check files of token ids: OLMo's memmaps (``*.npy`` by name) and Megatron's pairs (``*.bin``, ``*.idx``)."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Iterable, Iterator, Sequence

import numpy as np

from olmo_lns.errors import LNSConfigError, one_line
from olmo_lns.study.data.corpora import DOLMA
from olmo_lns.token_files import NUMPY_HEADER, read_record

DTYPES = ("uint8", "uint16", "uint32", "uint64")
CHUNK = 1 << 26  # tokens read at a time


@dataclass
class Data:
    """Facts about a data file.

    :param eos: id of the end-of-document token; -1 for none.
    :param documents: number of end-of-document tokens, or the count in Megatron's index.
    :param labels: number of tokens with a loss, from the label mask beside the file, or None without a mask.
    """

    path: Path
    dtype: str
    tokens: int = 0
    lowest: int = 0
    highest: int = 0
    eos: int | None = None
    documents: int = 0
    labels: int | None = None
    problems: list[str] = field(default_factory=list)


def find(paths: Iterable[Path]) -> list[Path]:
    """Return files as they are, and all ``*.npy`` (OLMo) and ``*.bin`` (Megatron) in folders. No file is repeated.

    :raises LNSConfigError: if a path does not exist, or the folders have no data.
    """
    files: dict[str, Path] = {}
    for path in paths:
        if not path.exists():
            raise LNSConfigError(f"{path} was not found. Pass a file or a folder of token ids.")
        data_file = path.with_suffix(".bin") if path.suffix == ".idx" else path
        for file in sorted(_data_files(path)) if path.is_dir() else [data_file]:
            files.setdefault(os.path.realpath(file), file)
    if not files:
        raise LNSConfigError(
            "No data files were found. Expected *.npy (OLMo), or *.bin with *.idx (Megatron). Pass the folder that has "
            "them."
        )
    return list(files.values())


def _data_files(folder: Path) -> Iterator[Path]:
    seen = set()
    for root, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        if (real := os.path.realpath(root)) in seen:  # a link to a parent folder
            folders.clear()
            continue
        seen.add(real)
        yield from (Path(root, name) for name in names if name.endswith((".npy", ".bin")))


def check_file(path: Path, *, dtype: str | None = None, vocabulary: int | None = None, eos: int | None = None) -> Data:
    """Read and check one file. Faults are listed in ``problems``; none is raised.

    :param dtype, vocabulary: values of the training config. None takes them from the record beside the file; without a
        record uint16 and the vocabulary of the shipped configs. A Megatron file names its own dtype.
    :param eos: id of the end-of-document token, or -1 for none. None means the same as for ``dtype``.
    """
    result = Data(path, dtype or "uint16")
    try:
        record = read_record(path)
        result.eos = int(record.get("eos", DOLMA.eos)) if eos is None else eos
        if path.suffix == ".bin":
            documents = _read_index(result)
            _check_tokens(result, vocabulary or DOLMA.embedding)
            result.documents = documents
            return result
        result.dtype = dtype or str(record.get("dtype", "uint16"))
        with path.open("rb") as file:
            if file.read(len(NUMPY_HEADER)) == NUMPY_HEADER:
                raise LNSConfigError(
                    "The file has a NumPy header, as np.save writes it. OLMo reads raw token ids. Write them with "
                    "array.tofile."
                )
        _check_tokens(result, vocabulary or int(record.get("vocabulary", DOLMA.vocabulary)))
        if (mask := path.with_suffix(".mask")).is_file():
            if (positions := mask.stat().st_size) != result.tokens:
                raise LNSConfigError(
                    f"The label mask {mask.name} has {positions:,} positions, but the file has {result.tokens:,} "
                    "tokens. Make both again."
                )
            result.labels = int(np.count_nonzero(np.memmap(mask, dtype=np.bool_, mode="r")))
    except (LNSConfigError, OSError, TypeError, ValueError) as error:  # a record with a wrong dtype or end token
        result.problems.append(str(error))
    return result


def _check_tokens(result: Data, vocabulary: int) -> None:
    """Check and count the token ids in a file."""
    eos = None if result.eos == -1 else result.eos
    size, itemsize = result.path.stat().st_size, np.dtype(result.dtype).itemsize
    if not size:
        raise LNSConfigError("The file is empty. Remove it, or write it again.")
    if size % itemsize:
        raise LNSConfigError(
            f"The file has {size:,} bytes, which is not a multiple of {itemsize}, the size of {result.dtype}. It was "
            "cut, or has another dtype. Write it again, or pass --dtype."
        )
    tokens = np.memmap(result.path, dtype=result.dtype, mode="r")
    result.tokens, result.lowest, highest_odd = len(tokens), int(tokens[0]), 0
    for chunk in (tokens[start : start + CHUNK] for start in range(0, len(tokens), CHUNK)):
        result.lowest, result.highest = min(result.lowest, int(chunk.min())), max(result.highest, int(chunk.max()))
        result.documents += 0 if eos is None else int((chunk == eos).sum())
        highest_odd = max(highest_odd, int(chunk[1::2].max(initial=0)))
    if len(tokens) > 1 and result.highest > 255 and highest_odd < 16:  # the upper halves of wider ids below a million
        raise LNSConfigError(
            f"Every second token is 0 or close to 0. The file seems to have a wider dtype than {result.dtype}. Pass "
            "its dtype with --dtype."
        )
    if result.lowest < 0 or result.highest >= vocabulary:
        token = result.lowest if result.lowest < 0 else result.highest
        raise LNSConfigError(
            f"Token {token:,} is outside the vocabulary of {vocabulary:,}. The file is not {result.dtype}, or another "
            "tokenizer made it. Pass --dtype or --vocab-size."
        )
    if eos is not None and not result.documents:
        raise LNSConfigError(
            f"The end-of-document token {eos} never occurs. Documents are not separated, or end with another token. "
            "Pass that token with --eos, or -1 for none."
        )


def _read_index(result: Data) -> int:
    """Set the dtype of a ``.bin`` from its ``.idx``, and return the number of documents.

    :raises LNSConfigError: if Megatron cannot read the index, or it is the index of another ``.bin``.
    """
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    if not result.path.with_suffix(".idx").is_file():
        raise LNSConfigError("The file has no .idx beside it. Megatron reads pairs of both. Make the pair again.")
    try:
        index = IndexedDataset(str(result.path.with_suffix(""))).index
    except (AssertionError, ValueError) as error:
        raise LNSConfigError(f"Megatron cannot read the index: {one_line(error)}. Make the pair again.") from None
    result.dtype = np.dtype(index.dtype).name
    expected = int(index.sequence_lengths.sum(dtype=np.int64)) * np.dtype(index.dtype).itemsize
    if expected != (size := result.path.stat().st_size):
        raise LNSConfigError(
            f"The file has {size:,} bytes, but its index counts {expected:,}. The file was cut, or the index belongs "
            "to another file. Make the pair again."
        )
    return len(index.document_indices) - 1


def is_heldout(path: Path) -> bool:
    """Return true if the name of a file, or of its folder, marks it as held-out."""
    return bool({path.parent.name, path.stem.split("-")[0]} & {"heldout", "validation"})


def print_files(results: Sequence[Data], budget: float, rows: int, sequence: int) -> int:
    """Print the files and their problems. :returns: the number of problems, including too few tokens or sequences."""
    for result in results:
        labels = "" if result.labels is None else f", {result.labels:,} with a label"
        ids = f"ids {result.lowest}…{result.highest}, {result.documents:,} documents{labels}"
        print(f"{result.path}: {result.dtype}, {result.tokens:,} tokens, {ids}")
        for problem in result.problems:
            print(f"{result.path}: PROBLEM: {problem}")
    # OLMo drops the end of a file that does not fill a sequence. Padding has no label. No run trains on held-out files.
    training = [result for result in results if not result.problems and not is_heldout(result.path)]
    sequences = sum(data.tokens // sequence for data in training)
    tokens = sum(data.tokens // sequence * sequence if data.labels is None else data.labels for data in training)
    problems = sum(bool(result.problems) for result in results)
    if len(dtypes := sorted({result.dtype for result in results})) > 1:
        print(f"PROBLEM: The files have the dtypes {', '.join(dtypes)}. A config has one. Train on files of one dtype.")
        problems += 1
    totals = f"{tokens:,} tokens to train on in {sequences:,} sequences of {sequence}"
    print(f"{len(results)} files, {totals}, {problems} problems")
    for expected, actual, unit in ((budget, tokens, "tokens"), (rows, sequences, "sequences")):
        if expected > actual:
            repeats = expected / max(1, actual)
            print(
                f"PROBLEM: The run needs {expected:,.0f} {unit}. It would read these data {repeats:.3g} times. Add "
                "data."
            )
            problems += 1
    return problems
