"""What an export is asked for, as one value: the command line is read in ``cli`` alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Mapping

import torch

from olmo_lns.checkpoints.tensors import LazyTensor
from olmo_lns.errors import LNSConfigError
from olmo_lns.export.fold import Rounding
from olmo_lns.record import Record

OLMO, OLMO_UNSHARDED, OLMO_CORE, HF, MEGATRON = FORMATS = ("olmo", "olmo-unsharded", "olmo-core", "hf", "megatron")

#: Of a file of weights, where nothing else is asked for: what transformers took for long.
SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True)
class Options:
    """:param output: the folder to create. :param format: one of :data:`FORMATS`.

    :param dtype: of the weights written, None as they are.
    :param exponent: of the factor, only where the checkpoint does not say it.
    :param tokenizer: a file, folder or hub name, or ``none``; None: the checkpoint's own.
    :param max_shard_size: bytes of a file of weights, and of what an export holds of them; None: :data:`SHARD_BYTES`.
    :param drop_optimizer: ``--unfold`` leaves the optimizer's moments out.
    :param rounding: keeps account of what the export changes.
    """

    output: str
    format: str = OLMO
    dtype: torch.dtype | None = None
    exponent: float | None = None
    tokenizer: str | None = None
    max_shard_size: int | None = None
    drop_optimizer: bool = False
    rounding: Rounding = field(default_factory=Rounding)

    @property
    def shard_bytes(self) -> int:
        return self.max_shard_size or SHARD_BYTES

    def require_exponent(self, record: Record, folder: Path) -> None:
        """:raises LNSConfigError: another one than the checkpoint says, which would otherwise be passed over."""
        says = record.scheme.parameters.get("exponent")
        if self.exponent not in (None, says):
            found = "no exponent" if says is None else f"exponent {says:g}"
            raise LNSConfigError(
                f"{folder} is {record}, {found}; --exponent {self.exponent:g} is for what a checkpoint does not say"
            )


@dataclass(frozen=True)
class Target:
    """An export that can be made: what it is made of was read and checked, and nothing is written yet.

    :param write: writes it into an empty folder; returns what is worth telling, one line each.
    :param weights: what is written, each read when its turn comes; by the names that the export's reader gives them.
    :param config: of the model that is written, without its dtype.
    """

    write: Callable[[Path], list[str]]
    weights: Mapping[str, LazyTensor] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
