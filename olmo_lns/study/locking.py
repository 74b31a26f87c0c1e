"""Lock a file, so that no second command uses the same folder. This needs a POSIX system, as studies do."""

from __future__ import annotations

import fcntl
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator

from olmo_lns.errors import LNSError


@contextmanager
def exclusive_lock(lock: Path, problem: str) -> Iterator[int]:
    """Lock a file. The lock ends when the ``with`` block and all processes that inherited the descriptor have ended.

    :param lock: path of the file, which is created if it does not exist.
    :param problem: the error message, to which the path is added.
    :returns: file descriptor of the lock, for child processes.
    :raises LNSError: if another process has locked the file.
    """
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LNSError(f"{problem} (The lock file is {lock}.)") from None
        yield file.fileno()
