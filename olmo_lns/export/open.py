"""Open a checkpoint in its framework, under the scheme that it was trained with."""

from __future__ import annotations

import importlib
import re
import textwrap
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Iterator, Mapping

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from olmo_lns.errors import LNSConfigError, LNSError
from olmo_lns.export import HF, MEGATRON, OLMO, OLMO_CORE
from olmo_lns.schemes import Scheme, parse

#: ``owner/name`` of a model on the Hugging Face hub.
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass
class Opened:
    """A model in evaluation mode, with its format, scheme, config and tokenizer.

    :param model: model of the framework's class; for Megatron, a transformers Llama.
    :param format: one of :data:`olmo_lns.export.FORMATS`. :param scheme: Pre-LN for a stock model.
    :param config: settings in the saved config, as plain values.
    :param tokenizer: name or path in the checkpoint. :param max_length: maximum sequence length in tokens.
    :param eos_token_id: end-of-text id, None if unknown. :param pad_token_id: padding id, None if unknown.
    """

    model: nn.Module
    format: str
    scheme: Scheme
    folder: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: str | None = None
    max_length: int = 2048
    token_dtype: str = "uint16"
    eos_token_id: int | None = None
    pad_token_id: int | None = None


def format_of(source: str | Path) -> str:
    """Return the format of a checkpoint: that of its folder; transformers' for ``owner/name`` on the hub.

    A path that does not exist is a name on the hub only if it cannot be a mistyped path: it has two parts, and no
    folder has the name of the first one.

    :raises LNSConfigError: the folder does not exist, is an adapter, or has no complete checkpoint.
    """

    folder = Path(source)

    def has(*names: str) -> bool:
        return any((folder / name).exists() for name in names)

    if _HUB_NAME.fullmatch(str(source)) and not folder.parent.exists():
        return HF
    if not folder.is_dir():
        found = f"{folder} is a file" if folder.exists() else f"There is no such folder: {folder}"
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


def format_module(name: str) -> Any:
    """Return the module of a format."""
    return importlib.import_module(f"olmo_lns.export.{'huggingface' if name == HF else name.replace('-', '_')}")


def open_checkpoint(folder: str | Path, scheme: str | Scheme | None = None) -> Opened:
    """Open ``folder`` on the CPU in its saved dtype.

    :param folder: a checkpoint folder, or ``owner/name`` on the Hugging Face hub.
    :param scheme: scheme of a checkpoint whose config names none, such as ``"lns"``.
    :raises LNSConfigError: the checkpoint is damaged or incomplete, or its config names another scheme.

    Example: ``open_checkpoint("runs/lns/step1000-unsharded").model``.
    """
    requested = parse(scheme) if isinstance(scheme, str) else scheme
    opened: Opened = format_module(format_of(folder)).open_folder(Path(folder), requested)
    opened.model.eval()
    if requested is not None and opened.scheme != requested:
        raise LNSConfigError(f"{folder} says scheme {opened.scheme}, --scheme says {requested}. Leave --scheme out.")
    return opened


def open_model(
    folder: str | Path,
    *,
    scheme: str | Scheme | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """Return the model of a checkpoint folder, in evaluation mode, under the scheme that it was trained with.

    :param folder: checkpoint of OLMo, OLMo-core, Megatron (opened as a Llama) or transformers.
    :param scheme: scheme of a checkpoint whose config names none. :param dtype: None keeps the saved dtype.
    :raises LNSConfigError: as :func:`open_checkpoint`.

    Example: ``open_model("LNS_1B", scheme="lns", dtype=torch.float32)``.
    """
    return open_checkpoint(folder, scheme).model.to(device=device, dtype=dtype).eval()


@contextmanager
def reporting_load_errors(source: object) -> Iterator[None]:
    """Report any error of a framework as one line; a damaged file can cause almost any exception.

    :raises LNSConfigError: any exception in the context; the message names ``source``.
    """
    try:
        yield
    except LNSError:
        raise
    except (Exception, CheckpointException) as error:
        failures = getattr(error, "failures", None)  # rank -> its exception and traceback
        text = str(failures[min(failures)][0] if failures else error).strip() or type(error).__name__
        raise LNSConfigError(f"{source} cannot be loaded: {textwrap.shorten(text, 300)}") from None


def load_state(model: nn.Module, state: Mapping[str, torch.Tensor], source: object) -> None:
    """Load the tensors of ``state`` into ``model`` without a copy.

    :raises LNSConfigError: tensors that are missing, unexpected or of another shape; the message names them.
    """
    with reporting_load_errors(source):
        model.load_state_dict(dict(state), assign=True)
