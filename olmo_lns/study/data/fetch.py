"""Fetch a list of tokenised files: each line has a file's name and its address.

Only the start of each file is fetched; the servers must support byte ranges. Runs do not train on files under
``heldout/``.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from olmo_lns.errors import LNSConfigError, one_line
from olmo_lns.study.files import make_folder, only_one

REQUEST = 1 << 26  # bytes
WIDTH = 2  # bytes of a token: uint16
SEQUENCE = 4096  # a file's share is a multiple
HELDOUT = "heldout/"


def read_list(path: Path) -> dict[str, str]:
    """Read a list: name -> address.

    :raises LNSConfigError: a line that is not ``NAME.npy ADDRESS``.
    """
    found: dict[str, str] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not (words := line.partition("#")[0].split()):
            continue
        named = re.fullmatch(rf"(?:{HELDOUT})?[\w.-]+\.npy", words[0])
        if len(words) != 2 or not named or words[0] in found or not words[1].startswith(("http://", "https://")):
            raise LNSConfigError(
                f"{path}, line {number}: {line!r}: expected a new name and an address: "
                "NAME.npy https://…, or heldout/NAME.npy https://…"
            )
        found[words[0]] = words[1]
    return found


class _Remote(NamedTuple):
    """A file on its server. :param tag: its ETag, ``""`` without one."""

    url: str
    size: int
    tag: str


def fetch(files: dict[str, str], out: Path, tokens: float) -> None:
    """Write the first tokens of each file to ``out``, in equal shares; continue partial files.

    :param tokens: number of tokens of all files together.
    :raises LNSConfigError: an address that cannot be read, an existing file of another length, another fetch into
        this folder, or content with another digest than the server's.
    """
    share = -(-int(tokens) // max(1, len(files)) // SEQUENCE) * SEQUENCE * WIDTH
    make_folder(out)
    with only_one(out / ".fetch.lock", f"{out}: another fetch writes into this folder: wait until it ends"):
        for name, url in files.items():
            _fetch_one(out / name, url, share)


def _fetch_one(path: Path, url: str, share: int) -> None:
    _, remote = _read(url, 0, 1)
    wanted = min(share, remote.size)
    if path.is_file():
        if (size := path.stat().st_size) != wanted:
            raise LNSConfigError(f"{path}: {size:,} bytes, expected {wanted:,} of {url}: remove the file")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    # Named after the server's tag, so that a part of another file is never continued.
    part = path.with_name(f"{path.name}.{hashlib.sha256(repr(remote).encode()).hexdigest()[:8]}.part")
    with part.open("ab") as file:
        while (done := file.tell()) < wanted:
            data, now = _read(url, done, min(wanted, done + REQUEST))
            if now != remote:
                raise LNSConfigError(f"{url}: the file changed on the server while it was fetched: fetch it again")
            file.write(data)
            print(f"\r{path}: {file.tell() / wanted:.0%} of {wanted / WIDTH:,.0f} tokens", end="", flush=True)
        file.truncate(wanted)
    if wanted == remote.size:
        print(" (the whole file)")
        _compare_digest(part, remote)
    os.replace(part, path)


def _compare_digest(path: Path, remote: _Remote) -> None:
    """Compare the digest if the ETag is an MD5 or SHA-256, as in object stores."""
    if algorithm := {32: "md5", 64: "sha256"}.get(len(remote.tag) * bool(re.fullmatch(r"[0-9a-f]+", remote.tag))):
        digest = hashlib.new(algorithm)
        with path.open("rb") as file:
            while part := file.read(REQUEST):
                digest.update(part)
        if (found := digest.hexdigest()) != remote.tag:
            path.unlink()
            raise LNSConfigError(f"{remote.url}: found {algorithm} {found}, expected {remote.tag}: fetch it again")


def _read(url: str, start: int, stop: int, attempts: int = 5) -> tuple[bytes, _Remote]:
    """Return the bytes ``start`` to ``stop``, and the file on the server."""
    request = Request(url, headers={"Range": f"bytes={start}-{stop - 1}", "User-Agent": "olmo-lns"})
    problem = ""
    for attempt in range(attempts):
        time.sleep(2**attempt if attempt else 0)
        try:
            with urlopen(request, timeout=60) as answer:
                if answer.status != 206:
                    raise LNSConfigError(f"{url}: the server does not support byte ranges (HTTP {answer.status})")
                data, (sent, _, total) = answer.read(), answer.headers["Content-Range"].rpartition("/")
                remote = _Remote(url, int(total), answer.headers.get("ETag", "").strip('"'))
            if len(data) == stop - start and sent.split()[-1].startswith(f"{start}-"):
                return data, remote
            problem = f"{sent} came, {len(data):,} of {stop - start:,} bytes"
        except LNSConfigError:
            raise
        except (OSError, HTTPException, ValueError, AttributeError) as error:
            problem = one_line(error)
            if isinstance(error, HTTPError) and error.code < 500:
                raise LNSConfigError(f"{url}: {problem}") from None
    raise LNSConfigError(f"{url}: {problem}; repeat the command to continue")
