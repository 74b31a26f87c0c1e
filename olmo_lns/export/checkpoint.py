"""The opened checkpoint that the modules of all formats return, and helpers with which they load it."""

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
class OpenCheckpoint:
    """A model that was opened from a checkpoint, in evaluation mode.

    :param model: a model of the framework's class. For Megatron it is a Llama of transformers.
    :param format: name of the format of the checkpoint.
    :param scheme: scheme of the model, which is Pre-LN for a stock model.
    :param folder: folder of the checkpoint.
    :param config: settings in the saved config, as plain values.
    :param tokenizer: name or path of the tokenizer that the checkpoint names, or None.
    :param max_length: maximum sequence length in tokens.
    :param token_dtype: dtype of the token ids in the run's data files.
    :param eos_token_id: id of the end-of-text token, or None if it is unknown.
    :param pad_token_id: id of the padding token, or None if it is unknown.
    :param dtype: dtype of the checkpoint's weights if the model has a wider one, or else None.
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
    dtype: torch.dtype | None = None


@contextmanager
def reporting_load_errors(source: object) -> Iterator[None]:
    """Turn any exception in the context into an error of one line, since a damaged file may cause almost any.

    :param source: name of the checkpoint, for the message.
    :raises LNSConfigError: if an exception is raised in the context.
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

    :raises LNSConfigError: if tensors are missing, unexpected or of another shape. The message names them.
    """
    with reporting_load_errors(source):
        model.load_state_dict(dict(state), assign=True)
