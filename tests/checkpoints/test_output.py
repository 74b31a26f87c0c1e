"""Large files: the bytes that were written, wherever they go, their digest, and what goes wrong."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import random
from pathlib import Path
from typing import Iterator

import pytest

from olmo_lns.checkpoints import output
from olmo_lns.checkpoints.output import Output, digest_as_written, sha256

BLOCK = 8192


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "_BLOCK", BLOCK)


@pytest.fixture(params=["disk", "memory", "no O_DIRECT"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Of this machine's temporary files; one in memory, which older kernels write only through the cache; macOS's."""
    if request.param == "no O_DIRECT":
        monkeypatch.setattr(output, "_DIRECT", 0)
    if request.param != "memory":
        yield tmp_path
        return
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        pytest.skip("this machine has no /dev/shm")
    place = shared / f"olmo-lns-{os.getpid()}"
    place.mkdir()
    yield place
    for path in place.iterdir():
        path.unlink()
    place.rmdir()


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 9 * BLOCK, 11 * BLOCK + 17])
def test_bytes_and_digest(folder: Path, size: int) -> None:
    """In pieces of any length, each of which may be changed as soon as ``write`` has returned."""
    rng = random.Random(size)
    content = rng.randbytes(size)
    with Output(folder / "a") as file:
        start = 0
        while start < size:
            piece = bytearray(content[start : start + rng.choice([1, 100, BLOCK, 3 * BLOCK + 5])])
            assert file.write(piece) == len(piece)
            start += len(piece)
            piece[:] = bytes(len(piece))
            assert file.tell() == start
    assert (folder / "a").read_bytes() == content
    assert digest_as_written(folder / "a") == sha256(folder / "a") == hashlib.sha256(content).hexdigest()


def test_whole_blocks_go_past_the_cache(tmp_path: Path) -> None:
    """Where the file system has that: until the last, shorter piece."""
    try:
        os.close(os.open(tmp_path / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except (AttributeError, OSError) as error:
        pytest.skip(f"no O_DIRECT here: {error}")
    with Output(tmp_path / "a") as file:
        file.write(bytes(20 * BLOCK))  # more than can be in flight, so that some have been written
        assert fcntl.fcntl(file._descriptor, fcntl.F_GETFL) & os.O_DIRECT
        file.write(b"end")
    assert (tmp_path / "a").stat().st_size == 20 * BLOCK + 3


def test_an_existing_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(3 * BLOCK))
    with Output(tmp_path / "a") as file:
        file.write(b"new")
    assert (tmp_path / "a").read_bytes() == b"new"


def test_a_changed_file_has_no_digest(tmp_path: Path) -> None:
    with Output(tmp_path / "a") as file:
        file.write(b"abc")
    (tmp_path / "a").write_bytes(b"abcd")
    assert digest_as_written(tmp_path / "a") is None
    assert sha256(tmp_path / "a") == hashlib.sha256(b"abcd").hexdigest()


@pytest.mark.parametrize("size", [1, 2 * BLOCK, 40 * BLOCK])
def test_a_full_device(size: int) -> None:
    """The real thing; the threads are gone afterwards, and the file is closed."""
    if not Path("/dev/full").exists():
        pytest.skip("this machine has no /dev/full")
    file = Output(Path("/dev/full"))
    with pytest.raises(OSError) as caught, file:
        file.write(bytes(size))
    assert caught.value.errno == errno.ENOSPC
    assert file.closed and digest_as_written(Path("/dev/full")) is None
    with pytest.raises(OSError):
        os.fstat(file._descriptor)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Output(tmp_path / "absent" / "a")
