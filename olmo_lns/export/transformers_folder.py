"""A model folder of ours (``lns_llama``, …) folded into the stock class of its family, a weight at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Callable, Mapping

import torch

from olmo_lns.checkpoints.shards import read_weights, write_safetensors
from olmo_lns.checkpoints.tensors import LazyTensor, check_shapes
from olmo_lns.errors import LNSConfigError, one_line
from olmo_lns.export import tokenizer
from olmo_lns.export.atomic import copy_unread
from olmo_lns.export.fold import Factor, scaled
from olmo_lns.export.options import HF, Options, Source, Target
from olmo_lns.record import Record

__all__ = ["ModelFolder", "is_ours", "load"]

GENERATION = "generation_config.json"


def is_ours(folder: Path) -> bool:
    """Whether ``folder`` holds a transformers model whose type is one of ours."""
    from olmo_lns.integrations.transformers.families import PREFIX

    try:
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(values, dict) and str(values.get("model_type", "")).startswith(PREFIX)


class ModelFolder(Source):
    name = "transformers"
    kind = "a transformers model"
    formats = (HF,)

    def recognises(self, folder: Path) -> bool:
        return is_ours(folder)

    def fold(self, folder: Path, options: Options) -> Target:
        from olmo_lns.integrations.transformers.configs import record_of
        from olmo_lns.integrations.transformers.sites import fold

        model = _skeleton(folder)
        options.require_exponent(record_of(model.config), folder)
        kind, record, weights = type(model).__name__, model.config.lns_record, read_weights(folder)
        _check(model, weights, folder)
        factors: dict[str, Factor] = {}

        def note(name: str, parameter: torch.Tensor, factor: float, _: torch.dtype) -> torch.Tensor:
            factors[name] = factor
            return parameter

        config = fold(model, note).config
        folded = scaled(weights, factors, options.rounding, options.dtype)
        config.architectures = [type(model).__name__]
        if options.dtype is not None:
            setattr(config, "dtype" if hasattr(config, "dtype") else "torch_dtype", options.dtype)  # since 4.56

        def write(out: Path) -> list[str]:
            lines = [f"{kind} -> {type(model).__name__}: {record['scheme']} folded into the weights"]
            lines.append("adapters trained on the unfolded model do not fit this one: merge them first, then export")
            lines.append(_tokenizer(folder, out, options.tokenizer, config.to_dict()))
            write_safetensors(out, folded, options.shard_bytes)
            if (folder / GENERATION).is_file():
                copy_unread(folder / GENERATION, out / GENERATION)
            config.save_pretrained(out)
            return lines

        return Target(write, folded, config.to_dict())

    def train(self, folder: Path, options: Options) -> Target:
        raise LNSConfigError(f"{folder} is a transformers folder of ours already: train on it as it is")

    def model(self, folder: Path, exported: Record | None = None) -> Any:
        return load(folder).float().eval()


def _skeleton(source: Path) -> Any:
    """The model of the folder's config, without data."""

    def build(kind: Any, config: Any) -> Any:
        with torch.device("meta"):
            return kind(config)

    return _loaded(source, build)


def _check(model: Any, weights: Mapping[str, LazyTensor], source: Path) -> None:
    """:raises LNSConfigError: weights are missing, unexpected or of another shape; of tied ones any may be there."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for tied in names.values():
        if any(name in weights for name in tied):
            for name in set(tied) - set(weights):
                expected.pop(name, None)
    try:
        check_shapes(weights, expected, source)
    except LNSConfigError as error:
        raise LNSConfigError(f"{error}. One that another transformers saved: load and save it with this one") from None


def load(source: Path) -> Any:
    """The model with its factors outside the weights, as saved. :raises LNSConfigError: it cannot be loaded."""
    return _loaded(source, lambda kind, config: kind.from_pretrained(source, config=config))


def _loaded(source: Path, make: Callable[[Any, Any], Any]) -> Any:
    """``make(class, config)`` of the folder."""
    import transformers

    from olmo_lns.integrations.transformers import register
    from olmo_lns.integrations.transformers.models import class_of

    register()
    try:
        config = transformers.AutoConfig.from_pretrained(source)
        return make(class_of(config), config)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise LNSConfigError(f"{source}: transformers cannot load it: {one_line(error)}") from error


def _tokenizer(source: Path, out: Path, asked: str | None, config: dict[str, Any]) -> str:
    from transformers import AutoTokenizer

    if asked == tokenizer.NONE:
        return "no tokenizer, as asked"
    if asked is not None:
        return tokenizer.write_tokenizer(out, asked, config=config, beside=source)
    if not any((source / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        return "no tokenizer: the folder has none"
    AutoTokenizer.from_pretrained(source).save_pretrained(out)
    return "tokenizer: the folder's own"
