"""``olmo-lns data``: fetch, make, convert and check tokenised training data.

``fetch`` reads a list: each line has a file's name and its address. No run trains on files under ``heldout/``. Of
each file only the beginning is fetched, so the servers must answer byte ranges.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import struct
import time
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Iterable, Sequence
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np

from olmo_lns.arguments import above_zero, at_least
from olmo_lns.errors import LNSConfigError, one_line
from olmo_lns.study.data import prepare
from olmo_lns.study.data.corpora import DOLMA
from olmo_lns.study.files import located

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
    """Whether the file is held out, by its folder or the beginning of its name."""
    return bool({path.parent.name, path.stem.split("-")[0]} & {"heldout", "validation"})


REQUEST = 1 << 26  # bytes
WIDTH = 2  # bytes of a token: uint16
SEQUENCE = 4096  # a file's share is a multiple of it
HELDOUT = "heldout/"


def read_list(path: Path) -> dict[str, str]:
    """Name -> address.

    :raises LNSConfigError: a line that is not ``NAME.npy ADDRESS``.
    """
    found: dict[str, str] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not (words := line.partition("#")[0].split()):
            continue
        named = re.fullmatch(rf"(?:{HELDOUT})?[\w.-]+\.npy", words[0])
        if len(words) != 2 or not named or words[0] in found or not words[1].startswith(("http://", "https://")):
            raise LNSConfigError(
                f"{path}, line {number}: {line!r}: expected a name that no line before it has, and an address: "
                "NAME.npy https://…, or heldout/NAME.npy https://…"
            )
        found[words[0]] = words[1]
    return found


def fetch(files: dict[str, str], out: Path, tokens: float) -> None:
    """Write the first tokens of each file to ``out``, in equal shares; goes on with what is there in part.

    :param tokens: of all files together.
    :raises LNSConfigError: an address that cannot be read, or a file that is there with another length.
    """
    share = -(-int(tokens) // max(1, len(files)) // SEQUENCE) * SEQUENCE * WIDTH
    for name, url in files.items():
        path, total = out / name, _read(url, 0, 1)[1]
        wanted = min(share, total)
        if path.is_file():
            if (size := path.stat().st_size) != wanted:
                raise LNSConfigError(f"{path}: {size:,} bytes, but of {url} {wanted:,} are wanted: remove one")
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        with part.open("ab") as file:
            while (done := file.tell()) < wanted:
                file.write(_read(url, done, min(wanted, done + REQUEST))[0])
                print(f"\r{path}: {file.tell() / wanted:.0%} of {wanted / WIDTH:,.0f} tokens", end="", flush=True)
            file.truncate(wanted)
        os.replace(part, path)
        print(" (the whole file)" if wanted == total else "")


def _read(url: str, start: int, stop: int, attempts: int = 5) -> tuple[bytes, int]:
    """Bytes ``start`` to ``stop``, and the length of the whole file."""
    request = Request(url, headers={"Range": f"bytes={start}-{stop - 1}", "User-Agent": "olmo-lns"})
    problem = ""
    for attempt in range(attempts):
        time.sleep(2**attempt if attempt else 0)
        try:
            with urlopen(request, timeout=60) as answer:
                if answer.status != 206:
                    raise LNSConfigError(f"{url}: the server answers no byte ranges (HTTP {answer.status})")
                data, total = answer.read(), int(answer.headers["Content-Range"].rpartition("/")[2])
            if len(data) == stop - start:
                return data, total
            problem = f"{len(data):,} of {stop - start:,} bytes came"
        except HTTPError as error:
            problem = f"HTTP {error.code} ({error.reason})"
            if error.code < 500:
                raise LNSConfigError(f"{url}: {problem}") from None
        except (OSError, HTTPException) as error:
            problem = one_line(error)
    raise LNSConfigError(f"{url}: {problem}; called again, this goes on where it stopped")


def to_megatron(memmap: Path, out: Path, eos: int) -> tuple[Path, int]:
    """``out/NAME.idx`` and ``NAME.bin`` of a memmap; the ``.bin`` is a hard link to it where that is possible.

    A document ends with ``eos``; what follows the last one is a document too.

    :returns: Megatron's prefix, and the tokens.
    """
    tokens = np.memmap(memmap, dtype=DOLMA.dtype, mode="r")
    step = REQUEST // WIDTH
    ends = [np.flatnonzero(tokens[i : i + step] == eos) + i + 1 for i in range(0, len(tokens), step)]
    stops = np.unique(np.concatenate([*ends, [len(tokens)]])).astype("<i8")
    starts = np.concatenate([[0], stops[:-1]]).astype("<i8")
    prefix = out / memmap.stem
    code = next(code for code, name in INDEX_DTYPES.items() if name == DOLMA.dtype)
    with prefix.with_suffix(".idx").open("wb") as file:
        file.write(INDEX_HEADER + struct.pack("<QBQQ", 1, code, len(stops), len(stops) + 1))
        file.write((stops - starts).astype("<i4").tobytes() + (starts * tokens.itemsize).tobytes())
        file.write(np.arange(len(stops) + 1, dtype="<i8").tobytes())
    target = prefix.with_suffix(".bin")
    target.unlink(missing_ok=True)
    try:
        os.link(memmap, target)
    except OSError:  # another file system
        shutil.copyfile(memmap, target)
    return prefix, len(tokens)


def _path(text: str) -> Path:
    if not text.strip():  # Path("") would be the present folder
        raise argparse.ArgumentTypeError("the path is empty: is the variable on the command line set?")
    return Path(text)


def main(argv: Sequence[str] | None = None) -> int:
    """:returns: 1 when a checked file has a problem or the tokens do not reach the budget."""
    parser = argparse.ArgumentParser(prog="olmo-lns data", description="Make and check tokenised training data.")
    commands = parser.add_subparsers(required=True, dest="command")
    command = commands.add_parser(
        "check", help="dtype, size, vocabulary range and number of tokens; exit code 1 when something is wrong"
    )
    command.add_argument("paths", nargs="+", type=_path, help="folders (searched recursively) or files")
    command.add_argument("--dtype", choices=DTYPES, default=DOLMA.dtype, help="of the .npy files, as data.memmap_dtype")
    command.add_argument(
        "--vocab-size", type=at_least(1), default=DOLMA.vocabulary, help="default %(default)s, the shipped configs'"
    )
    eos = "end-of-document token (default %(default)s)"
    command.add_argument("--eos", type=int, default=DOLMA.eos, help=f"{eos}; -1: none")
    need = "; 0: do not compare"
    command.add_argument(
        "--budget", type=float, help=f"tokens to train on, without padding (default 20e9, with --rows 0){need}"
    )
    command.add_argument("--rows", type=at_least(0), default=0, help=f"sequences a run reads: steps × batch{need}")
    command.add_argument("--sequence", type=at_least(1), default=4096, help="sequence length (default 4096)")
    command = commands.add_parser("fetch", help="fetch a list of tokenised files, as much of each as is needed")
    command.add_argument("list", help="a file, or one of the pack by its name: dolma")
    command.add_argument("--tokens", type=above_zero, default=20e9, help="of training text (default 20e9)")
    command.add_argument("--heldout", type=above_zero, default=2e6, help="of held-out text (default 2e6)")
    command.add_argument("--stream", action="store_true", help="held-out text only: OLMo reads the other itself")
    command.add_argument("-o", "--out", type=Path, required=True, help="folder")
    prepare.arguments(
        commands.add_parser(
            "prepare",
            help="tokenise C4, text or JSON lines",
            description="Tokenise text into OLMo's memmaps. The same command goes on where it was stopped.",
            epilog="the papers' C4: olmo-lns data prepare c4 train --tokenizer t5-base --layout rows --sequence 256 "
            "--eos '</s>' --pad '<pad>' --out c4",
        )
    )
    command = commands.add_parser("megatron", help="turn OLMo's memmaps (uint16) into Megatron's .bin and .idx")
    command.add_argument("paths", nargs="+", type=Path, help="folders or .npy files")
    command.add_argument("--eos", type=int, default=DOLMA.eos, help=eos)
    command.add_argument("-o", "--out", type=Path, required=True, help="folder")
    args = parser.parse_args(argv)
    return {"check": _check, "fetch": _fetch, "prepare": prepare.run, "megatron": _megatron}[args.command](args)


def _fetch(args: argparse.Namespace) -> int:
    files = read_list(located(args.list, "data"))
    args.out.mkdir(parents=True, exist_ok=True)
    heldout = {name: url for name, url in files.items() if name.startswith(HELDOUT)}
    training = {name: url for name, url in files.items() if name not in heldout}
    fetch(heldout, args.out, args.heldout)
    if args.stream:
        print(f"--data.paths=[{','.join(training.values())}]")
    else:
        fetch(training, args.out, args.tokens)
    print(f"export OLMO_DATA_DIR={args.out.resolve()}")
    return 0


def _megatron(args: argparse.Namespace) -> int:
    args.out.mkdir(parents=True, exist_ok=True)
    words = []
    for path in (path for path in find(args.paths) if path.suffix == ".npy" and not held_out(path)):
        if problems := check_file(path, dtype=DOLMA.dtype, vocab_size=1 << 16, eos=args.eos).problems:
            raise LNSConfigError(f"{path}: {problems[0]}")
        prefix, count = to_megatron(path, args.out, args.eos)
        words += [str(count), str(prefix.resolve())]
    print(f'export MEGATRON_DATA="{" ".join(words)}"')
    return 0


def _check(args: argparse.Namespace) -> int:
    eos = args.eos if args.eos >= 0 else None
    found = find(args.paths)
    results = [check_file(path, dtype=args.dtype, vocab_size=args.vocab_size, eos=eos) for path in found]
    budget = args.budget if args.budget is not None else 0 if args.rows else 20e9
    return _report(results, budget, args.rows, args.sequence)


def _report(results: Sequence[Data], budget: float, rows: int, sequence: int) -> int:
    for result in results:
        labels = "" if result.labels is None else f", {result.labels:,} with a label"
        ids = f"ids {result.lowest}…{result.highest}, {result.documents:,} documents{labels}"
        print(f"{result.path}: {result.dtype}, {result.tokens:,} tokens, {ids}")
        for problem in result.problems:
            print(f"{result.path}: PROBLEM: {problem}")
    # OLMo drops the rest of a file that does not fill a sequence; padding has no label; nobody trains on held-out text.
    trained = [r for r in results if not r.problems and not held_out(r.path)]
    sequences = sum(r.tokens // sequence for r in trained)
    usable = sum(r.tokens // sequence * sequence if r.labels is None else r.labels for r in trained)
    kinds = {result.dtype for result in results}
    bad = sum(bool(result.problems) for result in results)
    if len(kinds) > 1:
        print(f"PROBLEM: more than one dtype: {', '.join(sorted(kinds))}; a config names one")
        bad += 1
    trained_on = f"{usable:,} tokens to train on in {sequences:,} sequences of {sequence}"
    print(f"{len(results)} files, {trained_on}, {bad} problems")
    for wanted, found, what in ((budget, usable, "tokens"), (rows, sequences, "sequences")):
        if wanted:
            short = f"short: the run would read the data {wanted / max(1, found):.3g} times"
            word = "enough" if found >= wanted else short
            print(f"wanted {wanted:,.0f} {what}: {word if found else 'there are none'}")
            bad += found < wanted
    return int(bad > 0)
