"""Checkpoints of ``torch.distributed.checkpoint``: OLMo's ``torch_new``, OLMo-core's, Megatron's ``torch_dist``.

A folder of files in which tensors are cut into chunks, and a pickled ``.metadata`` that says where each chunk lies.
torch reads and writes them, but for what it leaves out: the metadata is unpickled safely, and every chunk is compared
with its checksums before it is loaded.
"""

from __future__ import annotations

import errno
import io
import pickle
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, Mapping

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
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
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.utils import _ReaderView

from olmo_lns.checkpoints import METADATA
from olmo_lns.checkpoints.tensors import LazyTensor, check_archive, loading, writing
from olmo_lns.errors import LNSConfigError, one_line


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


class _Part(_ReaderView):
    """Part of a file as a file of its own: torch's, with places that are counted from its end put right."""

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        place = offset + (0, self.tell(), self.len)[whence]
        if place < 0:
            raise OSError(errno.EINVAL, "a place before the beginning of the file")
        return self.base_stream.seek(self.offset + min(place, self.len)) - self.offset


@dataclass(frozen=True)
class Edit:
    """What becomes of a tensor, chunk by chunk.

    :param function: of a chunk's place in the whole tensor and the chunk, which it may change in place; a chunk of
        the same shape. :param dtype: of what it gives, None: as it is.
    """

    function: Callable[[tuple[int, ...], torch.Tensor], torch.Tensor]
    dtype: torch.dtype | None = None


class DistributedCheckpoint:
    """A distributed checkpoint folder.

    :raises LNSConfigError: no or damaged metadata, or a file shorter than the metadata says.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.metadata = _read_metadata(folder / METADATA)
        self._checked: set[MetadataIndex] = set()
        self._check()

    @property
    def names(self) -> list[str]:
        """Names of the tensors, in the metadata's order."""
        items = self.metadata.state_dict_metadata.items()
        return [name for name, entry in items if isinstance(entry, TensorStorageMetadata)]

    def tensor(self, name: str, row: int | None = None) -> LazyTensor:
        """The whole tensor, put together from its chunks when it is read.

        :param row: only ``tensor[row]``, for tensors that stack all layers; other rows are not read.
        """
        entry, dtype = self._entry(name), self._dtype(name)
        size = tuple(entry.size)
        largest = max((torch.Size(chunk.sizes).numel() for chunk in entry.chunks), default=0) * dtype.itemsize
        if row is None:
            whole = LazyTensor(size, dtype, lambda: self._region(name, (0,) * len(size), size))
            return replace(whole, memory=whole.nbytes + (largest if len(entry.chunks) > 1 else 0))
        offsets, sizes = (row, *(0 for _ in size[1:])), (1, *size[1:])
        part = LazyTensor(size[1:], dtype, lambda: self._region(name, offsets, sizes)[0])
        return replace(part, memory=part.nbytes + (largest if largest > part.nbytes else 0))

    def object(self, name: str) -> bytes | None:
        """The bytes of an entry that is no tensor, None where there is no such entry."""
        if not isinstance(self.metadata.state_dict_metadata.get(name), BytesStorageMetadata):
            return None
        with self._stored(MetadataIndex(name)) as (part, _):
            return part.read()

    def rewrite(
        self,
        folder: Path,
        keep: Callable[[str], bool],
        edits: Mapping[str, Edit],
        *,
        max_bytes: int,
        objects: Mapping[str, bytes] | None = None,
    ) -> None:
        """Write a checkpoint of the same chunks into ``folder``, some dropped and some changed.

        :param keep: whether an entry (tensor or object) is kept, by name.
        :param edits: name -> what to do with each of its chunks.
        :param max_bytes: of a file, and of what is held at once; a chunk that needs more gets a file of its own.
        :param objects: name -> new bytes of an object.
        :raises LNSConfigError: a chunk is damaged. :raises OSError: a file cannot be written.
        """
        kept = {name: entry for name, entry in self.metadata.state_dict_metadata.items() if keep(name)}
        for name, entry in kept.items():
            dtype = edits[name].dtype if name in edits else None
            if dtype is not None and isinstance(entry, TensorStorageMetadata):
                kept[name] = replace(entry, properties=replace(entry.properties, dtype=dtype))
        plans, metadata = create_default_global_save_plan(list(self._files(kept, max_bytes)))

        def content(item: WriteItem) -> Any:
            name = item.index.fqn
            if item.tensor_data is None:
                return io.BytesIO((objects or {}).get(name) or self.object(name) or b"")
            chunk = item.tensor_data.chunk
            value = self._region(name, chunk.offsets, chunk.sizes)
            return edits[name].function(tuple(chunk.offsets), value) if name in edits else value

        planner = DefaultSavePlanner()
        planner.resolve_data = content  # type: ignore[method-assign, assignment]  # each value when its turn comes
        writer = FileSystemWriter(folder, sync_files=False)  # all of an export is flushed at its end
        folder.mkdir(exist_ok=True)
        with writing(folder):
            results = [writer.write_data(plan, planner).wait() for plan in writer.prepare_global_plan(plans)]
            for field in ("planner_data", "mcore_data"):
                if isinstance(said := getattr(self.metadata, field, None), dict):
                    setattr(metadata, field, {name: value for name, value in said.items() if keep(name)})
            writer.finish(metadata, results)  # last: without .metadata no loader takes the folder for a checkpoint

    def _files(self, entries: Mapping[str, Any], max_bytes: int) -> Iterator[SavePlan]:
        """The chunks of ``entries``, in one plan for each file: torch's writer holds a file until it is complete."""
        items: list[WriteItem] = []
        held = 0
        for name, entry in entries.items():
            if not isinstance(entry, TensorStorageMetadata):
                items.append(WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO))
                continue
            read, written = self._dtype(name), entry.properties.dtype
            for chunk in entry.chunks:
                count = torch.Size(chunk.sizes).numel()
                beside = count * read.itemsize if read != written else 0
                if held and held + count * written.itemsize + beside > max_bytes:
                    yield SavePlan(items)
                    items, held = [], 0
                data = TensorWriteData(chunk, entry.properties, entry.size)
                items.append(WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data))
                held += count * written.itemsize
        yield SavePlan(items)

    @contextmanager
    def _stored(self, index: MetadataIndex) -> Iterator[tuple[_Part, str]]:
        """Where an item is stored, and what messages call that place."""
        info = self.metadata.storage_data[index]
        with (self.folder / info.relative_path).open("rb") as file:
            yield _Part(file, info.offset, info.length), f"{self.folder / info.relative_path} ({index.fqn})"

    def _chunk(self, index: MetadataIndex) -> torch.Tensor:
        """A chunk as it was saved, in memory of its own. :raises LNSConfigError: it is damaged."""
        with self._stored(index) as (part, source):
            if index not in self._checked:
                check_archive(source, part)  # type: ignore[arg-type]
                self._checked.add(index)
            part.seek(0)
            with loading(source):
                tensor = torch.load(part, map_location="cpu", weights_only=True)  # type: ignore[arg-type]
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != self._dtype(index.fqn):
            raise LNSConfigError(f"{source} is not the {self._dtype(index.fqn)} tensor that the metadata names")
        return tensor.contiguous()

    def _region(self, name: str, offsets: Iterable[int], sizes: Iterable[int]) -> torch.Tensor:
        """A part of a tensor, in memory of its own; a stored chunk takes that memory once."""
        wanted = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        items = create_read_items_for_chunk_list(name, self._entry(name), [wanted])
        if len(items) == 1 and items[0].lengths == wanted.sizes:
            chunk = self._chunk(items[0].storage_index)
            if chunk.shape == wanted.sizes:
                return chunk
            with loading(f"{self.folder} ({name})"):
                return narrow_tensor_by_index(chunk, items[0].storage_offsets, wanted.sizes).clone()
        tensor = torch.empty(wanted.sizes, dtype=self._dtype(name))
        for item in items:
            with loading(f"{self.folder} ({name})"):
                part = narrow_tensor_by_index(self._chunk(item.storage_index), item.storage_offsets, item.lengths)
                narrow_tensor_by_index(tensor, item.dest_offsets, item.lengths).copy_(part)
            del part
        return tensor

    def _entry(self, name: str) -> TensorStorageMetadata:
        entry = self.metadata.state_dict_metadata.get(name)
        if not isinstance(entry, TensorStorageMetadata):
            raise LNSConfigError(f"{self.folder} holds no tensor {name}")
        return entry

    def _dtype(self, name: str) -> torch.dtype:
        return self._entry(name).properties.dtype

    def _check(self) -> None:
        """The files hold every chunk that the metadata lists, and the chunks of a tensor make up its shape."""
        sizes = {path.name: path.stat().st_size for path in self.folder.iterdir() if path.is_file()}
        for index, info in self.metadata.storage_data.items():
            end, size = info.offset + info.length, sizes.get(info.relative_path)
            problem = "is missing" if size is None else f"is truncated to {size} bytes" if end > size else ""
            if getattr(info, "transform_descriptors", None):
                problem = "is compressed, which is not read: save it without transforms"
            if problem:
                raise LNSConfigError(
                    f"{self.folder}: file {info.relative_path!r} of this folder {problem}; {index.fqn} is stored in "
                    f"it up to byte {end}"
                )
        for name in self.names:
            entry = self._entry(name)
            stored = [MetadataIndex(name, chunk.offsets) in self.metadata.storage_data for chunk in entry.chunks]
            covered = sum(torch.Size(chunk.sizes).numel() for chunk in entry.chunks)
            if not all(stored) or covered != torch.Size(entry.size).numel():
                raise LNSConfigError(
                    f"{self.folder}: the metadata lists {sum(stored)} of {len(stored)} chunks of {name}, which make "
                    f"up {covered} elements: expected all, of the shape {tuple(entry.size)}"
                )


def _read_metadata(path: Path) -> Metadata:
    """:raises LNSConfigError: the file is absent, damaged, or names what has no place in it."""
    try:
        with path.open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
    except FileNotFoundError:
        raise LNSConfigError(f"{path} does not exist: {path.parent} is not a complete distributed checkpoint") from None
    except Exception as error:  # a damaged pickle raises almost anything
        raise LNSConfigError(f"{path} is damaged or unsafe: {one_line(error)}") from None
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise LNSConfigError(f"{path} does not describe a distributed checkpoint")
    return metadata
