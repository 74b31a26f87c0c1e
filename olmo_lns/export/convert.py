"""Fold, convert and save an opened checkpoint."""

from __future__ import annotations

import secrets
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator

import torch

from olmo_lns.errors import LNSConfigError, LNSError
from olmo_lns.export import HF, MEGATRON, OLMO, OLMO_CORE, huggingface
from olmo_lns.export.open import Opened, module_of
from olmo_lns.fold import check_finite
from olmo_lns.tokenizers import load_tokenizer

#: Kind of checkpoint -> formats that it can be written as. The first is the default.
WRITTEN_AS = {
    OLMO: (OLMO, HF),
    OLMO_CORE: (OLMO_CORE, HF),
    MEGATRON: (MEGATRON, HF),
    HF: (HF,),
}


def convert(opened: Opened, form: str, dtype: torch.dtype | None = None) -> Opened:
    """Fold an opened checkpoint in place and return the stock model of ``form``.

    :param form: one of :data:`olmo_lns.export.FORMATS`, except Megatron's, which has no model here.
    :param dtype: dtype of the weights; None keeps theirs.
    :raises LNSConfigError: a scheme that cannot be folded, a model that no stock class computes, or a weight that is
        not finite.

    Example: ``convert(open_checkpoint(folder), "hf").model.save_pretrained(out)``.
    """
    check_finite(opened.model.named_parameters())
    if opened.kind in (HF, MEGATRON):
        converted = huggingface.folded(opened, dtype)
    elif form == HF:
        converted = module_of(opened.kind).to_huggingface(opened, dtype)
    else:
        converted = module_of(opened.kind).folded(opened, dtype)
    check_finite(converted.model.named_parameters())
    return converted


@contextmanager
def finished(out: Path) -> Iterator[Path]:
    """Yield a hidden folder beside ``out``; rename the folder to ``out`` at the end, or remove it after an error.

    :raises LNSConfigError: ``out`` exists.
    """
    if out.exists():
        raise LNSConfigError(f"{out} exists, and nothing is overwritten. Give a new folder.")
    part = out.with_name(f".{out.name}.{secrets.token_hex(4)}")
    part.mkdir(parents=True)
    try:
        yield part
        part.rename(out)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def write_tokenizer(out: Path, opened: Opened, requested: str | None) -> str:
    """Save the tokenizer of a checkpoint, or the requested one, with transformers.

    :param requested: a ``tokenizer.json``, a folder, a name on the hub, or ``none``.
    :returns: a line about the written tokenizer.
    :raises LNSConfigError: a tokenizer that cannot be loaded, or that has more tokens than the model.
    """
    name = requested or opened.tokenizer
    if name in (None, "none"):
        return "no tokenizer: give --tokenizer to include one"
    try:
        tokenizer = load_tokenizer(name, opened.folder, opened.eos_token_id)
    except LNSError as error:
        raise LNSConfigError(f"{error}; or leave it out: --tokenizer none") from None
    size, rows = max(tokenizer.get_vocab().values(), default=-1) + 1, huggingface.vocabulary(opened.model)
    if size > rows:
        raise LNSConfigError(
            f"tokenizer {name} has {size} tokens, the model has {rows}: it belongs to another model. Give "
            "--tokenizer FILE, or --tokenizer none to leave it out."
        )
    if tokenizer.pad_token is None and opened.pad_token_id in range(size):
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(opened.pad_token_id)
    tokenizer.model_max_length = opened.max_length
    tokenizer.save_pretrained(out)
    return f"tokenizer {name}: {size} tokens; the checkpoint's end of text is {tokenizer.eos_token!r}"
