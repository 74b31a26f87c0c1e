"""Write files atomically, text as UTF-8."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> Path:
    """Write ``path`` by rename, text as UTF-8: a killed process or a full disk never leaves a partial file.

    A symbolic link is followed. In text, file names that the locale cannot decode keep their bytes.

    :raises OSError: the folder is not writable.
    """
    target = path.resolve()
    temporary = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    return path
