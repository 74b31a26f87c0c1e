"""``olmo-lns data check``: are these files what OLMo's or Megatron's data loader takes them for?"""

from __future__ import annotations

import argparse
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Iterable, Sequence

from olmo_lns.arguments import at_least
from olmo_lns.errors import LNSConfigError
from olmo_lns.study.corpora import DOLMA

__all__ = ["Data", "check_file", "find", "main"]

DTYPES = ("uint8", "uint16", "uint32", "uint64")
NUMPY_HEADER = b"\x93NUMPY"
INDEX_HEADER = b"MMIDIDX\x00\x00"
INDEX_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
WHOLE, CHUNK, CHUNKS = 1 << 30, 1 << 20, 256  # read whole up to 1 GiB, else 256 evenly spread MiB


@dataclass
class Data:
    """One data file. :param documents: end-of-document tokens seen (in the part read), or Megatron's own count."""

    path: Path
    dtype: str
    tokens: int = 0
    lowest: int = 0
    highest: int = 0
    documents: int = 0
    share_read: float = 1.0
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


def check_file(path: Path, *, dtype: str, vocab_size: int, eos: int | None, full: bool = False) -> Data:
    """Check one memmap. A file of at most 1 GiB is read whole, a larger one in 256 evenly spread MiB.

    :param dtype: the dtype the training config names; a Megatron file says its own.
    """
    if path.suffix == ".bin":
        return _indexed(path, vocab_size, eos, full)
    result = Data(path, dtype)
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(len(NUMPY_HEADER))
    if head == NUMPY_HEADER:
        result.problems.append("starts with a NumPy header (np.save): OLMo reads raw tokens; write with array.tofile")
    elif size == 0:
        result.problems.append("is empty")
    else:
        _tokens(result, size, vocab_size, eos, full)
    return result


def _tokens(result: Data, size: int, vocab_size: int, eos: int | None, full: bool) -> None:
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
    parts = _parts(memmap, size, width, full)
    result.share_read = min(1.0, sum(len(part) for part in parts) / result.tokens)
    result.lowest, result.highest = min(int(p.min()) for p in parts), max(int(p.max()) for p in parts)
    result.documents = sum(int((p == eos).sum()) for p in parts) if eos is not None else 0
    wider = all(not part[1::2].any() for part in parts) and result.highest > 0 and result.tokens > 1
    if wider:
        result.problems.append(f"every second token is 0: the file looks like a wider dtype than {result.dtype}")
    elif result.lowest < 0 or result.highest >= vocab_size:
        bad = result.lowest if result.lowest < 0 else result.highest
        result.problems.append(
            f"token {bad:,} is outside the vocabulary of {vocab_size:,}: not {result.dtype}, or of another tokenizer"
        )
    elif eos is not None and not result.documents and result.share_read == 1:
        result.problems.append(
            f"the end-of-document token {eos} never occurs: documents were not separated, or other --eos"
        )


def _parts(memmap: Any, size: int, width: int, full: bool) -> list[Any]:
    step = CHUNK // width
    if full or size <= WHOLE:
        return [memmap[i : i + 64 * step] for i in range(0, len(memmap), 64 * step)]
    starts = range(0, len(memmap) - step, max(2, (len(memmap) - step) // CHUNKS // 2 * 2))
    return [memmap[start : start + step] for start in starts]


def _indexed(path: Path, vocab_size: int, eos: int | None, full: bool) -> Data:
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
    _tokens(result, stored, vocab_size, eos, full)
    result.documents = documents - 1  # as the index counts them, whatever they end with
    return result


def _report(results: Sequence[Data], budget: float, sequence: int) -> int:
    for result in results:
        partly = "" if result.share_read == 1 else f", {result.share_read:.1%} read"
        tokens = (
            f"{result.tokens:,} tokens, ids {result.lowest}…{result.highest}, {result.documents:,} documents{partly}"
        )
        print(f"{result.path}: {result.dtype}, {tokens}")
        for problem in result.problems:
            print(f"{result.path}: PROBLEM: {problem}")
    # OLMo drops the rest of a file that does not fill a sequence.
    usable = sum(r.tokens // sequence * sequence for r in results if not r.problems)
    kinds = {result.dtype for result in results}
    bad = sum(bool(result.problems) for result in results)
    if len(kinds) > 1:
        print(f"PROBLEM: more than one dtype: {', '.join(sorted(kinds))}; a config names one")
        bad += 1
    print(f"{len(results)} files, {usable:,} usable tokens in sequences of {sequence}, {bad} problems")
    if budget:
        short = usable < budget
        word = f"short: the run would repeat the data {budget / usable:.3g} times" if short and usable else "enough"
        print(f"budget {budget:,.0f} tokens: {word if usable else 'no usable token'}")
        bad += short
    return int(bad > 0)


def _path(text: str) -> Path:
    if not text.strip():  # Path("") would be the present folder
        raise argparse.ArgumentTypeError("the path is empty: is the variable on the command line set?")
    return Path(text)


def main(argv: Sequence[str] | None = None) -> int:
    """:returns: 1 when a file has a problem or the tokens do not reach the budget."""
    if argv and argv[0] == "commonsense":
        from olmo_lns.finetune import commonsense

        return commonsense.main(argv[1:])
    if argv and argv[0] == "prepare":
        from olmo_lns.study import data_prepare

        return data_prepare.main(argv[1:])
    parser = argparse.ArgumentParser(
        prog="olmo-lns data",
        description="Make and check tokenised training data.",
    )
    commands = parser.add_subparsers(required=True, metavar="what")
    command = commands.add_parser(
        "check", help="dtype, size, vocabulary range and number of tokens; exit code 1 when something is wrong"
    )
    commands.add_parser("prepare", help="tokenise C4, text or JSON lines")
    commands.add_parser("commonsense", help="Commonsense170K as prompts and completions")
    command.add_argument("paths", nargs="+", type=_path, help="folders (searched recursively) or files")
    command.add_argument("--dtype", choices=DTYPES, default=DOLMA.dtype, help="of the .npy files, as data.memmap_dtype")
    command.add_argument(
        "--vocab-size", type=at_least(1), default=DOLMA.vocabulary, help="default %(default)s, the shipped configs'"
    )
    command.add_argument(
        "--eos", type=int, default=DOLMA.eos, help="end-of-document token (default %(default)s); -1: none"
    )
    command.add_argument("--budget", type=float, default=20e9, help="tokens needed (default 20e9); 0: do not compare")
    command.add_argument("--sequence", type=at_least(1), default=4096, help="sequence length (default 4096)")
    command.add_argument("--full", action="store_true", help="read files above 1 GiB whole too")
    args = parser.parse_args(argv)
    eos = args.eos if args.eos >= 0 else None
    found = find(args.paths)
    results = [check_file(p, dtype=args.dtype, vocab_size=args.vocab_size, eos=eos, full=args.full) for p in found]
    return _report(results, args.budget, args.sequence)
