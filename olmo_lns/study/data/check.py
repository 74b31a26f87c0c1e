"""``olmo-lns data check``: are these files what OLMo's or Megatron's data loader takes them for?"""

from __future__ import annotations

import argparse
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Iterable, Sequence

from olmo_lns.arguments import at_least
from olmo_lns.errors import LNSConfigError
from olmo_lns.study.data.corpora import DOLMA

__all__ = ["Data", "check_file", "find", "main"]

DTYPES = ("uint8", "uint16", "uint32", "uint64")
HELDOUT = ("heldout", "validation")  # folders, or beginnings of file names
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


def _report(results: Sequence[Data], budget: float, rows: int, sequence: int) -> int:
    for result in results:
        labels = "" if result.labels is None else f", {result.labels:,} with a label"
        ids = f"ids {result.lowest}…{result.highest}, {result.documents:,} documents{labels}"
        print(f"{result.path}: {result.dtype}, {result.tokens:,} tokens, {ids}")
        for problem in result.problems:
            print(f"{result.path}: PROBLEM: {problem}")
    # OLMo drops the rest of a file that does not fill a sequence; padding has no label; nobody trains on held-out text.
    trained = [
        r for r in results if not r.problems and not {r.path.parent.name, r.path.stem.split("-")[0]} & set(HELDOUT)
    ]
    sequences = sum(r.tokens // sequence for r in trained)
    usable = sum(r.tokens // sequence * sequence if r.labels is None else r.labels for r in trained)
    kinds = {result.dtype for result in results}
    bad = sum(bool(result.problems) for result in results)
    if len(kinds) > 1:
        print(f"PROBLEM: more than one dtype: {', '.join(sorted(kinds))}; a config names one")
        bad += 1
    print(
        f"{len(results)} files, {usable:,} tokens to train on in {sequences:,} sequences of {sequence}, {bad} problems"
    )
    for wanted, found, what in ((budget, usable, "tokens"), (rows, sequences, "sequences")):
        if wanted:
            word = (
                "enough"
                if found >= wanted
                else f"short: the run would read the data {wanted / max(1, found):.3g} times"
            )
            print(f"wanted {wanted:,.0f} {what}: {word if found else 'there are none'}")
            bad += found < wanted
    return int(bad > 0)


def _path(text: str) -> Path:
    if not text.strip():  # Path("") would be the present folder
        raise argparse.ArgumentTypeError("the path is empty: is the variable on the command line set?")
    return Path(text)


def main(argv: Sequence[str] | None = None) -> int:
    """:returns: 1 when a file has a problem or the tokens do not reach the budget."""
    if argv and argv[0] == "prepare":
        from olmo_lns.study.data import prepare as data_prepare

        return data_prepare.main(argv[1:])
    if argv and argv[0] in ("fetch", "megatron"):
        from olmo_lns.study.data import fetch

        return fetch.main(argv)
    parser = argparse.ArgumentParser(
        prog="olmo-lns data",
        description="Make and check tokenised training data.",
    )
    commands = parser.add_subparsers(required=True, metavar="what")
    command = commands.add_parser(
        "check", help="dtype, size, vocabulary range and number of tokens; exit code 1 when something is wrong"
    )
    commands.add_parser("fetch", help="fetch a public tokenised corpus")
    commands.add_parser("prepare", help="tokenise C4, text or JSON lines")
    commands.add_parser("megatron", help="turn OLMo's memmaps into Megatron's files")
    command.add_argument("paths", nargs="+", type=_path, help="folders (searched recursively) or files")
    command.add_argument("--dtype", choices=DTYPES, default=DOLMA.dtype, help="of the .npy files, as data.memmap_dtype")
    command.add_argument(
        "--vocab-size", type=at_least(1), default=DOLMA.vocabulary, help="default %(default)s, the shipped configs'"
    )
    command.add_argument(
        "--eos", type=int, default=DOLMA.eos, help="end-of-document token (default %(default)s); -1: none"
    )
    need = "; 0: do not compare"
    command.add_argument(
        "--budget", type=float, help=f"tokens to train on, without padding (default 20e9, with --rows 0){need}"
    )
    command.add_argument("--rows", type=at_least(0), default=0, help=f"sequences a run reads: steps × batch{need}")
    command.add_argument("--sequence", type=at_least(1), default=4096, help="sequence length (default 4096)")
    args = parser.parse_args(argv)
    eos = args.eos if args.eos >= 0 else None
    found = find(args.paths)
    results = [check_file(p, dtype=args.dtype, vocab_size=args.vocab_size, eos=eos) for p in found]
    budget = args.budget if args.budget is not None else 0 if args.rows else 20e9
    return _report(results, budget, args.rows, args.sequence)
