"""Fetch a list of tokenised files: each line has a file's name and its address.

Only the start of each file is fetched; the servers must support byte ranges. Runs do not train on files under
``heldout/``.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import NamedTuple

import requests
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

from olmo_lns.errors import LNSConfigError, one_line
from olmo_lns.study.files import make_folder, only_one

REQUEST = 1 << 26  # bytes
WIDTH = 2  # bytes of a token: uint16
SEQUENCE = 4096  # a file's share is a multiple
HELDOUT = "heldout/"
RETRY = Retry(4, backoff_factor=1, status_forcelist=(500, 502, 503, 504))


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

    size: int
    tag: str


def fetch(files: dict[str, str], out: Path, tokens: float) -> None:
    """Write the first tokens of each file to ``out``, in equal shares; continue partial files.

    :param tokens: number of tokens of all files together.
    :raises LNSConfigError: an address that cannot be read, an existing file of another length, or another fetch into
        this folder.
    """
    share = -(-int(tokens) // max(1, len(files)) // SEQUENCE) * SEQUENCE * WIDTH
    make_folder(out)
    busy = f"{out}: another fetch writes into this folder: wait until it ends"
    with only_one(out / ".fetch.lock", busy), requests.Session() as session:
        for scheme in ("http://", "https://"):
            session.mount(scheme, HTTPAdapter(max_retries=RETRY))
        for name, url in files.items():
            _fetch_one(session, out / name, url, share)


def _fetch_one(session: requests.Session, path: Path, url: str, share: int) -> None:
    _, remote = _read(session, url, 0, 1)
    wanted = min(share, remote.size)
    if path.is_file():
        if (size := path.stat().st_size) != wanted:
            raise LNSConfigError(f"{path}: {size:,} bytes, expected {wanted:,} of {url}: remove the file")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    # Named after the server's tag, so that a part of another file is never continued.
    part = path.with_name(f"{path.name}.{hashlib.sha256(repr((url, remote)).encode()).hexdigest()[:8]}.part")
    with part.open("ab") as file:
        while (done := file.tell()) < wanted:
            data, now = _read(session, url, done, min(wanted, done + REQUEST))
            if now != remote:
                raise LNSConfigError(f"{url}: the file changed on the server while it was fetched: fetch it again")
            file.write(data)
            print(f"\r{path}: {file.tell() / wanted:.0%} of {wanted / WIDTH:,.0f} tokens", end="", flush=True)
        file.truncate(wanted)
    os.replace(part, path)


def _read(session: requests.Session, url: str, start: int, stop: int) -> tuple[bytes, _Remote]:
    """Return the bytes ``start`` to ``stop``, and the file on the server."""
    headers = {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
    try:
        answer = session.get(url, headers=headers, timeout=60)
        answer.raise_for_status()
    except requests.RequestException as error:
        raise LNSConfigError(f"{url}: {one_line(error)}; repeat the command to continue") from None
    found = re.fullmatch(rf"bytes {start}-{stop - 1}/(\d+)", answer.headers.get("Content-Range", ""))
    if found is None or len(answer.content) != stop - start:
        raise LNSConfigError(f"{url}: expected the bytes {start} to {stop}: the server does not support byte ranges")
    return answer.content, _Remote(int(found[1]), answer.headers.get("ETag", ""))
