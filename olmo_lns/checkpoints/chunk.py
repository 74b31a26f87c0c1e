"""One chunk of a distributed checkpoint: what ``torch.save`` made of a tensor, as bytes within a larger file."""

from __future__ import annotations

import errno
import io
import pickle
import struct
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from olmo_lns.checkpoints.archive import check_record, damaged, opened, unreadable
from olmo_lns.errors import LNSConfigError, one_line

__all__ = ["SavedTensor"]


@dataclass(frozen=True)
class SavedTensor:
    """A tensor in the bytes that ``torch.save`` made of it.

    :param meta: shape, dtype and strides, on the meta device.
    :param storage: the bytes that it is a view of, where they lie: at any address.
    """

    meta: torch.Tensor
    storage: memoryview

    @classmethod
    def read(cls, content: memoryview, source: str) -> SavedTensor:
        """Compare the checksums of all of ``content``; of the tensor itself, newer versions of torch read nothing.

        :raises LNSConfigError: the bytes are damaged or hold something else than a tensor with values.
        """
        storage = _storage(content, Path(source))
        try:
            meta = torch.load(_Bytes(content), map_location="meta", weights_only=True)  # type: ignore[arg-type]
        except (RuntimeError, pickle.UnpicklingError, ValueError, KeyError) as error:
            raise LNSConfigError(f"{source} cannot be loaded safely: {one_line(error)}") from None
        if not isinstance(meta, torch.Tensor):
            raise LNSConfigError(f"{source}: expected a tensor, found {type(meta).__name__}")
        if problem := unreadable(meta, "meta"):
            raise LNSConfigError(f"{source} is {problem}, which cannot be exported")
        if meta.untyped_storage().nbytes() > len(storage):
            raise LNSConfigError(f"{source} is a tensor without values, which cannot be exported")
        return cls(meta, storage)

    def values(self) -> torch.Tensor:
        """The tensor, in memory of its own, for arithmetic wants addresses that are multiples of its elements'."""
        meta, size = self.meta, self.meta.untyped_storage().nbytes()
        if not size:
            return torch.empty(meta.shape, dtype=meta.dtype)
        own = torch.frombuffer(self.storage, dtype=torch.uint8, count=size).clone().view(meta.dtype)
        return own.as_strided(meta.size(), meta.stride(), meta.storage_offset())

    def raw(self) -> torch.Tensor:
        """Its bytes in row-major order, 1-D of ``uint8``: in place, unless the tensor is a view in another order."""
        if not self.meta.nbytes or not self.meta.is_contiguous():
            return self.values().contiguous().reshape(-1).view(torch.uint8)
        start = int(self.meta.storage_offset()) * self.meta.itemsize
        return torch.frombuffer(self.storage, dtype=torch.uint8, count=self.meta.nbytes, offset=start)


def _storage(content: memoryview, path: Path) -> memoryview:
    """Compare every record with its CRC-32, where it lies; returns the one of the tensor, empty where there is none."""
    storage, storages = content[:0], 0
    with opened(path, _Bytes(content)) as archive:
        for info in archive.infolist():
            check_record(archive, info, path)
            name, extra = struct.unpack_from("<2H", content, info.header_offset + 26)
            start = info.header_offset + 30 + name + extra
            record = content[start : start + info.file_size]
            if len(record) != info.file_size or zlib.crc32(record) != info.CRC:
                raise damaged(path, info.filename)
            part = info.filename.partition("/")[2]
            if part == "byteorder" and record != sys.byteorder.encode():
                raise LNSConfigError(f"{path} was written on a machine of the other byte order, {bytes(record)!r}")
            if part.startswith("data/"):
                storages += 1
                if storages > 1:
                    raise LNSConfigError(f"{path} holds more than the bytes of one tensor: {info.filename}")
                storage = record
    return storage


class _Bytes(io.RawIOBase):
    """A file of bytes in memory, which ``io.BytesIO`` would copy."""

    def __init__(self, content: memoryview) -> None:
        super().__init__()
        self._content, self._position = content, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        position = (0, self._position, len(self._content))[whence] + offset
        if position < 0:
            raise OSError(errno.EINVAL, f"there is nothing at {position}")
        self._position = position
        return position

    def readinto(self, buffer: Any) -> int:
        part = self._content[self._position :][: len(buffer)]
        buffer[: len(part)] = part
        self._position += len(part)
        return len(part)
