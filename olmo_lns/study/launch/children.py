"""A launcher's processes: ended together with it, one launcher at a time in a folder."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import threading
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Iterator

from olmo_lns.errors import LNSError

__all__ = ["Children", "only_one"]


class Children:
    """The running processes; SIGINT, SIGTERM and the end of the block end them all."""

    def __init__(self, lock_file: int) -> None:
        self.lock_file = lock_file  # inherited: a run that outlives a killed launcher keeps the study locked
        self.running: list[subprocess.Popen[bytes]] = []
        self.stopping = False
        self.lock = threading.Lock()

    def __enter__(self) -> Children:
        def stop(*_: Any) -> None:
            self.stop()
            raise KeyboardInterrupt

        self.previous = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def start(self, words: list[str], file: Any) -> subprocess.Popen[bytes] | None:
        with self.lock:
            if self.stopping:
                return None
            process = subprocess.Popen(
                words, stdout=file, stderr=subprocess.STDOUT, start_new_session=True, pass_fds=(self.lock_file,)
            )
            self.running.append(process)
            return process

    def stop(self) -> None:
        with self.lock:
            self.stopping = True
            for process in self.running:
                if process.returncode is None:
                    with suppress(ProcessLookupError):  # it ended by itself meanwhile
                        os.killpg(process.pid, signal.SIGTERM)


@contextmanager
def only_one(out: Path) -> Iterator[int]:
    """The descriptor of the folder's lock.

    :raises LNSError: another launch holds it.
    """
    with (out / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LNSError(f"{out}: another launch of this study is running (it holds {out}/.lock)") from None
        yield file.fileno()
