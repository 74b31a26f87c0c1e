"""The mark in a trainer's state (:mod:`olmo_lns.integrations.olmo.state`), put in or taken out of a saved one."""

from __future__ import annotations

import pickle
import re
from pathlib import Path, PosixPath
from typing import Any

import numpy
import torch

from olmo_lns.errors import LNSConfigError, one_line
from olmo_lns.integrations.olmo.state import KEY, Mark, allow_in_safe_loading
from olmo_lns.record import Record

__all__ = ["mark"]


def mark(path: Path, record: Record) -> None:
    """Make the trainer's state in ``path`` carry the mark when ``record`` needs this package, and no mark otherwise.

    The state is loaded safely and saved again; the file is not touched where it is so already.

    :raises LNSConfigError: not a dict in a file of ``torch.save``, or one with objects of other types than OLMo's.
    """
    # What OLMo's Trainer keeps beside tensors; _reconstruct is numpy's, wherever it lives.
    rebuild = numpy.zeros(0).__reduce__()[0]
    known: list[Any] = [PosixPath, numpy.ndarray, numpy.dtype, type(numpy.dtype("uint32")), rebuild]
    allow_in_safe_loading()
    try:
        with torch.serialization.safe_globals(known):
            state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if found := re.search(r"GLOBAL ([\w.]+)", str(error)):
            raise LNSConfigError(
                f"{path} holds {found[1]}, which is not loaded from a file: move the trainer's state away and export "
                "again; the run then starts with --reset_trainer_state"
            ) from None
        raise LNSConfigError(f"{path} is truncated or not a file of torch.save: {one_line(error)}") from None
    except (RuntimeError, ValueError, KeyError, EOFError) as error:
        raise LNSConfigError(f"{path} is truncated or not a file of torch.save: {one_line(error)}") from None
    if not isinstance(state, dict):
        raise LNSConfigError(f"{path} holds a {type(state).__name__}: expected the dict of a trainer's state")
    present = state.pop(KEY, None)
    if (present is not None) == record.active and (present is None or present.values == record.as_dict()):
        return
    torch.save({**state, KEY: Mark(str(record), record.as_dict())} if record.active else state, path)
