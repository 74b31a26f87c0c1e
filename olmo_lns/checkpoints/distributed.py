"""Checkpoints of ``torch.distributed.checkpoint``: OLMo's ``torch_new``, OLMo-core's, Megatron's ``torch_dist``.

A folder of files in which tensors are cut into chunks, and a pickled ``.metadata`` that says where each chunk lies.
torch reads and writes them, but for what it leaves out: the metadata is unpickled safely, and every chunk is compared
with its checksums before it is loaded.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
from pathlib import Path
from typing import Any, Callable, Iterable, Mapping

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from olmo_lns.checkpoints import METADATA
from olmo_lns.checkpoints.archive import check_archive, loading, writing
from olmo_lns.checkpoints.tensors import ChunkFunction, LazyTensor
from olmo_lns.errors import LNSConfigError, one_line

__all__ = ["DistributedCheckpoint"]

#: Bytes after which another file is begun: torch's writer holds the tensors of a file until it is complete.
_FILE_BYTES = 1 << 30


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


class _Reader(FileSystemReader):
    """torch's reader, with our own unpickler, whose chunks are compared with their checksums, once each."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._checked: set[MetadataIndex] = set()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / METADATA
        try:
            with path.open("rb") as file:
                metadata = _MetadataUnpickler(file).load()
        except FileNotFoundError:
            raise LNSConfigError(
                f"{path} does not exist: {self.path} is not a complete distributed checkpoint"
            ) from None
        except Exception as error:  # a damaged pickle raises almost anything
            raise LNSConfigError(f"{path} is damaged or unsafe: {one_line(error)}") from None
        if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
            raise LNSConfigError(f"{path} does not describe a distributed checkpoint")
        return metadata

    def read(self, items: Iterable[ReadItem], planner: _Place) -> None:
        """:raises LNSConfigError: a chunk is damaged, or not what the metadata says."""
        for item in items:
            info = self.storage_data[item.storage_index]
            source = f"{Path(self.path) / info.relative_path} ({item.storage_index.fqn})"
            if item.type == LoadItemType.TENSOR and item.storage_index not in self._checked:
                with (Path(self.path) / info.relative_path).open("rb") as file:
                    file.seek(info.offset)
                    check_archive(source, io.BytesIO(file.read(info.length)))
                self._checked.add(item.storage_index)
            with loading(source):
                self.read_data(LoadPlan([item]), planner).wait()


class _Place(DefaultLoadPlanner):
    """Where torch's reader puts the one tensor, or the bytes of the one object, that it is asked for."""

    def __init__(self, tensor: torch.Tensor | None = None) -> None:
        super().__init__()
        self.tensor, self.content = tensor, b""

    def lookup_tensor(self, index: MetadataIndex) -> Any:
        return self.tensor

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.content = value.getvalue()


class _Chunks(DefaultSavePlanner):
    """What torch's writer writes: for each item the value that ``content`` gives when its turn comes."""

    def __init__(self, content: Callable[[WriteItem], Any]) -> None:
        super().__init__()
        self._content = content

    def resolve_data(self, write_item: WriteItem) -> Any:
        return self._content(write_item)


class DistributedCheckpoint:
    """A distributed checkpoint folder.

    :raises LNSConfigError: no or damaged metadata, or a file shorter than the metadata says.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._reader = folder, _Reader(folder)
        self.metadata = self._reader.read_metadata()
        self._check_files()
        self._check_coverage()
        self._reader.set_up_storage_reader(self.metadata, True)

    @property
    def names(self) -> list[str]:
        """Names of the tensors, in the metadata's order."""
        items = self.metadata.state_dict_metadata.items()
        return [name for name, entry in items if isinstance(entry, TensorStorageMetadata)]

    def tensor(self, name: str, row: int | None = None) -> LazyTensor:
        """The whole tensor, put together from its chunks when it is read.

        :param row: only ``tensor[row]``, for tensors that stack all layers; other rows are not read.
        """
        size = tuple(self._entry(name).size)
        if row is None:
            return LazyTensor(size, self._dtype(name), lambda: self._region(name, (0,) * len(size), size))
        offsets, sizes = (row, *(0 for _ in size[1:])), (1, *size[1:])
        return LazyTensor(size[1:], self._dtype(name), lambda: self._region(name, offsets, sizes)[0])

    def object(self, name: str) -> bytes | None:
        """The bytes of an entry that is no tensor, None where there is no such entry."""
        if not isinstance(self.metadata.state_dict_metadata.get(name), BytesStorageMetadata):
            return None
        index, place = MetadataIndex(name), _Place()
        nothing = torch.Size(())
        self._reader.read([ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing)], place)
        return place.content

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
        :raises LNSConfigError: a chunk is damaged. :raises OSError: a file cannot be written.
        """
        kept = {name: entry for name, entry in self.metadata.state_dict_metadata.items() if keep(name)}
        plans, metadata = create_default_global_save_plan(list(_files(kept)))

        def content(item: WriteItem) -> Any:
            name = item.index.fqn
            if item.tensor_data is None:
                return io.BytesIO((objects or {}).get(name) or self.object(name) or b"")
            chunk = item.tensor_data.chunk
            value = self._region(name, chunk.offsets, chunk.sizes)
            if name in functions:
                value = functions[name](name, tuple(chunk.offsets), value)
                entry: Any = metadata.state_dict_metadata[name]
                entry.properties = dataclasses.replace(entry.properties, dtype=value.dtype)
            return value

        writer = FileSystemWriter(folder, sync_files=False)  # all of an export is flushed at its end
        folder.mkdir(exist_ok=True)
        with writing(folder):
            numbered = writer.prepare_global_plan(plans)
            results = [writer.write_data(plan, _Chunks(content)).wait() for plan in numbered]
            if isinstance(planner := self.metadata.planner_data, dict):
                metadata.planner_data = {name: path for name, path in planner.items() if keep(name)}
            if hasattr(self.metadata, "mcore_data"):
                data = {name: value for name, value in self.metadata.mcore_data.items() if keep(name)}
                metadata.mcore_data = data  # type: ignore[attr-defined]
            writer.finish(metadata, results)  # last: without .metadata no loader takes the folder for a checkpoint

    def _region(self, name: str, offsets: Iterable[int], sizes: Iterable[int]) -> torch.Tensor:
        """A part of a tensor, in memory of its own."""
        chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        tensor = torch.empty(chunk.sizes, dtype=self._dtype(name))
        self._reader.read(create_read_items_for_chunk_list(name, self._entry(name), [chunk]), _Place(tensor))
        return tensor

    def _entry(self, name: str) -> TensorStorageMetadata:
        entry = self.metadata.state_dict_metadata.get(name)
        if not isinstance(entry, TensorStorageMetadata):
            raise LNSConfigError(f"{self.folder} holds no tensor {name}")
        return entry

    def _dtype(self, name: str) -> torch.dtype:
        return self._entry(name).properties.dtype

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


def _files(entries: Mapping[str, Any]) -> Iterable[SavePlan]:
    """The chunks of ``entries``, in one plan a file of at most :data:`_FILE_BYTES`, or of one larger chunk."""
    items: list[WriteItem] = []
    held = 0
    for name, entry in entries.items():
        for chunk in getattr(entry, "chunks", [None]):
            if chunk is None:
                items.append(WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO))
                continue
            size = torch.Size(chunk.sizes).numel() * entry.properties.dtype.itemsize
            if items and held + size > _FILE_BYTES:
                yield SavePlan(items)
                items, held = [], 0
            data = TensorWriteData(chunk, entry.properties, entry.size)
            items.append(WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data))
            held += size
    yield SavePlan(items)
