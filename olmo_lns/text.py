"""Files of the package: UTF-8, written by rename."""

from __future__ import annotations

import os
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
