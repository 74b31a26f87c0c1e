"""Fetch a list of tokenised files: each line has a file's name and its address.

Only the start of each file is fetched; the servers must support byte ranges. Runs do not train on files under
``heldout/``.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

import requests

from olmo_lns.errors import LNSConfigError, one_line
from olmo_lns.study.files import exclusive_lock

CHUNK = 1 << 20  # bytes
WIDTH = 2  # bytes of a token: uint16
SEQUENCE = 4096  # a file's share is a multiple
HELDOUT = "heldout/"


def read_list(path: Path) -> dict[str, str]:
    """Read a list: name -> address.

    :raises LNSConfigError: a line that is not ``NAME.npy ADDRESS``.
    """
    found: dict[str, str] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if words := line.partition("#")[0].split():
            if len(words) != 2 or not re.fullmatch(rf"(?:{HELDOUT})?[\w.-]+\.npy", words[0]) or words[0] in found:
                raise LNSConfigError(
                    f"{path}, line {number}: {line!r}: expected a new name and an address: "
                    "NAME.npy https://…, or heldout/NAME.npy https://…"
                )
            found[words[0]] = words[1]
    return found


def fetch(files: dict[str, str], out: Path, tokens: float) -> None:
    """Write the first tokens of each file to ``out``, in equal shares; continue partial files.

    :param tokens: number of tokens of all files together.
    :raises LNSConfigError: an address that cannot be read, an existing file of another length, or another fetch into
        this folder.
    """
    share = -(-int(tokens) // max(1, len(files)) // SEQUENCE) * SEQUENCE * WIDTH
    out.mkdir(parents=True, exist_ok=True)
    busy = f"{out}: another fetch writes into this folder: wait until it ends"
    with exclusive_lock(out / ".fetch.lock", busy), requests.Session() as session:
        session.headers["Accept-Encoding"] = "identity"
        for name, url in files.items():
            try:
                _fetch_one(session, out / name, url, share)
            except requests.RequestException as error:
                raise LNSConfigError(f"{url}: {one_line(error)}; repeat the command to continue") from None


def _fetch_one(session: requests.Session, path: Path, url: str, share: int) -> None:
    head = session.head(url, allow_redirects=True, timeout=60)
    head.raise_for_status()
    tag, size = head.headers.get("ETag", ""), int(head.headers["Content-Length"])
    wanted = min(share, size)
    if path.is_file():
        if (found := path.stat().st_size) != wanted:
            raise LNSConfigError(f"{path}: {found:,} bytes, expected {wanted:,} of {url}: remove the file")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    # Named after the server's tag, so that a part of another file is never continued.
    part = path.with_name(f"{path.name}.{hashlib.sha256(f'{url} {tag} {size}'.encode()).hexdigest()[:8]}.part")
    with part.open("ab") as file:
        if (done := file.tell()) < wanted:
            asked = {"Range": f"bytes={done}-{wanted - 1}"}
            with session.get(url, headers=asked, timeout=60, stream=True) as answer:
                answer.raise_for_status()
                if answer.headers.get("ETag", "") != tag:
                    raise LNSConfigError(f"{url}: the file changed on the server: fetch it again")
                if not answer.headers.get("Content-Range", "").startswith(f"bytes {done}-{wanted - 1}/"):
                    raise LNSConfigError(f"{url}: the server does not support byte ranges")
                for content in answer.iter_content(CHUNK):
                    file.write(content)
                    print(f"\r{path}: {file.tell() / wanted:.0%} of {wanted / WIDTH:,.0f} tokens", end="", flush=True)
        if file.tell() != wanted:
            raise LNSConfigError(f"{path}: {file.tell():,} of {wanted:,} bytes came: repeat the command to continue")
    os.replace(part, path)
