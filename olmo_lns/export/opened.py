"""What the module of a format returns for a folder, and how it loads."""

from __future__ import annotations

import textwrap
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Iterator, Mapping

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from olmo_lns.errors import LNSConfigError, LNSError
from olmo_lns.schemes import Scheme


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
