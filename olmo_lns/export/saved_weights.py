"""Read tensors and their dtypes from the weight files of a transformers checkpoint.

The config of the checkpoint is not reliable for this. accelerate's ``save_model`` writes fp32 weights beside a config
that says bfloat16. And a config may tie the head to the embedding although the files have different values for them.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, Iterable

import torch
from torch import nn

from olmo_lns.errors import LNSConfigError

#: Files of weights, in the order in which transformers prefers them.
_FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
#: Names of dtypes in safetensors -> torch's.
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def widest(dtypes: Iterable[torch.dtype | None]) -> torch.dtype | None:
    """Return the smallest dtype that can represent all values of these dtypes, or None if none is a floating dtype.

    transformers loads all weights of a model in one dtype. Only this one preserves all of them.

    >>> widest([torch.bfloat16, torch.int64, torch.float32])
    torch.float32
    """
    known = [dtype for dtype in dtypes if dtype is not None and dtype in _DTYPES.values()]
    return functools.reduce(torch.promote_types, known) if known else None


class SavedWeights:
    """The weight files that transformers would load. Tensors are read on demand.

    The attribute ``dtypes`` maps the name of each tensor to its dtype, or to None if this is not fp16, bf16, fp32 or
    fp64.

    :param source: a folder, or a name on the hub.
    :raises OSError: if a file is missing that an index names.

    Example: ``widest(SavedWeights("model").dtypes.values())``.
    """

    def __init__(self, source: str | Path) -> None:
        from transformers.utils import cached_file

        def find(name: str) -> Path | None:
            path = cached_file(str(source), name, _raise_exceptions_for_missing_entries=False)
            return None if path is None else Path(path)

        found = next(filter(None, map(find, _FILES)), None)
        names = [] if found is None else [found.name]
        if found is not None and found.suffix == ".json":
            names = sorted(set(json.loads(found.read_text(encoding="utf-8"))["weight_map"].values()))
        self.dtypes: dict[str, torch.dtype | None] = {}
        self._files: dict[str, Any] = {}
        for path in filter(None, map(find, names)):
            file = _open_safetensors(path) if path.suffix == ".safetensors" else _open_pickle(path)
            if isinstance(file, dict):
                self.dtypes |= {name: tensor.dtype for name, tensor in file.items()}
            else:
                self.dtypes |= {name: _DTYPES.get(file.get_slice(name).get_dtype()) for name in list(file.keys())}
            self._files |= dict.fromkeys(self.dtypes.keys() - self._files.keys(), file)

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor on the CPU, in its saved dtype."""
        file = self._files[name]
        result: torch.Tensor = file[name] if isinstance(file, dict) else file.get_tensor(name)
        return result


def _open_safetensors(path: Path) -> Any:
    from safetensors import safe_open

    return safe_open(path, framework="pt")


def _open_pickle(path: Path) -> dict[str, torch.Tensor]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError:  # the format of torch before 1.6 cannot be mapped into memory
        state = torch.load(path, map_location="cpu", weights_only=True)
    return {name: tensor for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}


def require_one_head(saved: SavedWeights, model: nn.Module, source: object) -> None:
    """Refuse a model whose config ties the head to the embedding although the files have a different head.

    transformers 5 loads such a head, but earlier versions and other programs ignore it.

    :raises LNSConfigError: if the saved head and the saved embedding differ.
    """
    config: Any = model.config
    if not getattr(config.get_text_config(), "tie_word_embeddings", getattr(config, "tie_word_embeddings", False)):
        return
    names = {module: name for name, module in model.named_modules(remove_duplicate=False)}
    getters = (getattr(model, f"get_{side}_embeddings", lambda: None) for side in ("output", "input"))
    head, embedding = (_saved_name(saved, names.get(getter(), "")) for getter in getters)
    if head is None or embedding is None:
        return
    head_weight, embedding_weight = saved.tensor(head), saved.tensor(embedding)
    if head_weight.shape != embedding_weight.shape or not torch.equal(head_weight, embedding_weight):
        raise LNSConfigError(
            f"{source}: config.json says tie_word_embeddings=true, but {head} differs from {embedding}. Expected equal "
            "weights. If the head was trained apart, set tie_word_embeddings to false in config.json. "
            f"Otherwise remove {head} from the weights."
        )


def _saved_name(saved: SavedWeights, module: str) -> str | None:
    """Return the name under which a module's weight was saved, or None.

    In the files of a base model, the names lack the prefix that they have in the model with a head.
    """
    parts = f"{module}.weight".split(".")
    candidates = (".".join(parts[start:]) for start in range(len(parts) - 1))
    return next((name for name in candidates if name in saved.dtypes), None) if module else None
