"""Open a checkpoint with its framework, under the scheme with which it was trained."""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

from olmo_lns.errors import LNSConfigError
from olmo_lns.export import HF, MEGATRON, OLMO, OLMO_CORE
from olmo_lns.export.opened import Opened
from olmo_lns.schemes import Scheme, parse

#: ``owner/name`` of a model on the Hugging Face hub.
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def format_of(source: str | Path) -> str:
    """Return the format of a checkpoint.

    The format is recognized by the files in its folder. ``owner/name`` on the Hugging Face hub is transformers' format.
    A path that does not exist is taken for such a name only if it cannot be a mistyped path. This means that it has two
    parts, and that there is no folder, file or link with the name of the first part.

    :raises LNSConfigError: if the folder does not exist, is an adapter, or has no complete checkpoint.
    """

    folder = Path(source)

    def has(*names: str) -> bool:
        return any((folder / name).exists() for name in names)

    if _HUB_NAME.fullmatch(str(source)) and not os.path.lexists(folder.parent):  # a dangling link is a path, too
        return HF
    if not folder.is_dir():
        found = f"{folder} is a file" if folder.exists() else f"There is no such folder: {folder}"
        if folder.is_symlink() and not folder.exists():
            found = f"{folder} is a link to {os.readlink(folder)}, which does not exist"
        raise LNSConfigError(f"{found}. Give a checkpoint folder, or owner/name for a model on the Hugging Face hub.")
    if has("adapter_config.json"):
        raise LNSConfigError(f"{folder} is an adapter. Merge it first (merge_and_unload()) and save that model.")
    if has("config.yaml") and has("model.pt", "model_and_optim"):
        return OLMO
    if has("config.json"):
        return OLMO_CORE if has("model_and_optim", ".metadata") else HF
    if has("latest_checkpointed_iteration.txt", ".metadata") or any(folder.glob("iter_*")):
        return MEGATRON
    raise LNSConfigError(
        f"{folder} holds no complete checkpoint. Expected config.yaml with model.pt or model_and_optim/ (OLMo: a step* "
        "folder of the run; unshard others with its scripts/unshard.py), config.json (transformers; OLMo-core, with "
        "model_and_optim/) or an iter_* folder (Megatron)."
    )


def format_module(name: str) -> ModuleType:
    """Return the module for a format, which is one of :data:`olmo_lns.export.FORMATS`."""
    from olmo_lns.export import huggingface, megatron, olmo, olmo_core

    return {HF: huggingface, MEGATRON: megatron, OLMO: olmo, OLMO_CORE: olmo_core}[name]


def open_checkpoint(folder: str | Path, scheme: str | Scheme | None = None) -> Opened:
    """Open a checkpoint on the CPU, in the dtype in which it was saved.

    :param folder: a checkpoint folder, or ``owner/name`` on the Hugging Face hub.
    :param scheme: scheme of a checkpoint whose config names none, such as ``"lns"``.
    :raises LNSConfigError: if the checkpoint is damaged or incomplete, or its config names another scheme.

    Example: ``open_checkpoint("runs/lns/step1000-unsharded").model``.
    """
    requested = parse(scheme) if isinstance(scheme, str) else scheme
    opened: Opened = format_module(format_of(folder)).open_folder(Path(folder), requested)
    opened.model.eval()
    if requested is not None and opened.scheme != requested:
        raise LNSConfigError(
            f"{folder} says scheme {opened.scheme}, but --scheme says {requested}. The checkpoint decides. "
            "Leave --scheme out."
        )
    return opened


def open_model(
    folder: str | Path,
    *,
    scheme: str | Scheme | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """Return the model of a checkpoint in evaluation mode, under the scheme with which it was trained.

    :param folder: a checkpoint of OLMo, OLMo-core, Megatron (which is opened as a Llama) or transformers.
    :param scheme: scheme of a checkpoint whose config names none.
    :param device: device of the model.
    :param dtype: dtype of the model; None keeps the dtype in which it was saved.
    :raises LNSConfigError: as in :func:`open_checkpoint`.

    Example: ``open_model("LNS_1B", scheme="lns", dtype=torch.float32)``.
    """
    return open_checkpoint(folder, scheme).model.to(device=device, dtype=dtype).eval()
