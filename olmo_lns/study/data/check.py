"""Are these files what OLMo's or Megatron's data loader takes them for?"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Iterable

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
    """Read one memmap and check it.

    :param dtype: the dtype the training config names; a Megatron file says its own.
    """
    if path.suffix == ".bin":
        return _indexed(path, vocab_size, eos)
    result = Data(path, dtype)
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(len(NUMPY_HEADER))
    if head == NUMPY_HEADER:
        result.problems.append("starts with a NumPy header (np.save): OLMo reads raw tokens; write with array.tofile")
    elif size == 0:
        result.problems.append("is empty")
    else:
        _tokens(result, size, vocab_size, eos)
        _mask(result)
    return result


def _mask(result: Data) -> None:
    import numpy as np

    mask = result.path.with_suffix(".mask")
    if mask.is_file():
        if (found := mask.stat().st_size) != result.tokens:
            result.problems.append(f"{mask.name} has {found:,} positions, the file {result.tokens:,} tokens")
        result.labels = int(np.count_nonzero(np.memmap(mask, dtype=np.bool_, mode="r"))) if found else 0


def _tokens(result: Data, size: int, vocab_size: int, eos: int | None) -> None:
    import numpy as np

    width = np.dtype(result.dtype).itemsize
    if size % width:
        result.problems.append(
            f"{size:,} bytes are no multiple of {width} ({result.dtype}): truncated, or of another dtype"
        )
    result.tokens = size // width
    if not result.tokens:
        return
    memmap = np.memmap(result.path, dtype=result.dtype, mode="r", shape=(result.tokens,))
    result.lowest, wider = int(memmap[0]), result.tokens > 1
    for part in (memmap[i : i + CHUNK] for i in range(0, len(memmap), CHUNK)):
        result.lowest, result.highest = min(result.lowest, int(part.min())), max(result.highest, int(part.max()))
        result.documents += 0 if eos is None else int((part == eos).sum())
        wider = wider and not part[1::2].any()
    if wider and result.highest > 0:
        result.problems.append(f"every second token is 0: the file looks like a wider dtype than {result.dtype}")
    elif result.lowest < 0 or result.highest >= vocab_size:
        bad = result.lowest if result.lowest < 0 else result.highest
        result.problems.append(
            f"token {bad:,} is outside the vocabulary of {vocab_size:,}: not {result.dtype}, or of another tokenizer"
        )
    elif eos is not None and not result.documents:
        result.problems.append(
            f"the end-of-document token {eos} never occurs: documents were not separated, or other --eos"
        )


def _indexed(path: Path, vocab_size: int, eos: int | None) -> Data:
    """Megatron's ``.bin`` with its ``.idx``: magic, version, dtype code, counts; lengths, pointers, documents."""
    import numpy as np

    index = path.with_suffix(".idx")
    result = Data(path, "?")
    if not index.is_file():
        result.problems.append(f"has no {index.name} beside it")
        return result
    if not path.is_file():
        result.problems.append(f"does not exist, but {index.name} does")
        return result
    raw = index.read_bytes()
    if raw[:9] != INDEX_HEADER or len(raw) < 34:
        result.problems.append(f"{index.name} does not start with Megatron's index header: not an indexed dataset")
        return result
    version, code, sequences, documents = struct.unpack_from("<QBQQ", raw, 9)
    result.dtype = INDEX_DTYPES.get(code, "?")
    needed = 34 + sequences * (4 + 8) + documents * 8
    if version != 1 or result.dtype == "?" or len(raw) < needed:
        result.problems.append(
            f"{index.name}: version {version}, dtype code {code}, {len(raw):,} of {needed:,} bytes: damaged or unknown"
        )
        return result
    stored = int(np.frombuffer(raw, "<i4", sequences, 34).sum(dtype=np.int64)) * np.dtype(result.dtype).itemsize
    if stored != path.stat().st_size:
        result.problems.append(f"{path.stat().st_size:,} bytes, but its index counts {stored:,}: truncated")
        return result
    _tokens(result, stored, vocab_size, eos)
    result.documents = documents - 1  # as the index counts them, whatever they end with
    return result


def held_out(path: Path) -> bool:
    """Whether nobody trains on it, by its folder or the beginning of its name."""
    return bool({path.parent.name, path.stem.split("-")[0]} & {"heldout", "validation"})
