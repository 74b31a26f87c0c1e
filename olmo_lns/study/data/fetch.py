"""``olmo-lns data fetch``: a public tokenised corpus by a list of addresses; ``data megatron``: memmaps as Megatron's.

A list has a line for each file, its name and its address; files under ``heldout/`` are text that no run trains on.
The servers must answer byte ranges: of each file only the beginning is fetched.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import struct
import time
from http.client import HTTPException
from pathlib import Path
from typing import Sequence
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from olmo_lns.arguments import above_zero
from olmo_lns.errors import LNSConfigError, one_line
from olmo_lns.study.data.check import INDEX_DTYPES, INDEX_HEADER, check_file, find
from olmo_lns.study.data.corpora import DOLMA

__all__ = ["fetch", "main", "read_list", "to_megatron"]

REQUEST = 1 << 26  # bytes
WIDTH = 2  # bytes of a token: uint16
SEQUENCE = 4096  # a file's share is a multiple of it
HELDOUT = "heldout/"


def read_list(path: Path) -> dict[str, str]:
    """Name -> address.

    :raises LNSConfigError: no such file, or a line that is not ``NAME.npy ADDRESS``.
    """
    if not path.is_file():
        raise LNSConfigError(f"{path}: no such list of files (see configs/data)")
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
    for name, url in files.items():
        _copy(url, out / name, -(-int(tokens) // len(files) // SEQUENCE) * SEQUENCE * WIDTH)


def _copy(url: str, path: Path, share: int) -> None:
    _, total = _read(url, 0, 1)
    wanted = min(share, total)
    if path.is_file() and path.stat().st_size != wanted:
        raise LNSConfigError(f"{path}: {path.stat().st_size:,} bytes, but of {url} {wanted:,} are wanted: remove one")
    if path.is_file():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    with part.open("ab") as file:
        while (done := file.tell()) < wanted:
            file.write(_read(url, done, min(wanted, done + REQUEST))[0])
            print(f"\r{path}: {file.tell() / wanted:.0%} of {wanted / WIDTH:,.0f} tokens", end="", flush=True)
        file.truncate(wanted)
    os.replace(part, path)
    print(f"{' (the whole file)' if wanted == total else ''}")


def _read(url: str, start: int, stop: int, attempts: int = 5) -> tuple[bytes, int]:
    """Bytes ``start`` to ``stop``, and the length of the whole file."""
    request = Request(url, headers={"Range": f"bytes={start}-{stop - 1}", "User-Agent": "olmo-lns"})
    for attempt in range(1, attempts + 1):
        try:
            with urlopen(request, timeout=60) as answer:
                if answer.status != 206:
                    raise LNSConfigError(f"{url}: the server answers no byte ranges (HTTP {answer.status})")
                data, total = answer.read(), int(answer.headers["Content-Range"].rpartition("/")[2])
            if len(data) == stop - start:
                return data, total
            problem = f"{len(data):,} of {stop - start:,} bytes came"
        except HTTPError as error:
            if error.code < 500:
                raise LNSConfigError(f"{url}: HTTP {error.code} ({error.reason})") from None
            problem = f"HTTP {error.code}"
        except (OSError, HTTPException) as error:
            problem = one_line(error)
        if attempt < attempts:
            time.sleep(2**attempt)
    raise LNSConfigError(f"{url}: {problem}; called again, this goes on where it stopped")


def to_megatron(memmap: Path, out: Path, eos: int) -> tuple[Path, int]:
    """``out/NAME.idx`` and ``NAME.bin`` of a memmap; the ``.bin`` is a hard link to it where that is possible.

    A document ends with ``eos``; what follows the last one is a document too.

    :returns: Megatron's prefix, and the tokens.
    """
    import numpy as np

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


def main(argv: Sequence[str]) -> int:
    """``olmo-lns data fetch`` and ``olmo-lns data megatron``."""
    parser = argparse.ArgumentParser(prog="olmo-lns data", description="A public corpus, and memmaps for Megatron.")
    commands = parser.add_subparsers(required=True, dest="command")
    fetching = commands.add_parser("fetch", help="fetch a list of tokenised files, as much of each as is needed")
    fetching.add_argument("list", type=Path, help="such as configs/data/dolma.txt")
    fetching.add_argument("--tokens", type=above_zero, default=20e9, help="of training text (default 20e9)")
    fetching.add_argument("--heldout", type=above_zero, default=2e6, help="of held-out text (default 2e6)")
    fetching.add_argument("--stream", action="store_true", help="held-out text only: OLMo reads the other itself")
    turning = commands.add_parser("megatron", help="turn OLMo's memmaps (uint16) into Megatron's .bin and .idx")
    turning.add_argument("paths", nargs="+", type=Path, help="folders or .npy files")
    turning.add_argument("--eos", type=int, default=DOLMA.eos, help="end-of-document token (default %(default)s)")
    for command in (fetching, turning):
        command.add_argument("-o", "--out", type=Path, required=True, help="folder")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.command == "fetch":
        files = read_list(args.list)
        heldout = {name: url for name, url in files.items() if name.startswith(HELDOUT)}
        training = {name: url for name, url in files.items() if name not in heldout}
        fetch(heldout, args.out, args.heldout)
        if args.stream:
            print(f"--data.paths=[{','.join(training.values())}]")
        else:
            fetch(training, args.out, args.tokens)
        print(f"export OLMO_DATA_DIR={args.out.resolve()}")
        return 0
    words = []
    for path in (path for path in find(args.paths) if path.suffix == ".npy" and path.parent.name != HELDOUT.strip("/")):
        if problems := check_file(path, dtype=DOLMA.dtype, vocab_size=1 << 16, eos=args.eos).problems:
            raise LNSConfigError(f"{path}: {problems[0]}")
        prefix, count = to_megatron(path, args.out, args.eos)
        words += [str(count), str(prefix.resolve())]
    print(f'export MEGATRON_DATA="{" ".join(words)}"')
    return 0
