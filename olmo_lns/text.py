"""Output of the package: files as UTF-8, written by rename; messages in the terminal's encoding."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> Path:
    """Write ``path`` by rename, text as UTF-8: neither a kill nor a full disk leaves half of it.

    A symbolic link stays: its target is written. Names of files that the locale cannot decode keep their bytes.

    :raises OSError: the folder cannot be written.
    """
    target = path.resolve()
    temporary = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def degrade() -> None:
    """Make standard output and error print a question mark for a character that the locale lacks."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
