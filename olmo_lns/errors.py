"""Errors of this package. Each message names the finding, the expectation and the remedy."""

from __future__ import annotations

import difflib
from typing import Callable, Iterable

__all__ = [
    "BackendUnavailableError",
    "CheckpointMismatchError",
    "LNSConfigError",
    "LNSError",
    "MeasurementError",
    "UpstreamChangedError",
    "did_you_mean",
    "one_line",
]


class LNSError(Exception):
    """Base of every error raised by olmo_lns on purpose; the CLI prints it as one line."""


class LNSConfigError(LNSError, ValueError):
    """A setting or an input that a scheme cannot honour."""


class UpstreamChangedError(LNSError, ImportError):
    """A framework or Transformer Engine lacks a function that a scheme needs."""


class MeasurementError(LNSError):
    """A built model does not compute its scheme."""


class CheckpointMismatchError(LNSError):
    """A checkpoint and the running configuration disagree about the scheme."""


class BackendUnavailableError(LNSError, RuntimeError):
    """A norm backend that was selected by name cannot run here."""


def did_you_mean(name: str, known: Iterable[str], *, spell: Callable[[str], str] = str) -> str:
    """Return ``" (did you mean 'lns'?)"`` for a name near a known one, in any case; else ``""``.

    :param spell: known name -> the text for it.
    """
    names = {str(candidate).lower(): str(candidate) for candidate in known}
    near = difflib.get_close_matches(name.lower(), names, n=1)
    return f" (did you mean {spell(names[near[0]])!r}?)" if near else ""


def one_line(error: BaseException | str) -> str:
    """Return the first line of an upstream error, at most 200 characters; its class if the error has no text."""
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__
