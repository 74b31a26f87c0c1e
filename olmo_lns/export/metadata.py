"""Check the metadata of a distributed checkpoint before a framework unpickles it.

torch and OLMo-core read the file ``.metadata`` with Python's ``pickle``, which runs the code that a file names. This
module reads the file first, and builds only the classes that describe tensors.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from olmo_lns.errors import LNSConfigError

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
            raise LNSConfigError(f"it holds a {type(metadata).__name__}")
    except Exception as error:  # a damaged pickle may raise almost any
        raise LNSConfigError(
            f"{path} cannot be loaded: {error}. Expected the metadata that the framework wrote, which names tensors "
            "only. Restore the file, or report this error if the framework wrote it so."
        ) from None
    return metadata
