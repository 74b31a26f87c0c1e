"""A folder that appears complete or not at all, with checksums.

Everything is written into a hidden sibling of the target and renamed at the end. A process that
is killed leaves only that sibling: no loader looks there, and the next export to the same target
removes it (its owner's lock is gone with the process). A sibling is ours when it holds a file that
names its target; anything else of that name is left alone.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import os
import re
import secrets
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator

from olmo_lns.errors import LNSConfigError, LNSError, one_line

#: Written last into every export, in the format of ``sha256sum -c``.
CHECKSUMS = "SHA256SUMS"
#: In the hidden folder from its first moment until it has its name: whose leftover it is.
_MARKER = ".olmo-lns-export"


class ExportError(LNSError, OSError):
    """The output could not be written (disk full, file too large, no permission)."""


@contextmanager
def atomic_folder(target: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield an empty folder that becomes ``target`` when the body ends without an exception.

    On an exception the folder is removed. On success every file is on disk (fsync) and listed in
    ``SHA256SUMS`` before the rename.

    :raises LNSConfigError: ``target`` exists, or its parent does not.
    :raises ExportError: writing failed; nothing is left behind.
    """
    target = Path(os.path.abspath(target))
    if os.path.lexists(target):
        raise LNSConfigError(f"{target} exists: exports never overwrite; remove it or choose another folder")
    if not target.parent.is_dir():
        raise LNSConfigError(f"{target.parent} is not a folder: create it first")
    _remove_abandoned(target)
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
    try:
        partial.mkdir()
        lock = os.open(partial, os.O_RDONLY)
    except OSError as error:
        raise ExportError(f"cannot write into {target.parent}: {one_line(error)}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        marker = partial / _MARKER
        marker.write_bytes(os.fsencode(target.name))
        yield partial
        _write_checksums(partial, marker)
        # Renaming onto a folder that somebody filled meanwhile fails, as it should.
        os.rename(partial, target)
        (target / _MARKER).unlink()
        _sync(target.parent)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError) and not isinstance(error, LNSError):
            raise ExportError(f"writing {target} failed ({one_line(error)}): nothing was left behind") from error
        raise
    finally:
        os.close(lock)


def copy_unread(source: Path, target: Path) -> None:
    """Copy a file or folder of a checkpoint whose content nobody looks at.

    :raises LNSConfigError: it is, or holds, a symbolic link or something else that is no file: what that
        leads to may be anything on this machine, and exports are given away.
    """
    for path in [source, *source.rglob("*")] if source.is_dir() and not source.is_symlink() else [source]:
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            kind = f"a symbolic link to {os.readlink(path)}" if path.is_symlink() else "not a plain file"
            raise LNSConfigError(
                f"{path} is {kind}: expected a plain file, because it is copied into the export as it is; put a copy "
                "in its place (cp -L) if it belongs there, or remove it"
            )
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copyfile(source, target)


def verify_checksums(folder: str | os.PathLike[str]) -> int:
    """Compare every file named in ``SHA256SUMS`` with its digest.

    :returns: the number of files checked; 0 when the folder has no list.
    :raises LNSConfigError: a file is missing or differs.
    """
    folder = Path(folder)
    listing = folder / CHECKSUMS
    if not listing.is_file():
        return 0
    try:
        lines = listing.read_text(encoding="utf-8").splitlines()
    except ValueError as error:
        raise LNSConfigError(f"{listing} is no text ({one_line(error)}): expected a digest and a file a line") from None
    for line in lines:
        digest, _, name = line.partition("  ")
        if not re.fullmatch("[0-9a-f]{64}", digest) or ".." in Path(name).parts or os.path.isabs(name) or not name:
            raise LNSConfigError(
                f"{listing}: {line[:80]!r} is not a SHA-256 digest, two spaces and a file of this folder"
            )
        if not (folder / name).is_file():
            raise LNSConfigError(f"{folder}: {name} is missing ({CHECKSUMS} lists it)")
        if _sha256(folder / name) != digest:
            raise LNSConfigError(f"{folder}: {name} differs from its checksum: the file is damaged or was changed")
    return len(lines)


def _remove_abandoned(target: Path) -> None:
    """Remove what killed exports to the same target left, not to ``target.something``; one being written is locked."""
    for leftover in target.parent.glob(f".{glob.escape(target.name)}.*.partial"):
        marker = leftover / _MARKER
        if leftover.is_symlink() or not marker.is_file() or marker.read_bytes() != os.fsencode(target.name):
            continue
        descriptor = os.open(leftover, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(leftover)
        except BlockingIOError:
            raise LNSConfigError(f"another export to {target} is running (it writes {leftover.name})") from None
        finally:
            os.close(descriptor)


def _write_checksums(folder: Path, marker: Path) -> None:
    lines = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path != marker):
        lines.append(f"{_sha256(path)}  {path.relative_to(folder).as_posix()}\n")
        _sync(path)
    (folder / CHECKSUMS).write_text("".join(lines), encoding="utf-8")
    for path in [folder / CHECKSUMS, folder, *(p for p in folder.rglob("*") if p.is_dir())]:
        _sync(path)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
