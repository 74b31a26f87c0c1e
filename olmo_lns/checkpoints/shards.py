"""safetensors files: read lazily, and written in shards of a bounded size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Mapping

import torch

from olmo_lns.checkpoints.archive import read_archive, writing
from olmo_lns.checkpoints.tensors import LazyTensor
from olmo_lns.errors import LNSConfigError, one_line

__all__ = ["INDEX", "read_safetensors", "read_weights", "write_safetensors"]

#: Name of the file that maps weights to shards, as transformers writes it.
INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64, "I64": torch.int64}


def write_safetensors(folder: Path, tensors: Mapping[str, LazyTensor], max_bytes: int) -> list[Path]:
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
        return [_write_file(folder / _SINGLE, groups[0])]
    paths = [
        _write_file(folder / f"model-{number:05d}-of-{len(groups):05d}.safetensors", group)
        for number, group in enumerate(groups, 1)
    ]
    weight_map = {name: path.name for path, group in zip(paths, groups, strict=True) for name in group}
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return paths


def _write_file(path: Path, tensors: Mapping[str, LazyTensor]) -> Path:
    from safetensors.torch import save_file

    with writing(path):
        values = {name: tensor.load().contiguous() for name, tensor in tensors.items()}
        save_file(values, path, metadata={"format": "pt"})
    return path


def read_weights(folder: Path) -> dict[str, LazyTensor]:
    """Weights of a transformers folder: of its safetensors files, or of ``pytorch_model.bin`` where there are none.

    :raises LNSConfigError: a file is missing or damaged.
    """
    path = folder / "pytorch_model.bin"
    if any((folder / name).is_file() for name in (_SINGLE, INDEX)) or not path.is_file():
        return read_safetensors(folder)
    state = read_archive(path)
    if not isinstance(state, dict) or not all(isinstance(tensor, LazyTensor) for tensor in state.values()):
        raise LNSConfigError(f"{path} is not a state dict of tensors")
    return state


def read_safetensors(folder: Path) -> dict[str, LazyTensor]:
    """Weights of a transformers folder: ``model.safetensors`` or the shards that its index names.

    :raises LNSConfigError: a file is missing, truncated or not safetensors, or lacks a tensor of the index.
    """
    index = folder / INDEX
    if not index.is_file():
        return _read_file(folder / _SINGLE)
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError) as error:
        raise LNSConfigError(f"{index} is not an index of shards: {one_line(error)}") from None
    found: dict[str, LazyTensor] = {}
    for name in sorted(set(weight_map.values())):
        found.update(_read_file(folder / name))
    if lost := sorted(set(weight_map) - set(found)):
        raise LNSConfigError(f"{folder}: the shards lack {lost[0]}, which {INDEX} lists")
    return found


def _read_file(path: Path) -> dict[str, LazyTensor]:
    from safetensors import SafetensorError, safe_open

    def load(name: str) -> torch.Tensor:
        with safe_open(path, framework="pt") as file:
            return file.get_tensor(name)

    found = {}
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                view = file.get_slice(name)
                if view.get_dtype() not in _DTYPES:
                    raise LNSConfigError(f"{path}: {name} has dtype {view.get_dtype()}, expected {sorted(_DTYPES)}")
                dtype = _DTYPES[view.get_dtype()]
                found[name] = LazyTensor(tuple(view.get_shape()), dtype, lambda name=name: load(name))  # type: ignore[misc]
    except FileNotFoundError:
        raise LNSConfigError(f"{path} does not exist") from None
    except (SafetensorError, OSError) as error:
        raise LNSConfigError(f"{path} is truncated or not a safetensors file: {one_line(error)}") from None
    return found
