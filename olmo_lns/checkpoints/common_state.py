"""The common state of a Megatron checkpoint: the saved arguments, loaded without running anything.

Up to Megatron Core 0.18 it is the file ``common.pt``; from 0.19 an object in the distributed checkpoint, a list of
one. (0.19 still reads ``common.pt``, and then nothing else.)
"""

from __future__ import annotations

import argparse
import enum
import importlib
import io
import pathlib
import signal
import types
from pathlib import Path
from typing import Any

import torch

from olmo_lns.checkpoints.archive import check_archive, loading
from olmo_lns.errors import LNSConfigError

__all__ = ["COMMON", "COMMON_OBJECT", "common_bytes", "load_common"]

COMMON = "common.pt"
COMMON_OBJECT = "common_state/shard_0_1"
#: Plain value classes that arguments hold.
_SAFE: dict[str, Any] = {
    "argparse.Namespace": argparse.Namespace,
    "types.SimpleNamespace": types.SimpleNamespace,
    "pathlib.PosixPath": pathlib.PosixPath,
    "signal.Signals": signal.Signals,
}


class _Absent:
    """Stands for a value of a Megatron class that is not installed here."""

    def __init__(self, *args: Any) -> None:
        self.value = args

    def __setstate__(self, state: Any) -> None:
        self.value = state


def load_common(path: Path, content: bytes | None = None) -> dict[str, Any]:
    """The common state, through ``weights_only=True``.

    Besides plain values only Megatron's own enumerations are admitted; where Megatron is not
    installed an inert stand-in takes their place, which is enough to read the arguments.

    :param path: ``common.pt``; with ``content``, what messages call it.
    :param content: the object of a distributed checkpoint.
    :raises LNSConfigError: missing, damaged, naming another class, or without arguments.
    """

    def source() -> Any:
        return path if content is None else io.BytesIO(content)

    check_archive(path, None if content is None else source())
    with loading(path):
        names = torch.serialization.get_unsafe_globals_in_checkpoint(source())
    allowed: list[Any] = [(_resolve(name, path), name) for name in names]
    with loading(path), torch.serialization.safe_globals(allowed):
        common = torch.load(source(), map_location="cpu", weights_only=True)
    if content is not None and isinstance(common, list) and len(common) == 1:
        common = common[0]
    if not isinstance(common, dict) or not hasattr(common.get("args"), "num_layers"):
        raise LNSConfigError(
            f"{path} holds no arguments: nobody can tell how this model was built or whether it is LNS"
        )
    return common


def common_bytes(common: dict[str, Any]) -> bytes:
    """The common state as an object of a distributed checkpoint."""
    buffer = io.BytesIO()
    torch.save([common], buffer)
    return buffer.getvalue()


def _resolve(name: str, path: Path) -> Any:
    if name in _SAFE:
        return _SAFE[name]
    module, _, attribute = name.rpartition(".")
    if module.startswith("megatron.core"):
        try:
            found = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError):
            return _Absent
        if isinstance(found, type) and issubclass(found, enum.Enum):
            return found
    raise LNSConfigError(f"{path} names the class {name}, which saved arguments have no need of: it is not loaded")
