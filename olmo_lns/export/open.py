"""Open a checkpoint with its framework, under the scheme with which it was trained."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from olmo_lns.errors import LNSConfigError
from olmo_lns.export.checkpoint import OpenCheckpoint
from olmo_lns.export.formats import format_of
from olmo_lns.schemes import Scheme, parse


def open_checkpoint(folder: str | Path, scheme: str | Scheme | None = None) -> OpenCheckpoint:
    """Open a checkpoint on the CPU, in the dtype in which it was saved.

    :param folder: a checkpoint folder, or ``owner/name`` on the Hugging Face hub.
    :param scheme: scheme of a checkpoint whose config names none, such as ``"lns"``.
    :raises LNSConfigError: if the checkpoint is damaged or incomplete, or its config names another scheme.

    Example: ``open_checkpoint("runs/lns/step1000-unsharded").model``.
    """
    requested = parse(scheme) if isinstance(scheme, str) else scheme
    opened: OpenCheckpoint = format_of(folder).open(Path(folder), requested)
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
    :param dtype: dtype of the model. None keeps the dtype in which it was saved.
    :raises LNSConfigError: as in :func:`open_checkpoint`.

    Example: ``open_model("LNS_1B", scheme="lns", dtype=torch.float32)``.
    """
    return open_checkpoint(folder, scheme).model.to(device=device, dtype=dtype).eval()
