"""Fetch the start of each tokenized file in a list. A line of the list has the name and the address of a file.

The servers must support byte ranges. Runs do not train on files under ``heldout/``.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

import requests
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

from olmo_lns.errors import LNSConfigError, one_line
from olmo_lns.study.locking import exclusive_lock

CHUNK = 1 << 20  # bytes
TOKEN_SIZE = 2  # bytes: uint16
SEQUENCE = 4096  # the tokens fetched from a file are a multiple
HELDOUT = "heldout/"


def read_list(path: Path) -> dict[str, str]:
    """Return the address of each file in a list, by name.

    :raises LNSConfigError: if a line is not ``NAME.npy ADDRESS``, or a name is repeated.
    """
    addresses: dict[str, str] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if fields := line.partition("#")[0].split():
            name = fields[0]
            if len(fields) != 2 or not re.fullmatch(rf"(?:{HELDOUT})?[\w.-]+\.npy", name) or name in addresses:
                raise LNSConfigError(
                    f"{path}, line {number}: {line!r} cannot be read. Expected a new name and an address. Write "
                    "NAME.npy https://… or heldout/NAME.npy https://…"
                )
            addresses[name] = fields[1]
    return addresses


def fetch(files: dict[str, str], out: Path, tokens: float) -> None:
    """Write the first tokens of each file to ``out``, equally many from each file. Partial files are continued.

    :param files: addresses by name.
    :param tokens: number of tokens in all files together.
    :raises LNSConfigError: if an address cannot be read, if a file exists with another length, or if another fetch
        writes into the same folder.
    """
    share = -(-int(tokens) // max(1, len(files)) // SEQUENCE) * SEQUENCE * TOKEN_SIZE
    out.mkdir(parents=True, exist_ok=True)
    problem = f"Another fetch writes into {out}. Wait until it ends, or pass another --out."
    retries = Retry(5, backoff_factor=1, status_forcelist=(429, 500, 502, 503, 504))
    with exclusive_lock(out / ".fetch.lock", problem), requests.Session() as session:
        session.headers["Accept-Encoding"] = "identity"
        for scheme in ("http://", "https://"):
            session.mount(scheme, HTTPAdapter(max_retries=retries))
        for name, url in files.items():
            try:
                _fetch_file(session, out / name, url, share)
            except requests.RequestException as error:
                raise LNSConfigError(
                    f"{url} could not be read: {one_line(error)}. Repeat the command to continue."
                ) from None


def _total_size(response: requests.Response, start: int) -> int:
    """Return the size of the whole file.

    :raises LNSConfigError: if the response does not start at byte ``start``.
    """
    match = re.fullmatch(rf"bytes {start}-\d+/(\d+)", response.headers.get("Content-Range", ""))
    if match is None:
        raise LNSConfigError(
            f"The server of {response.url} does not support byte ranges, which `data fetch` needs to read a part of a "
            "file. Use the address of another server."
        )
    return int(match[1])


def _fetch_file(session: requests.Session, path: Path, url: str, limit: int) -> None:
    """Write the first ``limit`` bytes of a file, or the whole file if it is shorter."""
    first_byte = session.get(url, headers={"Range": "bytes=0-0"}, timeout=60, stream=True)  # some servers refuse HEAD
    first_byte.raise_for_status()
    tag, total = first_byte.headers.get("ETag", ""), _total_size(first_byte, 0)
    first_byte.close()
    size = min(limit, total)
    if path.is_file():
        if (actual := path.stat().st_size) != size:
            raise LNSConfigError(
                f"{path} has {actual:,} bytes, but {size:,} bytes of {url} were expected. Remove the file to fetch it "
                "again, or pass the --tokens of the first fetch."
            )
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    # The name depends on the server's tag, so that the part of another file is never continued.
    part = path.with_name(f"{path.name}.{hashlib.sha256(f'{url} {tag} {total}'.encode()).hexdigest()[:8]}.part")
    with part.open("ab") as file:
        if (start := file.tell()) < size:
            headers = {"Range": f"bytes={start}-{size - 1}"}
            with session.get(url, headers=headers, timeout=60, stream=True) as response:
                response.raise_for_status()
                if response.headers.get("ETag", "") != tag or _total_size(response, start) != total:
                    raise LNSConfigError(f"{url} changed on the server. Repeat the command to fetch the new file.")
                for content in response.iter_content(CHUNK):
                    file.write(content)
                    progress = f"{file.tell() / size:.0%} of {size / TOKEN_SIZE:,.0f} tokens"
                    print(f"\r{path}: {progress}", end="", flush=True)
        if file.tell() != size:
            raise LNSConfigError(
                f"The server sent {file.tell():,} of {size:,} bytes of {path}. Repeat the command to continue."
            )
    os.replace(part, path)
