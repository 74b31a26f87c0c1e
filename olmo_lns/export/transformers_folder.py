"""A model folder of ours (``lns_llama``, …) folded into the stock class of its family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from olmo_lns.errors import LNSConfigError, one_line
from olmo_lns.export import tokenizer
from olmo_lns.export.options import HF, Options, Target

__all__ = ["is_ours", "load", "target"]


def is_ours(folder: Path) -> bool:
    """Whether ``folder`` holds a transformers model whose type is one of ours."""
    from olmo_lns.doors.transformers.families import PREFIX

    try:
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(values, dict) and str(values.get("model_type", "")).startswith(PREFIX)


def target(source: Path, options: Options) -> Target:
    """``olmo-lns export <folder> <output> --format hf``; the whole model is held in memory.

    :raises LNSConfigError: another format, or a folder that transformers cannot load.
    """
    if options.format != HF:
        raise LNSConfigError(f"{source} is a transformers model: it is folded into one, with --format hf")

    def write(out: Path) -> list[str]:
        model = load(source)
        kind, record = type(model).__name__, model.config.lns_record
        from olmo_lns.doors.transformers.folding import fold

        fold(model, options.rounding.scale)
        if options.dtype is not None:
            model.to(options.dtype)
        model.save_pretrained(out, max_shard_size=options.max_shard_size)
        lines = [f"{kind} -> {type(model).__name__}: {record['scheme']} folded into the weights"]
        return [*lines, _tokenizer(source, out, options.tokenizer, model.config.to_dict())]

    return write


def load(source: Path) -> Any:
    """The model with its factors outside the weights, as saved. :raises LNSConfigError: it cannot be loaded."""
    import transformers

    from olmo_lns.doors.transformers import register
    from olmo_lns.doors.transformers.models import class_of

    register()
    try:
        config = transformers.AutoConfig.from_pretrained(source)
        return class_of(config).from_pretrained(source, config=config)
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
