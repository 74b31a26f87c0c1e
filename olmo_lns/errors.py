"""Errors of this package. A message has three parts: what happened, what was expected, what to do next."""

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
    """Base class of all errors that olmo_lns raises for a user. A command prints the message in one line."""


class LNSConfigError(LNSError, ValueError):
    """Error for a setting or an input that cannot be used."""


class UpstreamChangedError(LNSError, ImportError):
    """Error for a framework or Transformer Engine without a function that a scheme needs."""


class MeasurementError(LNSError):
    """Error for a built model that does not compute its scheme."""


class CheckpointMismatchError(LNSError):
    """Error for a checkpoint whose scheme is not that of the run."""


class BackendUnavailableError(LNSError, RuntimeError):
    """Error for a norm backend that was selected by name, but cannot run on this machine."""


def did_you_mean(name: str, known: Iterable[str], *, spell: Callable[[str], str] = str) -> str:
    """Return a suggestion of the most similar name, ``" (did you mean 'lns'?)"``, or ``""`` if none is similar.

    Upper and lower case are treated as equal.

    :param known: the valid names.
    :param spell: returns the text that is suggested for a valid name.
    """
    names = {str(candidate).lower(): str(candidate) for candidate in known}
    near = difflib.get_close_matches(name.lower(), names, n=1)
    return f" (did you mean {spell(names[near[0]])!r}?)" if near else ""


def one_line(error: BaseException | str) -> str:
    """Return the first line of an upstream error, up to 200 characters, or the name of its class if it has no text."""
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__
