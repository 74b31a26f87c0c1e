"""Find and check files of token ids: OLMo's memmaps (``*.npy`` by name) and Megatron's pairs (``*.bin``, ``*.idx``)."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Iterable, Iterator, Sequence

import numpy as np

from olmo_lns.errors import LNSConfigError, one_line
from olmo_lns.study.data.corpora import DOLMA

DTYPES = ("uint8", "uint16", "uint32", "uint64")
NUMPY_HEADER = b"\x93NUMPY"
CHUNK = 1 << 26  # tokens per check


@dataclass
class Data:
    """One data file. :param documents: number of end-of-document tokens, or Megatron's count.

    :param eos: id of the end of a document.
    :param labels: number of tokens with a loss, by the label mask beside the file; None without a mask.
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
    """Return OLMo's ``*.npy`` and Megatron's ``*.bin`` in folders (also linked ones), or the given files; each once.

    :raises LNSConfigError: a path that does not exist, or nothing found.
    """
    found: dict[str, Path] = {}
    for path in paths:
        if not path.exists():
            raise LNSConfigError(f"{path}: no such file or folder")
        named = path.with_suffix(".bin") if path.suffix == ".idx" else path
        for file in sorted(_walk(path)) if path.is_dir() else [named]:
            found.setdefault(os.path.realpath(file), file)
    if not found:
        raise LNSConfigError("no data found: expected *.npy (OLMo) or *.bin with *.idx (Megatron)")
    return [*found.values()]


def _walk(folder: Path) -> Iterator[Path]:
    seen = set()
    for root, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        if (real := os.path.realpath(root)) in seen:  # a link to a parent folder
            folders.clear()
            continue
        seen.add(real)
        yield from (Path(root, name) for name in names if name.endswith((".npy", ".bin")))


def record_of(path: Path) -> dict[str, Any]:
    """Return the ``NAME.json`` that ``data prepare`` wrote beside a file, by part or whole name; else empty.

    :raises LNSConfigError: the record cannot be read.
    """
    for record in (path.with_name(f"{path.stem}.json"), path.with_name(f"{path.stem.rpartition('-')[0]}.json")):
        if record.is_file() and record.name != "tokenizer.json":
            try:
                return dict(json.loads(record.read_text(encoding="utf-8")))
            except (ValueError, TypeError) as error:
                raise LNSConfigError(f"{record}: not a record of `data prepare`: {error}") from None
    return {}


def check_file(path: Path, *, dtype: str | None = None, vocabulary: int | None = None, eos: int | None = None) -> Data:
    """Read and check one file; faults are in ``problems``, and nothing is raised.

    :param dtype, vocabulary: those of the training config; None reads the record beside the file (without one uint16,
        and the vocabulary of the shipped configs); a Megatron file names its dtype. :param eos: the same; -1: none.
    """
    result = Data(path, dtype or "uint16")
    try:
        known = record_of(path)
        result.eos = int(known.get("eos", DOLMA.eos)) if eos is None else eos
        if path.suffix == ".bin":
            documents = _index(result)
            _tokens(result, vocabulary or DOLMA.embedding)
            result.documents = documents
            return result
        result.dtype = dtype or str(known.get("dtype", "uint16"))
        with path.open("rb") as file:
            if file.read(len(NUMPY_HEADER)) == NUMPY_HEADER:
                raise LNSConfigError("has a NumPy header (np.save): OLMo reads raw tokens; write with array.tofile")
        _tokens(result, vocabulary or int(known.get("vocabulary", DOLMA.vocabulary)))
        if (mask := path.with_suffix(".mask")).is_file():
            if (found := mask.stat().st_size) != result.tokens:
                raise LNSConfigError(f"{mask.name} has {found:,} positions, the file {result.tokens:,} tokens")
            result.labels = int(np.count_nonzero(np.memmap(mask, dtype=np.bool_, mode="r")))
    except (LNSConfigError, OSError) as error:
        result.problems.append(str(error))
    return result


def _tokens(result: Data, vocabulary: int) -> None:
    """Check and count the ids of a memmap."""
    eos = None if result.eos == -1 else result.eos
    size, width = result.path.stat().st_size, np.dtype(result.dtype).itemsize
    if not size:
        raise LNSConfigError("is empty")
    if size % width:
        raise LNSConfigError(
            f"{size:,} bytes, expected a multiple of {width} ({result.dtype}): truncated, or another dtype"
        )
    memmap = np.memmap(result.path, dtype=result.dtype, mode="r")
    result.tokens, result.lowest, odd = len(memmap), int(memmap[0]), 0
    for part in (memmap[i : i + CHUNK] for i in range(0, len(memmap), CHUNK)):
        result.lowest, result.highest = min(result.lowest, int(part.min())), max(result.highest, int(part.max()))
        result.documents += 0 if eos is None else int((part == eos).sum())
        odd = max(odd, int(part[1::2].max(initial=0)))
    if len(memmap) > 1 and result.highest > 255 and odd < 16:  # high halves of ids below a million
        raise LNSConfigError(
            f"every second token is 0 or close to 0: the file seems to have a wider dtype than {result.dtype}"
        )
    if result.lowest < 0 or result.highest >= vocabulary:
        bad = result.lowest if result.lowest < 0 else result.highest
        where = f"outside the vocabulary of {vocabulary:,}: not {result.dtype}, or of another tokenizer"
        raise LNSConfigError(f"token {bad:,} is {where}")
    if eos is not None and not result.documents:
        raise LNSConfigError(f"the end-of-document token {eos} never occurs: documents not separated, or other --eos")


def _index(result: Data) -> int:
    """Set the dtype of a ``.bin`` and return its number of documents, both from its ``.idx``.

    :raises LNSConfigError: Megatron cannot read the index, or it is of another ``.bin``.
    """
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    if not result.path.with_suffix(".idx").is_file():
        raise LNSConfigError("has no .idx beside it")
    try:
        index = IndexedDataset(str(result.path.with_suffix(""))).index
    except (AssertionError, ValueError) as error:
        raise LNSConfigError(f"Megatron cannot read it: {one_line(error)}") from None
    result.dtype = np.dtype(index.dtype).name
    counted = int(index.sequence_lengths.sum(dtype=np.int64)) * np.dtype(index.dtype).itemsize
    if counted != (size := result.path.stat().st_size):
        raise LNSConfigError(f"{size:,} bytes, but its index counts {counted:,}: truncated")
    return len(index.document_indices) - 1


def is_heldout(path: Path) -> bool:
    """Return true for a held-out file, by its folder or the start of its name."""
    return bool({path.parent.name, path.stem.split("-")[0]} & {"heldout", "validation"})


def report(results: Sequence[Data], budget: float, rows: int, sequence: int) -> int:
    """Print the files and their problems. :returns: the number of problems, including too few tokens or sequences."""
    for result in results:
        labels = "" if result.labels is None else f", {result.labels:,} with a label"
        ids = f"ids {result.lowest}…{result.highest}, {result.documents:,} documents{labels}"
        print(f"{result.path}: {result.dtype}, {result.tokens:,} tokens, {ids}")
        for problem in result.problems:
            print(f"{result.path}: PROBLEM: {problem}")
    # OLMo drops the end of a file that does not fill a sequence; padding has no label; held-out text is not trained on.
    trained = [r for r in results if not r.problems and not is_heldout(r.path)]
    sequences = sum(r.tokens // sequence for r in trained)
    usable = sum(r.tokens // sequence * sequence if r.labels is None else r.labels for r in trained)
    kinds, bad = {result.dtype for result in results}, sum(bool(result.problems) for result in results)
    if len(kinds) > 1:
        print(f"PROBLEM: more than one dtype: {', '.join(sorted(kinds))}; expected one for a config")
        bad += 1
    trained_on = f"{usable:,} tokens to train on in {sequences:,} sequences of {sequence}"
    print(f"{len(results)} files, {trained_on}, {bad} problems")
    for wanted, found, what in ((budget, usable, "tokens"), (rows, sequences, "sequences")):
        if wanted > found:
            print(
                f"PROBLEM: wanted {wanted:,.0f} {what}: the run would read the data {wanted / max(1, found):.3g} times"
            )
            bad += 1
    return bad
