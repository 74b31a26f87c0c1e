"""A large file: written past the page cache where the system allows it, hashed meanwhile.

Through the cache every byte costs the kernel a copy and often a new page, which for gigabytes takes longer than the
disk does, and puts out what others had cached. Nobody reads an export back at once.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import mmap
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

__all__ = ["Output", "digest_as_written", "sha256", "state_of"]

#: Bytes of a block, and blocks in flight. Past the cache a write is whole sectors, at an address that is one too.
_BLOCK, _BLOCKS = 1 << 23, 4
#: State of a file when it was closed -> its digest.
_DIGESTS: dict[tuple[int, ...], str] = {}


class Output(io.RawIOBase):
    """A new file, from its first byte to its last; what is written is copied before ``write`` returns.

    One thread writes and one hashes, so an error of the disk may come with a later ``write``, or with ``close``.

    :raises OSError: the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        try:
            self._descriptor = _open(path)
        except OSError:
            super().close()  # there is nothing for close, which the collector calls, to write
            raise
        self._digest = hashlib.sha256()
        self._threads = ThreadPoolExecutor(1, "write"), ThreadPoolExecutor(1, "sha256")
        self._pending: deque[tuple[mmap.mmap, tuple[Future[Any], ...]]] = deque()
        self._block, self._filled, self._written = mmap.mmap(-1, _BLOCK), 0, 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._written

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _BLOCK):
            self._copy(view[start : start + _BLOCK])
        self._written += len(view)
        return len(view)

    def close(self) -> None:
        if self.closed:
            return
        try:
            self._send()
            while self._pending:
                self._wait()
            _DIGESTS[_state(os.fstat(self._descriptor))] = self._digest.hexdigest()
        finally:
            for thread in self._threads:
                thread.shutdown()
            os.close(self._descriptor)
            super().close()

    def _copy(self, data: memoryview) -> None:
        """Of at most one block."""
        for part in (data[: _BLOCK - self._filled], data[_BLOCK - self._filled :]):
            self._block[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            if self._filled == _BLOCK:
                self._send()

    def _send(self) -> None:
        block = memoryview(self._block)[: self._filled]
        writing, hashing = self._threads
        jobs = writing.submit(self._put, block), hashing.submit(self._digest.update, block)
        self._pending.append((self._block, jobs))
        self._filled = 0
        self._block = self._wait() if len(self._pending) == _BLOCKS else mmap.mmap(-1, _BLOCK)

    def _wait(self) -> mmap.mmap:
        """The oldest block, written and hashed."""
        block, jobs = self._pending.popleft()
        for job in jobs:
            job.result()
        return block

    def _put(self, block: memoryview) -> None:
        while block:
            try:
                block = block[os.write(self._descriptor, block) :]
            except OSError as error:
                flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
                if error.errno != errno.EINVAL or not flags & _DIRECT:
                    raise
                # The end of the file is no multiple of a sector: the rest goes through the cache.
                fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~_DIRECT)


def digest_as_written(path: Path) -> str | None:
    """SHA-256 of what this process wrote through :class:`Output`; None if it did not, or the file has changed since."""
    return _DIGESTS.get(state_of(path))


def state_of(path: Path) -> tuple[int, ...]:
    """What tells a file from a later state of it: where it is stored, its size and when it was written."""
    return _state(path.stat())


def sha256(path: Path) -> str:
    """SHA-256 of what the file holds, in hex."""
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
        return digest.hexdigest()


_DIRECT = getattr(os, "O_DIRECT", 0)  # macOS has none


def _open(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    try:
        return os.open(path, flags | _DIRECT, 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that has only the cache, such as older tmpfs
            raise
        return os.open(path, flags, 0o666)


def _state(stat: os.stat_result) -> tuple[int, ...]:
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns
