"""Are these files what OLMo's or Megatron's data loader takes them for?"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Iterable

import numpy as np

from olmo_lns.errors import LNSConfigError

__all__ = ["DTYPES", "Data", "check_file", "find", "held_out"]

DTYPES = ("uint8", "uint16", "uint32", "uint64")
NUMPY_HEADER = b"\x93NUMPY"
INDEX_HEADER = b"MMIDIDX\x00\x00"
INDEX_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
CHUNK = 1 << 26  # tokens looked at together


@dataclass
class Data:
    """One data file. :param documents: end-of-document tokens, or Megatron's own count.

    :param labels: tokens that a loss is taken over, by the label mask beside the file; None without a mask.
    """

    path: Path
    dtype: str
    tokens: int = 0
    lowest: int = 0
    highest: int = 0
    documents: int = 0
    labels: int | None = None
    problems: list[str] = field(default_factory=list)


def find(paths: Iterable[Path]) -> list[Path]:
    """OLMo's ``*.npy`` and Megatron's ``*.bin`` of the folders, recursively, or the files themselves.

    :raises LNSConfigError: a path that does not exist, or nothing found.
    """
    found: list[Path] = []
    paths = list(paths)
    for path in paths:
        if path.is_dir():
            found += sorted(p for p in path.rglob("*") if p.suffix in (".npy", ".bin") and p.is_file())
        elif path.is_file():
            found.append(path.with_suffix(".bin") if path.suffix == ".idx" else path)
        else:
            raise LNSConfigError(f"{path}: no such file or folder")
    if not found:
        where = ", ".join(map(str, paths))
        raise LNSConfigError(f"no data found in {where}: expected *.npy (OLMo) or *.bin with *.idx (Megatron)")
    return found


def check_file(path: Path, *, dtype: str, vocab_size: int, eos: int | None) -> Data:
    """Read one memmap and check it; what is wrong is in ``problems``, and nothing is raised.

    :param dtype: the dtype the training config names; a Megatron file says its own.
    """
    result = Data(path, dtype)
    try:
        if path.suffix == ".bin":
            _tokens(result, vocab_size, eos, documents=_index(result))
        else:
            with path.open("rb") as file:
                head = file.read(len(NUMPY_HEADER))
            if head == NUMPY_HEADER:
                raise LNSConfigError("has a NumPy header (np.save): OLMo reads raw tokens; write with array.tofile")
            _tokens(result, vocab_size, eos)
            _mask(result)
    except LNSConfigError as error:
        result.problems.append(str(error))
    return result


def _mask(result: Data) -> None:
    mask = result.path.with_suffix(".mask")
    if mask.is_file():
        if (found := mask.stat().st_size) != result.tokens:
            raise LNSConfigError(f"{mask.name} has {found:,} positions, the file {result.tokens:,} tokens")
        result.labels = int(np.count_nonzero(np.memmap(mask, dtype=np.bool_, mode="r")))


def _tokens(result: Data, vocab_size: int, eos: int | None, documents: int | None = None) -> None:
    """:param documents: as an index counts them, whatever they end with."""
    size, width = result.path.stat().st_size, np.dtype(result.dtype).itemsize
    if not size:
        raise LNSConfigError("is empty")
    if size % width:
        raise LNSConfigError(f"{size:,} bytes are no multiple of {width} ({result.dtype}): truncated, or another dtype")
    memmap = np.memmap(result.path, dtype=result.dtype, mode="r")
    result.tokens, result.lowest, wider, ends = len(memmap), int(memmap[0]), len(memmap) > 1, 0
    for part in (memmap[i : i + CHUNK] for i in range(0, len(memmap), CHUNK)):
        result.lowest, result.highest = min(result.lowest, int(part.min())), max(result.highest, int(part.max()))
        ends += 0 if eos is None else int((part == eos).sum())
        wider = wider and not part[1::2].any()
    result.documents = ends if documents is None else documents
    if wider and result.highest > 0:
        raise LNSConfigError(f"every second token is 0: the file looks like a wider dtype than {result.dtype}")
    if result.lowest < 0 or result.highest >= vocab_size:
        bad = result.lowest if result.lowest < 0 else result.highest
        where = f"outside the vocabulary of {vocab_size:,}: not {result.dtype}, or of another tokenizer"
        raise LNSConfigError(f"token {bad:,} is {where}")
    if eos is not None and not ends:
        raise LNSConfigError(f"the end-of-document token {eos} never occurs: documents not separated, or other --eos")


def _index(result: Data) -> int:
    """Read Megatron's ``.idx``: magic, version, dtype code, counts; lengths, pointers, documents. Sets the dtype.

    :returns: the documents. :raises LNSConfigError: it is no index, or not of this ``.bin``.
    """
    index = result.path.with_suffix(".idx")
    for file, other in ((index, result.path), (result.path, index)):
        if not file.is_file():
            raise LNSConfigError(f"has no {file.name} beside {other.name}")
    raw = index.read_bytes()
    if raw[:9] != INDEX_HEADER or len(raw) < 34:
        raise LNSConfigError(f"{index.name} does not start with Megatron's index header: not an indexed dataset")
    version, code, sequences, documents = struct.unpack_from("<QBQQ", raw, 9)
    needed = 34 + sequences * (4 + 8) + documents * 8
    if version != 1 or code not in INDEX_DTYPES or len(raw) < needed:
        found = f"version {version}, dtype code {code}, {len(raw):,} of {needed:,} bytes"
        raise LNSConfigError(f"{index.name}: {found}: damaged or unknown")
    result.dtype = INDEX_DTYPES[code]
    stored = int(np.frombuffer(raw, "<i4", sequences, 34).sum(dtype=np.int64)) * np.dtype(result.dtype).itemsize
    if stored != (size := result.path.stat().st_size):
        raise LNSConfigError(f"{size:,} bytes, but its index counts {stored:,}: truncated")
    return int(documents) - 1


def held_out(path: Path) -> bool:
    """Whether nobody trains on it, by its folder or the beginning of its name."""
    return bool({path.parent.name, path.stem.split("-")[0]} & {"heldout", "validation"})
