"""Files of ``torch.save``: read and written one tensor at a time.

``torch.save`` wants the whole object in memory. What it writes is an uncompressed zip of a pickle
and one record per tensor, so an object whose tensors are :class:`LazyTensor` can be streamed.
"""

from __future__ import annotations

import errno
import io
import pickle
import struct
import zipfile
import zlib
from collections import OrderedDict
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from threading import Lock
from typing import Any, Callable, Iterator

import torch

from olmo_lns.checkpoints.output import Output, state_of
from olmo_lns.checkpoints.tensors import LazyTensor, for_each
from olmo_lns.errors import LNSConfigError, one_line

__all__ = [
    "check_archive",
    "check_record",
    "damaged",
    "map_tensors",
    "opened",
    "read_archive",
    "tensor_bytes",
    "unreadable",
    "write_archive",
]

_STORAGES = {
    torch.float32: "FloatStorage",
    torch.float64: "DoubleStorage",
    torch.float16: "HalfStorage",
    torch.bfloat16: "BFloat16Storage",
    torch.int64: "LongStorage",
    torch.int32: "IntStorage",
    torch.uint8: "ByteStorage",
    torch.bool: "BoolStorage",
}
#: Records start at multiples of this, so that ``torch.load(mmap=True)`` can map them.
_ALIGNMENT = 64
#: Bytes whose checksum is computed while the ones before them are written.
_BLOCK = 1 << 22
#: Bytes of tensors for which a file is mapped once.
_MAPPED = 1 << 28


def check_archive(path: Path, content: Any = None) -> None:
    """Compare every record with its CRC-32, which ``torch.load`` does not do.

    :param content: a binary stream to check in place of the file ``path``.
    :raises LNSConfigError: not a zip, truncated, or a record is damaged.
    """
    with opened(path, content) as archive:
        if record := archive.testzip():
            raise damaged(path, record)


@contextmanager
def opened(path: Path, content: Any = None) -> Iterator[zipfile.ZipFile]:
    """The zip in ``path``, or in the binary stream ``content``; what goes wrong with it is said of ``path``."""
    try:
        with zipfile.ZipFile(path if content is None else content) as archive:
            yield archive
    except FileNotFoundError:
        raise LNSConfigError(f"{path} does not exist") from None
    except (zipfile.BadZipFile, EOFError, RuntimeError, UnicodeDecodeError, struct.error, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # a place before the file's beginning
            raise
        raise LNSConfigError(f"{path} is truncated or not a file of torch.save: {one_line(error)}") from None


def damaged(path: Path, record: str) -> LNSConfigError:
    """The error for a record whose checksum does not match."""
    return LNSConfigError(f"{path} is damaged: the checksum of its record {record} does not match")


def read_archive(path: Path) -> Any:
    """The object in ``path`` with a :class:`LazyTensor` for each tensor; loaded with ``weights_only=True``.

    A tensor's bytes are compared with their checksum when it is read, all other records here: to compare the whole file
    first would be to read the disk twice where the model is larger than the memory.

    :raises LNSConfigError: not a zip, truncated, damaged, or something that cannot be exported; so does ``load``.
    """
    (checksums, state), mapped, compared = _check_around_tensors(path), _Mapped(path), set()

    def lazy(keys: tuple[Any, ...], tensor: torch.Tensor) -> LazyTensor:
        if problem := unreadable(tensor) or ("" if tensor.dtype in _STORAGES else f"a tensor of {tensor.dtype}"):
            raise LNSConfigError(f"{path}: {'.'.join(map(str, keys))} is {problem}, which cannot be exported")

        record = tensor.untyped_storage().data_ptr()  # of which several tensors may be views

        def load() -> torch.Tensor:
            value = mapped.tensor(record, keys)
            if state_of(path) != state:
                raise LNSConfigError(f"{path} was changed while it was read: start again when nothing writes to it")
            if record not in compared:
                storage = value.untyped_storage()
                content: Any = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
                if (storage.nbytes(), zlib.crc32(content)) not in checksums:
                    check_archive(path)  # names the record, unless torch only maps less of it than there is
                compared.add(record)
            return value

        return LazyTensor(tuple(tensor.shape), tensor.dtype, load)

    return map_tensors(_load(path), lazy)


class _Mapped:
    """The tensors of a file, mapped: new pages for 5 GB cost as much time as reading them.

    A mapping gives each record once, so that a tensor is its caller's own. After :data:`_MAPPED` bytes there is another
    one, because the pages of one that stays add up to the whole file; to make one is to unpickle the file. Threads may
    share it.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._value, self._lock = path, None, Lock()
        self._given: dict[int, int] = {}

    def tensor(self, record: int, keys: tuple[Any, ...]) -> torch.Tensor:
        with self._lock:
            if self._value is None or record in self._given or sum(self._given.values()) >= _MAPPED:
                self._value, self._given = _load(self._path), {}
            value: Any = self._value
            for key in keys:
                value = value[key]
            self._given[record] = value.untyped_storage().nbytes()
            return value


def _check_around_tensors(path: Path) -> tuple[set[tuple[int, int]], tuple[int, ...]]:
    """Compare the small records with their CRC-32; returns size and CRC-32 of the others, the bytes of tensors, and the
    state of the file."""
    with opened(path) as archive:
        checksums, state = set(), state_of(path)
        for info in archive.infolist():
            check_record(archive, info, path)
            if info.filename.split("/")[1:2] == ["data"]:  # archive/data/0
                checksums.add((info.file_size, info.CRC))
                continue
            try:
                archive.read(info)
            except zipfile.BadZipFile:
                raise damaged(path, info.filename) from None
        return checksums, state


def check_record(archive: zipfile.ZipFile, info: zipfile.ZipInfo, path: Path) -> None:
    """:raises LNSConfigError: a record is compressed, or not what the directory at the end of the file says."""
    if info.compress_type != zipfile.ZIP_STORED:
        raise LNSConfigError(f"{path}: its record {info.filename} is compressed, which torch.save never does")
    archive.open(info).close()


def unreadable(tensor: torch.Tensor, device: str = "cpu") -> str:
    """What is in the way of writing ``tensor``, which was loaded to ``device``, again; or nothing."""
    if tensor.device.type != device:
        return f"a tensor on the device {tensor.device}, without values"
    if tensor.layout != torch.strided:
        return f"a sparse tensor ({tensor.layout})"
    if tensor.is_neg() or tensor.is_conj():
        return "a view that changes the signs of what is stored"
    return ""


def map_tensors(value: Any, function: Callable[[tuple[Any, ...], Any], Any], keys: tuple[Any, ...] = ()) -> Any:
    """Replace each (lazy) tensor in nested dicts, lists and tuples by ``function(keys, tensor)``."""
    if isinstance(value, (torch.Tensor, LazyTensor)):
        return function(keys, value)
    if isinstance(value, dict):
        return {key: map_tensors(item, function, (*keys, key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(item, function, (*keys, index)) for index, item in enumerate(value))
    return value


def write_archive(path: Path, value: Any) -> None:
    """Write ``value`` as ``torch.save`` would, each :class:`LazyTensor` read when its turn comes.

    :raises OSError: the file cannot be written.
    """
    tensors: list[LazyTensor] = []
    pickled = io.BytesIO()
    _Pickler(pickled, tensors).dump(value)
    with Output(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        _write_record(archive, "archive/data.pkl", pickled.getvalue())
        _write_record(archive, "archive/byteorder", b"little")
        names = (f"archive/data/{index}" for index in count())
        for_each(tensors, lambda tensor, data: _write_record(archive, next(names), tensor_bytes(data, tensor)))
        _write_record(archive, "archive/version", b"3\n")


def tensor_bytes(tensor: torch.Tensor, expected: LazyTensor) -> memoryview:
    """The raw bytes of ``tensor``, as :attr:`LazyTensor.read` gave it, in row-major order: no copy when contiguous."""
    found = tuple(tensor.shape), tensor.dtype
    assert found in ((tuple(expected.shape), expected.dtype), ((expected.nbytes,), torch.uint8)), (found, expected)
    raw: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(raw)


def _load(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        raise LNSConfigError(f"{path} does not exist") from None
    except (RuntimeError, pickle.UnpicklingError, ValueError, KeyError, EOFError) as error:
        raise LNSConfigError(f"{path} cannot be loaded safely (weights_only=True): {one_line(error)}") from None


class _Storage:
    def __init__(self, index: int, tensor: LazyTensor) -> None:
        kind = getattr(torch, _STORAGES[tensor.dtype])
        self.persistent_id = ("storage", kind, str(index), "cpu", torch.Size(tensor.shape).numel())


class _Pickler(pickle.Pickler):
    """Pickles a lazy tensor as the call that rebuilds it from its record in the zip."""

    def __init__(self, file: io.BytesIO, tensors: list[LazyTensor]) -> None:
        super().__init__(file, protocol=2)
        self._tensors = tensors

    def persistent_id(self, value: Any) -> Any:
        return value.persistent_id if isinstance(value, _Storage) else None

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, LazyTensor):
            return NotImplemented  # pickle's own word for: this object goes the ordinary way
        self._tensors.append(value)
        storage = _Storage(len(self._tensors) - 1, value)
        strides = tuple(_strides(value.shape))
        return torch._utils._rebuild_tensor_v2, (storage, 0, tuple(value.shape), strides, False, OrderedDict())


def _strides(shape: tuple[int, ...]) -> Iterator[int]:
    for axis in range(len(shape)):
        yield torch.Size(shape[axis + 1 :]).numel()


def _write_record(archive: zipfile.ZipFile, name: str, content: bytes | memoryview) -> None:
    """One stored record; its data starts at a multiple of 64 bytes thanks to an ignored extra field."""
    info = zipfile.ZipInfo(name)
    large = len(content) >= 1 << 31
    assert archive.fp is not None
    header = archive.fp.tell() + 30 + len(info.filename) + 4 + (20 if large else 0)
    padding = -header % _ALIGNMENT
    info.extra = struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    with archive.open(info, "w", force_zip64=large) as record:
        for start in range(0, len(content), _BLOCK):
            record.write(content[start : start + _BLOCK])
