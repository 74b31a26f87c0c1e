"""Checkpoints of ``torch.distributed.checkpoint``: OLMo's ``torch_new``, OLMo-core's, Megatron's ``torch_dist``.

A folder of files in which tensors are cut into chunks, and a pickled ``.metadata`` that says where
each chunk lies. Chunks are read and rewritten one by one, so neither the sharding nor the size of
the model matters.
"""

from __future__ import annotations

import dataclasses
import mmap
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Mapping, Sequence

import torch
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from olmo_lns.checkpoints import METADATA
from olmo_lns.checkpoints.chunk import SavedTensor
from olmo_lns.checkpoints.output import Output
from olmo_lns.checkpoints.tensors import ChunkFunction, LazyTensor, for_each
from olmo_lns.errors import LNSConfigError, one_line

__all__ = ["DistributedCheckpoint"]

#: What is written in a chunk's place.
Content = bytes | memoryview | torch.Tensor


@dataclass(frozen=True)
class _Item:
    """A chunk to be written as a tensor, or a chunk or object to be written as the bytes that it is stored in."""

    index: MetadataIndex
    nbytes: int
    read: Callable[[], Content]


def _write_items(path: Path, items: Sequence[_Item], entries: dict[str, Any], storage: dict[Any, _StorageInfo]) -> None:
    """Into one file; their dtypes go into ``entries`` and their places into ``storage``."""
    with Output(path) as output:

        def write(item: _Item, content: Content) -> None:
            start, name = output.tell(), item.index.fqn
            if isinstance(content, torch.Tensor):
                torch.save(content, output)  # type: ignore[arg-type]  # it asks for typing.IO, and only writes
                properties = dataclasses.replace(entries[name].properties, dtype=content.dtype)
                entries[name] = dataclasses.replace(entries[name], properties=properties)
            else:
                output.write(content)
            storage[item.index] = _StorageInfo(path.name, start, output.tell() - start)

        for_each(items, write)


class _Inert:
    """Stands for a bookkeeping class that is not needed here; holds nothing and runs nothing."""

    def __new__(cls, *args: Any, **kwargs: Any) -> _Inert:
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {})


class _MetadataUnpickler(pickle.Unpickler):
    """Builds the metadata classes and nothing else, so that a hostile ``.metadata`` cannot run code."""

    _ALLOWED = {
        "collections": {"OrderedDict"},
        "pathlib": {"PosixPath", "Path", "PurePosixPath"},
        "torch": {"Size", *(str(d).removeprefix("torch.") for d in vars(torch).values() if isinstance(d, torch.dtype))},
        "torch.serialization": {"_get_layout"},
        "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
        dcp_metadata.__name__: {name for name, kind in vars(dcp_metadata).items() if isinstance(kind, type)},
    }
    _INERT = ("torch.distributed.", "megatron.core.dist_checkpointing.", "olmo_core.distributed.checkpoint.")

    def find_class(self, module: str, name: str) -> Any:
        if name in self._ALLOWED.get(module, ()):
            return super().find_class(module, name)
        if name == "_StorageInfo" and module == "olmo_core.distributed.checkpoint.filesystem":
            return _StorageInfo  # the same three fields
        if module.startswith(self._INERT):
            return Metadata if name == "MCoreMetadata" else _Inert
        raise pickle.UnpicklingError(f"it names {module}.{name}, which has no place in a checkpoint's metadata")


class DistributedCheckpoint:
    """A distributed checkpoint folder.

    :raises LNSConfigError: no or damaged metadata, or a file shorter than the metadata says.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = folder / METADATA
        try:
            with path.open("rb") as file:
                metadata = _MetadataUnpickler(file).load()
        except FileNotFoundError:
            raise LNSConfigError(f"{path} does not exist: {folder} is not a complete distributed checkpoint") from None
        except Exception as error:  # a damaged pickle raises almost anything
            raise LNSConfigError(f"{path} is damaged or unsafe: {one_line(error)}") from None
        if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
            raise LNSConfigError(f"{path} does not describe a distributed checkpoint")
        self.metadata = metadata
        self._check_files()
        self._check_coverage()

    @property
    def names(self) -> list[str]:
        """Names of the tensors, in the metadata's order."""
        items = self.metadata.state_dict_metadata.items()
        return [name for name, entry in items if isinstance(entry, TensorStorageMetadata)]

    def tensor(self, name: str, row: int | None = None) -> LazyTensor:
        """The whole tensor, put together from its chunks when it is read.

        :param row: only ``tensor[row]``, for tensors that stack all layers; other rows are not read.
        """
        entry = self._entry(name)
        chunks = [c for c in entry.chunks if row is None or c.offsets[0] <= row < c.offsets[0] + c.sizes[0]]
        shape = tuple(entry.size) if row is None else tuple(entry.size[1:])

        if [tuple(chunk.sizes) for chunk in chunks] == [shape if row is None else (1, *shape)]:

            def saved() -> SavedTensor:
                return self._read_chunk(name, chunks[0])

            only = LazyTensor(shape, entry.properties.dtype, lambda: saved().values().view(shape))
            return dataclasses.replace(only, raw=lambda: saved().raw())

        def load() -> torch.Tensor:
            whole = torch.empty(shape, dtype=entry.properties.dtype)
            for chunk in chunks:
                part = self._read_chunk(name, chunk).values()
                place = [slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True)]
                if row is None:
                    whole[tuple(place)] = part
                else:
                    whole[tuple(place[1:])] = part[row - chunk.offsets[0]]
            return whole

        return LazyTensor(shape, entry.properties.dtype, load)

    def object(self, name: str) -> bytes | None:
        """The bytes of an entry that is no tensor, None where there is no such entry."""
        if not isinstance(self.metadata.state_dict_metadata.get(name), BytesStorageMetadata):
            return None
        stored = next(info for index, info in self.metadata.storage_data.items() if index.fqn == name)
        return self._bytes(stored).tobytes()

    def rewrite(
        self,
        folder: Path,
        keep: Callable[[str], bool],
        functions: Mapping[str, ChunkFunction],
        objects: Mapping[str, bytes] | None = None,
    ) -> None:
        """Write a checkpoint of the same chunks into ``folder``, some dropped and some changed.

        :param keep: whether an entry (tensor or object) is kept, by name.
        :param functions: name -> what to do with each of its chunks; the dtype may change.
        :param objects: name -> new bytes of an object.
        """
        kept = {name: entry for name, entry in self.metadata.state_dict_metadata.items() if keep(name)}
        by_file: dict[str, list[MetadataIndex]] = {}
        for index, info in self.metadata.storage_data.items():
            if index.fqn in kept:
                by_file.setdefault(info.relative_path, []).append(index)
        folder.mkdir(exist_ok=True)
        storage: dict[MetadataIndex, _StorageInfo] = {}
        for name, indices in by_file.items():
            indices.sort(key=lambda index: self.metadata.storage_data[index].offset)
            items = [self._item(index, functions, objects or {}) for index in indices]
            _write_items(folder / name, items, kept, storage)
        planner = self.metadata.planner_data
        if isinstance(planner, dict):
            planner = {name: path for name, path in planner.items() if keep(name)}
        new_metadata = Metadata(state_dict_metadata=kept, planner_data=planner, storage_data=storage)
        if hasattr(self.metadata, "mcore_data"):
            data = {name: value for name, value in self.metadata.mcore_data.items() if keep(name)}
            new_metadata.mcore_data = data  # type: ignore[attr-defined]
        # Last: without it no loader takes the folder for a checkpoint.
        with (folder / METADATA).open("wb") as file:
            pickle.dump(new_metadata, file)

    def _entry(self, name: str) -> TensorStorageMetadata:
        entry = self.metadata.state_dict_metadata.get(name)
        if not isinstance(entry, TensorStorageMetadata):
            raise LNSConfigError(f"{self.folder} holds no tensor {name}")
        return entry

    def _check_coverage(self) -> None:
        """The chunks of each tensor must fill it."""
        for name in self.names:
            entry = self._entry(name)
            covered = sum(torch.Size(chunk.sizes).numel() for chunk in entry.chunks)
            if covered != torch.Size(entry.size).numel():
                raise LNSConfigError(
                    f"{self.folder}: the chunks of {name} do not make up its shape {tuple(entry.size)}"
                )

    def _check_files(self) -> None:
        """Every chunk must have its bytes, and every kept file be long enough."""
        sizes: dict[str, int] = {}
        for index, info in self.metadata.storage_data.items():
            path = self.folder / info.relative_path
            if Path(info.relative_path).name != info.relative_path:
                raise LNSConfigError(f"{self.folder}: the metadata names {info.relative_path!r}, outside the folder")
            if info.relative_path not in sizes:
                if not path.is_file():
                    raise LNSConfigError(f"{path} is missing: {index.fqn} is stored in it")
                sizes[info.relative_path] = path.stat().st_size
            if info.offset + info.length > sizes[info.relative_path]:
                raise LNSConfigError(
                    f"{path} is truncated: {index.fqn} ends at byte {info.offset + info.length}, "
                    f"the file at {sizes[info.relative_path]}"
                )
            if getattr(info, "transform_descriptors", None):
                raise LNSConfigError(f"{path} is compressed ({info.transform_descriptors}): save it without transforms")
        for name, entry in self.metadata.state_dict_metadata.items():
            for chunk in getattr(entry, "chunks", []):
                if MetadataIndex(name, chunk.offsets) not in self.metadata.storage_data:
                    raise LNSConfigError(f"{self.folder}: the metadata lists no bytes for {name} at {chunk.offsets}")

    def _bytes(self, info: _StorageInfo) -> memoryview:
        """Mapped from the file, for new memory costs as much time as reading; and only these, for the system counts as
        memory what could be written to.
        """
        if not info.length:
            return memoryview(b"")
        before = info.offset % mmap.ALLOCATIONGRANULARITY
        with (self.folder / info.relative_path).open("rb") as file:
            place = {"offset": info.offset - before, "access": mmap.ACCESS_COPY}
            return memoryview(mmap.mmap(file.fileno(), before + info.length, **place))[before:]

    def _read_chunk(self, name: str, chunk: Any) -> SavedTensor:
        return self._checked(self._bytes(self.metadata.storage_data[MetadataIndex(name, chunk.offsets)]), name, chunk)

    def _checked(self, content: memoryview, name: str, chunk: Any) -> SavedTensor:
        """A chunk in its bytes, which is as the metadata says."""
        info, entry = self.metadata.storage_data[MetadataIndex(name, chunk.offsets)], self._entry(name)
        source = f"{self.folder / info.relative_path} ({name})"
        saved = SavedTensor.read(content, source)
        if saved.meta.shape != chunk.sizes or saved.meta.dtype != entry.properties.dtype:
            raise LNSConfigError(
                f"{source}: found {tuple(saved.meta.shape)} {saved.meta.dtype}, the metadata says "
                f"{tuple(chunk.sizes)} {entry.properties.dtype}"
            )
        return saved

    def _item(
        self, index: MetadataIndex, functions: Mapping[str, ChunkFunction], objects: Mapping[str, bytes]
    ) -> _Item:
        """What is written for one chunk or object of this checkpoint."""
        info, entry = self.metadata.storage_data[index], self.metadata.state_dict_metadata[index.fqn]
        offsets, function = tuple(index.offset or ()), functions.get(index.fqn)

        def load() -> Content:
            if index.fqn in objects:
                return objects[index.fqn]
            content = self._bytes(info)
            if isinstance(entry, BytesStorageMetadata):
                return content
            chunk = next(chunk for chunk in entry.chunks if tuple(chunk.offsets) == offsets)
            saved = self._checked(content, index.fqn, chunk)
            return content if function is None else function(index.fqn, offsets, saved.values())

        return _Item(index, info.length, load)
