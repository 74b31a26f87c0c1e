"""Write files atomically, text as UTF-8."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(path: Path, content: str | bytes) -> Path:
    """Write a file under a temporary name and rename it. A killed process or a full disk leaves no partial file.

    Text is written as UTF-8. File names in it that the locale cannot decode keep their bytes. If ``path`` is a symbolic
    link, the file to which it leads is replaced.

    :raises OSError: if the folder is not writable.
    """
    target = path.resolve()
    temporary = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    return path
