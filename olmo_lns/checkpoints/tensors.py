"""Files of tensors, read one at a time: torch.save's archives and safetensors; and what a config implies of them.

torch and safetensors read and write. What they leave out is here: the checksums of an archive are compared, every load
is safe (``weights_only=True``), shards are bounded, and what the system said of a failed write is what is raised.
"""

from __future__ import annotations

import errno
import pickle
import re
import struct
import zipfile
import zlib
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, Callable, Iterator, Mapping, Sequence

import torch

from olmo_lns.checkpoints import read_json, write_json
from olmo_lns.errors import LNSConfigError, one_line
from olmo_lns.norm.dtypes import DTYPES

#: Name of the file that maps weights to shards, as transformers writes it.
INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
#: What zipfile raises for a damaged file, besides an OSError for a place before its beginning.
_DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, ValueError, OverflowError, struct.error)


@dataclass(frozen=True)
class LazyTensor:
    """A tensor whose shape and dtype are known, and whose data is read when it is needed.

    :param load: reads the tensor.
    :param memory: bytes of memory of its own that ``load`` takes; 0 where the result lies in a mapped file, and then
        nobody changes it in place.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    load: Callable[[], torch.Tensor]
    memory: int = 0

    @classmethod
    def of(cls, tensor: torch.Tensor) -> LazyTensor:
        return cls(tuple(tensor.shape), tensor.dtype, lambda: tensor)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor], **changes: Any) -> LazyTensor:
        """The tensor ``function(self)``, in new memory; ``changes`` names its shape or dtype where they differ."""
        made = replace(self, load=lambda: function(self.load()), **changes)
        return replace(made, memory=changes.get("memory", self.memory + made.nbytes))

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def split_rows(tensor: LazyTensor, counts: Sequence[int]) -> list[LazyTensor]:
    """``tensor`` cut along its first axis, ``counts`` rows each; every part is a copy, so that none keeps the whole."""

    def part(end: int, count: int) -> LazyTensor:
        return tensor.map(lambda whole: whole[end - count : end].clone(), shape=(count, *tensor.shape[1:]))

    return [part(end, count) for end, count in zip(accumulate(counts), counts, strict=True)]


def join_rows(*parts: LazyTensor) -> LazyTensor:
    """One tensor of the rows of ``parts``, of one dtype, one after another."""
    shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
    memory = sum(part.memory + part.nbytes for part in parts)
    return LazyTensor(shape, parts[0].dtype, lambda: torch.cat([part.load() for part in parts]), memory)


def map_tensors(value: Any, function: Callable[[tuple[Any, ...], Any], Any], keys: tuple[Any, ...] = ()) -> Any:
    """Replace each (lazy) tensor in nested dicts, lists and tuples by ``function(keys, tensor)``."""
    if isinstance(value, (torch.Tensor, LazyTensor)):
        return function(keys, value)
    if isinstance(value, dict):
        return {key: map_tensors(item, function, (*keys, key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(item, function, (*keys, index)) for index, item in enumerate(value))
    return value


def check_dtype(name: str, dtype: torch.dtype, source: object) -> None:
    """:raises LNSConfigError: not a plain floating dtype."""
    if dtype not in (*DTYPES.values(), torch.float64):
        raise LNSConfigError(
            f"{source}: {name} is {str(dtype).removeprefix('torch.')}: expected fp32, bf16, fp16 or fp64; quantized "
            "weights cannot be multiplied exactly"
        )


def check_shapes(found: Mapping[str, LazyTensor], expected: Mapping[str, tuple[int, ...]], source: object) -> None:
    """:raises LNSConfigError: keys are missing or unexpected, or a shape or dtype is not what it should be."""
    for name, tensor in found.items():
        check_dtype(name, tensor.dtype, source)
    missing, extra = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    for problem, names in (("lacks", missing), ("holds unexpected", extra)):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise LNSConfigError(
                f"{source} {problem} the weight {names[0]}{more}: it is damaged, or not the model of its config"
            )
    for name, shape in expected.items():
        if tuple(found[name].shape) != tuple(shape):
            raise LNSConfigError(
                f"{source}: {name} has shape {tuple(found[name].shape)}, but its config implies {tuple(shape)}"
            )


def check_archive(path: Path | str, content: BinaryIO | None = None) -> None:
    """Compare every record with its CRC-32, which torch does not do.

    :param path: the file; with ``content``, what messages call it. :param content: read in place of the file.
    :raises LNSConfigError: not a zip, truncated, compressed, or a record is damaged.
    """
    try:
        with zipfile.ZipFile(path if content is None else content) as archive:
            packed = [info.filename for info in archive.infolist() if info.compress_type != zipfile.ZIP_STORED]
            record = None if packed else archive.testzip()
    except FileNotFoundError:
        raise LNSConfigError(f"{path} does not exist") from None
    except (*_DAMAGE, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise
        raise LNSConfigError(f"{path} is truncated or not a file of torch.save: {one_line(error)}") from None
    if packed:
        raise LNSConfigError(f"{path}: its record {packed[0]} is compressed, which torch.save never does")
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
        return LazyTensor.of(tensor)

    return map_tensors(value, lazy)


def read_state(path: Path) -> dict[str, LazyTensor]:
    """The weights in ``path``. :raises LNSConfigError: as :func:`read_archive`, or not a state dict."""
    state = read_archive(path)
    if not isinstance(state, dict) or not all(isinstance(value, LazyTensor) for value in state.values()):
        raise LNSConfigError(f"{path} is not a state dict of tensors")
    return state


def write_archive(path: Path, value: Any) -> None:
    """Write ``value`` with ``torch.save``, each :class:`LazyTensor` read: those that are mapped take no memory.

    :raises OSError: the file cannot be written.
    """
    with writing(path), path.open("wb") as file:
        torch.save(map_tensors(value, lambda _, tensor: tensor.load()), file)


@contextmanager
def loading(source: object) -> Iterator[None]:
    """Turn what torch raises while it loads safely from ``source`` into one line about ``source``.

    :raises LNSConfigError: torch cannot, or only with objects that are no plain values.
    """
    try:
        yield
    except (RuntimeError, pickle.UnpicklingError, ValueError, KeyError, EOFError, AssertionError) as error:
        found = re.search(r"GLOBAL ([\w.]+)", str(error))  # torch's own advice is to load it all the same
        why = f"it holds {found[1]}" if found else one_line(error)
        raise LNSConfigError(f"{source} cannot be loaded safely (weights_only=True): {why}") from None


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise what the system said, where torch and safetensors put another error in front of it.

    :raises OSError: ``path`` could not be written.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, RuntimeError) and isinstance(error.__context__, OSError):
            raise error.__context__ from None
        if type(error).__name__ == "SafetensorError":  # not imported for those who write no safetensors
            raise OSError(f"{path}: {one_line(error)}") from None
        raise


def write_safetensors(folder: Path, tensors: Mapping[str, LazyTensor], max_bytes: int) -> None:
    """Write one file, or numbered shards and their index.

    A shard, with what reading its tensors takes besides, is at most ``max_bytes``, which is what is held in memory; a
    tensor that takes more gets a shard of its own.

    :raises OSError: a file cannot be written.
    """
    groups: list[dict[str, LazyTensor]] = [{}]
    held = 0
    for name, tensor in tensors.items():
        if groups[-1] and held + max(tensor.nbytes, tensor.memory) > max_bytes:
            groups.append({})
            held = 0
        groups[-1][name] = tensor
        held += tensor.nbytes
    if len(groups) == 1:
        _write_shard(folder / _SINGLE, groups[0])
        return
    weight_map: dict[str, str] = {}
    for number, group in enumerate(groups, start=1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        _write_shard(folder / file, group)
        weight_map |= dict.fromkeys(group, file)
    total = {"total_size": sum(tensor.nbytes for tensor in tensors.values())}
    write_json(folder / INDEX, {"metadata": total, "weight_map": weight_map})


def _write_shard(path: Path, tensors: Mapping[str, LazyTensor]) -> None:
    from safetensors.torch import save_file

    with writing(path):
        values = {name: tensor.load().contiguous() for name, tensor in tensors.items()}
        save_file(values, path, metadata={"format": "pt"})


def read_weights(folder: Path) -> dict[str, LazyTensor]:
    """Weights of a transformers folder: ``model.safetensors``, the shards that its index names, or where neither is
    there ``pytorch_model.bin``; mapped from the files.

    :raises LNSConfigError: a file is missing, truncated or of another format, or lacks a tensor of the index.
    """
    index, old = folder / INDEX, folder / "pytorch_model.bin"
    if not index.is_file():
        single = folder / _SINGLE
        return read_state(old) if old.is_file() and not single.is_file() else _read_shard(single)
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise LNSConfigError(f"{index} is not an index of shards: no 'weight_map'")
    found = {
        key: value for name in sorted(set(weight_map.values())) for key, value in _read_shard(folder / name).items()
    }
    if lost := sorted(set(weight_map) - set(found)):
        raise LNSConfigError(f"{folder}: the shards lack {lost[0]}, which {INDEX} lists")
    return found


def _read_shard(path: Path) -> dict[str, LazyTensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return {name: LazyTensor.of(tensor) for name, tensor in load_file(path).items()}
    except FileNotFoundError:
        raise LNSConfigError(f"{path} does not exist") from None
    except (SafetensorError, OSError) as error:
        raise LNSConfigError(f"{path} is truncated or not a safetensors file: {one_line(error)}") from None
