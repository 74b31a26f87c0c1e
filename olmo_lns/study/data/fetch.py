"""A public tokenised corpus by a list of addresses, and OLMo's memmaps as Megatron's files.

A list has a line for each file, its name and its address; files under ``heldout/`` are text that no run trains on.
The servers must answer byte ranges: of each file only the beginning is fetched.
"""

from __future__ import annotations

import os
import re
import shutil
import struct
import time
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from olmo_lns.errors import LNSConfigError, one_line
from olmo_lns.study.data.check import INDEX_DTYPES, INDEX_HEADER
from olmo_lns.study.data.corpora import DOLMA

__all__ = ["HELDOUT", "fetch", "read_list", "to_megatron"]

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
