"""Errors of this package. Each message says what was found, what was expected and what to do."""

from __future__ import annotations

__all__ = [
    "BackendUnavailableError",
    "CheckpointMismatchError",
    "LNSConfigError",
    "LNSError",
    "UpstreamChangedError",
]


class LNSError(Exception):
    """Base of every error raised by olmo_lns on purpose; the CLI prints it as one line."""


class LNSConfigError(LNSError, ValueError):
    """A setting or an input that LayerNorm Scaling cannot honour."""


class UpstreamChangedError(LNSError, ImportError):
    """OLMo, Megatron or Transformer Engine is not a version that was verified."""


class CheckpointMismatchError(LNSError):
    """A checkpoint and the running configuration disagree about LayerNorm Scaling."""


class BackendUnavailableError(LNSError, RuntimeError):
    """A norm backend was asked for by name and cannot run here."""
