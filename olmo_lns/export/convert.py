"""Fold and convert an opened checkpoint, and write the folder of its export."""

from __future__ import annotations

import os
import secrets
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator

import torch

from olmo_lns.errors import LNSConfigError, LNSError
from olmo_lns.export import HF
from olmo_lns.export.checkpoint import OpenCheckpoint
from olmo_lns.export.formats import FORMATS
from olmo_lns.export.prompts import vocabulary
from olmo_lns.export.spellings import rewrite_tokenizer
from olmo_lns.folding import check_finite
from olmo_lns.tokenizers import load_tokenizer


def convert(opened: OpenCheckpoint, output_format: str, dtype: torch.dtype | None = None) -> OpenCheckpoint:
    """Fold an opened checkpoint in place and return the stock model of the output format.

    :param output_format: one of the ``outputs`` of the checkpoint's format.
    :param dtype: dtype of the exported weights; None keeps those of the checkpoint.
    :raises LNSConfigError: if the scheme cannot be folded, no stock model computes the same, or weights are not finite.

    Example: ``convert(open_checkpoint(folder), "hf").model.save_pretrained(out)``.
    """
    source = FORMATS[opened.format]
    check_finite(opened.model.named_parameters())
    if output_format == HF:
        source.require_transformers(opened)
    stock = source.folded(opened, dtype or opened.dtype)
    if output_format == HF:
        stock = source.to_transformers(stock)
    check_finite(stock.model.named_parameters())
    return stock


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a hidden folder beside ``out``. It is renamed to ``out`` on success, and removed on an error.

    :raises LNSConfigError: if ``out`` exists, also as a link to nothing, or cannot be created.
    """
    if os.path.lexists(out):
        raise LNSConfigError(f"{out} exists. An export never overwrites files. Pass the path of a new folder.")
    if str(out).startswith("~"):
        raise LNSConfigError(
            f"{out} starts with ~, which the shell has not expanded. Expected the path of a new folder. Write $HOME "
            "instead of ~."
        )
    unfinished = out.with_name(f".{out.name}.{secrets.token_hex(4)}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise LNSConfigError(
            f"{out} cannot be created, because {out.parent} is no folder. Pass the path of a new folder."
        ) from None
    unfinished.mkdir()
    try:
        yield unfinished
        unfinished.rename(out)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def write_tokenizer(out: Path, opened: OpenCheckpoint, requested: str | None) -> str:
    """Save a tokenizer in transformers' format.

    :param out: folder of the export.
    :param requested: a ``tokenizer.json``, a folder, a name on the hub, or ``none``. If it is None, the tokenizer of
        the checkpoint is saved.
    :returns: a line about the tokenizer, for the user.
    :raises LNSConfigError: if the tokenizer cannot be loaded, or has more tokens than the model.
    """
    name = requested or opened.tokenizer
    if name in (None, "none"):
        return "The export has no tokenizer. Pass --tokenizer to include one."
    try:
        tokenizer = load_tokenizer(name, opened.folder, opened.eos_token_id)
    except LNSError as error:
        raise LNSConfigError(f"{error} Or omit the tokenizer with --tokenizer none.") from None
    size = max(tokenizer.get_vocab().values(), default=-1) + 1
    rows = vocabulary(opened.model)
    if size > rows:
        raise LNSConfigError(
            f"The tokenizer {name} has {size} tokens, but the model has {rows} embeddings. Expected the "
            "tokenizer of this model. Pass it with --tokenizer FILE, or omit it with --tokenizer none."
        )
    if tokenizer.pad_token is None and opened.pad_token_id in range(size):
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(opened.pad_token_id)
    if tokenizer.eos_token is None and opened.eos_token_id in range(size):
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(opened.eos_token_id)
    tokenizer.model_max_length = opened.max_length
    tokenizer.save_pretrained(out)
    rewrite_tokenizer(out)
    return f"The tokenizer {name} was saved. It has {size} tokens, and its end of text is {tokenizer.eos_token!r}."
