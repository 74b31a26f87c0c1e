"""The table of formats, and the format of a checkpoint."""

from __future__ import annotations

import os
import re
from pathlib import Path

from olmo_lns.errors import LNSConfigError
from olmo_lns.export import huggingface, megatron, olmo, olmo_core
from olmo_lns.export.interface import Format

#: Name -> format, in the order in which :func:`format_of` tries them. A folder of OLMo-core also looks like one of
#: transformers.
FORMATS: dict[str, Format] = {
    each.name: each for each in (olmo.FORMAT, olmo_core.FORMAT, huggingface.FORMAT, megatron.FORMAT)
}
#: ``owner/name`` of a model on the Hugging Face hub.
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def format_of(source: str | Path) -> Format:
    """Return the format of a checkpoint.

    The format is recognized by the files in its folder. ``source`` may also name a model on the Hugging Face hub, whose
    format is that of transformers. ``a/b`` counts as such a name if there is no folder, file or link called ``a`` here.
    If there is one, ``a/b`` is more likely a mistyped path, and an error is raised.

    :raises LNSConfigError: if the folder does not exist, is an adapter, or has no complete checkpoint.

    Example: ``format_of("runs/lns/step1000").name`` is ``"olmo"``.
    """
    folder = Path(source)
    if _HUB_NAME.fullmatch(str(source)) and not os.path.lexists(folder.parent):  # a dangling link is a path, too
        return huggingface.FORMAT
    if not folder.is_dir():
        found = f"{folder} is a file" if folder.exists() else f"There is no such folder: {folder}"
        if folder.is_symlink() and not folder.exists():
            found = f"{folder} is a link to {os.readlink(folder)}, which does not exist"
        raise LNSConfigError(f"{found}. Pass a checkpoint folder, or owner/name for a model on the Hugging Face hub.")
    if (folder / "adapter_config.json").exists():
        raise LNSConfigError(f"{folder} is an adapter. Merge it first (merge_and_unload()) and save that model.")
    for each in FORMATS.values():
        if each.recognizes(folder):
            return each
    *others, last = (each.files for each in FORMATS.values())
    raise LNSConfigError(f"{folder} has no complete checkpoint. Expected {', '.join(others)} or {last}.")
