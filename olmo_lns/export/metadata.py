"""Read distributed checkpoints without running code from their files.

torch and OLMo-core read the file ``.metadata`` with Python's ``pickle``, which runs the code that a file names.
OLMo-core reads tensors in this way, too. This module builds only the classes that describe tensors, and reads tensors
with ``weights_only=True``.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from olmo_lns.errors import LNSConfigError
from olmo_lns.export.checkpoint import reporting_load_errors

_METADATA = "torch.distributed.checkpoint.metadata"
_PLANNER = "torch.distributed.checkpoint.planner"  # whose plans Megatron Core saves
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
#: Names in the metadata that torch, Megatron Core, OLMo and OLMo-core write, besides dtypes.
_ALLOWED = {
    *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
    *((_METADATA, f"{kind}StorageMetadata") for kind in ("Tensor", "Bytes", "Chunk")),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    *((_PLANNER, name) for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")),
    *((_MEGATRON, name) for name in ("MCoreMetadata", "MCoreSavePlan")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("olmo_core.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("builtins", "set"),
    *(("pathlib", name) for name in ("Path", "PosixPath", "PurePosixPath")),
    *(("pathlib._local", name) for name in ("Path", "PosixPath", "PurePosixPath")),  # Python 3.13
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _ALLOWED:
            return super().find_class(module, name)
        raise LNSConfigError(f"it names {module}.{name}")


def read_metadata(folder: Path) -> Metadata:
    """Read the metadata of a distributed checkpoint. No code of the file runs.

    :param folder: folder with the file ``.metadata``.
    :raises LNSConfigError: if the file is damaged, or names a class or function that does not describe tensors.

    Example: ``read_metadata(Path("run/iter_0001000")).state_dict_metadata``.
    """
    path = folder / ".metadata"
    try:
        with path.open("rb") as file:
            metadata = _Unpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise LNSConfigError(f"it has an object of the type {type(metadata).__name__}")
    except Exception as error:  # a damaged pickle may raise almost any
        raise LNSConfigError(
            f"{path} cannot be loaded: {error}. Expected the metadata that the framework wrote, which names tensors "
            "only. Restore the file, or report this error if the framework wrote it so."
        ) from None
    return metadata


class SafeReader(FileSystemReader):
    """torch's reader, with :func:`read_metadata` instead of ``pickle``.

    It reads what OLMo-core has written as well, whose class for the place of a tensor in the files lacks a field.

    Example: ``load(state, storage_reader=SafeReader(folder), no_dist=True)``.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata of the checkpoint. :raises LNSConfigError: as in :func:`read_metadata`."""
        metadata = read_metadata(Path(self.path))
        metadata.storage_data = {
            index: info
            if isinstance(info, _StorageInfo)
            else _StorageInfo(info.relative_path, info.offset, info.length)
            for index, info in (metadata.storage_data or {}).items()
        }
        return metadata


def load_tensors(folder: Path, state: dict[str, torch.Tensor]) -> None:
    """Load tensors of a distributed checkpoint in place.

    :param folder: folder with the file ``.metadata``.
    :param state: name in the checkpoint -> a tensor of the same shape on the CPU, which gets the values.
    :raises LNSConfigError: if a name is missing or not that of a tensor, or if a file is damaged or names other code.

    Example: ``load_tensors(folder, {"model.norm.weight": torch.empty(64)})``.
    """
    entries = read_metadata(folder).state_dict_metadata
    for name in state:
        if name in entries and not isinstance(entries[name], TensorStorageMetadata):
            raise LNSConfigError(f"{folder}: {name} is not a tensor. Expected the weights that the framework wrote.")
    with reporting_load_errors(folder):
        load(state, storage_reader=SafeReader(folder), no_dist=True)
