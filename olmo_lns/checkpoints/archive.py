"""Files of ``torch.save``, read and written by torch; their checksums, which torch does not read, are compared here."""

from __future__ import annotations

import errno
import pickle
import struct
import zipfile
import zlib
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Callable, Iterator

import torch

from olmo_lns.checkpoints.tensors import LazyTensor
from olmo_lns.errors import LNSConfigError, one_line

__all__ = ["check_archive", "loading", "map_tensors", "read_archive", "write_archive", "writing"]

#: What zipfile raises for a damaged file, besides an OSError for a place before its beginning.
_DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, ValueError, OverflowError, struct.error)


def check_archive(path: Path | str, content: BinaryIO | None = None) -> None:
    """Compare every record with its CRC-32.

    :param path: the file; with ``content``, what messages call it. :param content: read in place of the file.
    :raises LNSConfigError: not a zip, truncated, compressed, or a record is damaged.
    """
    try:
        with zipfile.ZipFile(path if content is None else content) as archive:
            for info in archive.infolist():
                if info.compress_type != zipfile.ZIP_STORED:
                    raise LNSConfigError(
                        f"{path}: its record {info.filename} is compressed, which torch.save never does"
                    )
            record = archive.testzip()
    except FileNotFoundError:
        raise LNSConfigError(f"{path} does not exist") from None
    except (*_DAMAGE, OSError) as error:
        if isinstance(error, LNSConfigError) or (isinstance(error, OSError) and error.errno != errno.EINVAL):
            raise
        raise LNSConfigError(f"{path} is truncated or not a file of torch.save: {one_line(error)}") from None
    if record:
        raise LNSConfigError(f"{path} is damaged: the checksum of its record {record} does not match")


def read_archive(path: Path) -> Any:
    """The object in ``path`` with a :class:`LazyTensor` for each tensor, mapped from the file and not to be changed.

    :raises LNSConfigError: not a file of torch.save, truncated, damaged, unsafe, or a tensor without plain values.
    """
    check_archive(path)
    with loading(path):
        value = torch.load(path, map_location="cpu", weights_only=True, mmap=True)

    def lazy(keys: tuple[Any, ...], tensor: torch.Tensor) -> LazyTensor:
        problem = f"a tensor on the device {tensor.device}, without values" if tensor.device.type != "cpu" else ""
        problem = problem or (f"a sparse tensor ({tensor.layout})" if tensor.layout != torch.strided else "")
        if problem:
            raise LNSConfigError(f"{path}: {'.'.join(map(str, keys))} is {problem}, which cannot be exported")
        return LazyTensor(tuple(tensor.shape), tensor.dtype, lambda: tensor)

    return map_tensors(value, lazy)


def write_archive(path: Path, value: Any) -> None:
    """Write ``value`` with ``torch.save``, each :class:`LazyTensor` read: those that are mapped take no memory.

    :raises OSError: the file cannot be written.
    """
    with writing(path), path.open("wb") as file:
        torch.save(map_tensors(value, lambda _, tensor: tensor.load()), file)


@contextmanager
def loading(source: object) -> Iterator[None]:
    """Say of ``source`` what torch raises while it loads safely from it.

    :raises LNSConfigError: torch cannot, or only with objects that are no plain values.
    """
    try:
        yield
    except (RuntimeError, pickle.UnpicklingError, ValueError, KeyError, EOFError, AssertionError) as error:
        raise LNSConfigError(f"{source} cannot be loaded safely (weights_only=True): {one_line(error)}") from None


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """What the system said, where torch and safetensors put another error in front of it.

    :raises OSError: ``path`` could not be written.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise
    except Exception as error:
        if type(error).__name__ == "SafetensorError":  # not imported for those who write no safetensors
            raise OSError(f"{path}: {one_line(error)}") from None
        raise


def map_tensors(value: Any, function: Callable[[tuple[Any, ...], Any], Any], keys: tuple[Any, ...] = ()) -> Any:
    """Replace each (lazy) tensor in nested dicts, lists and tuples by ``function(keys, tensor)``."""
    if isinstance(value, (torch.Tensor, LazyTensor)):
        return function(keys, value)
    if isinstance(value, dict):
        return {key: map_tensors(item, function, (*keys, key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(item, function, (*keys, index)) for index, item in enumerate(value))
    return value
