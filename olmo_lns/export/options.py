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

__all__ = [
    "FORMATS",
    "HF",
    "MEGATRON",
    "OLMO",
    "OLMO_CORE",
    "OLMO_UNSHARDED",
    "Options",
    "Source",
    "Target",
]

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


class Source:
    """A kind of checkpoint, as :data:`olmo_lns.export.sources.SOURCES` lists them.

    Each method raises :class:`LNSConfigError` for a checkpoint that it cannot do this with.
    """

    name: str
    #: As a message calls it: "an OLMo checkpoint".
    kind: str
    #: What it can be written as; the first is its own.
    formats: tuple[str, ...]

    def recognises(self, folder: Path) -> bool:
        """Whether ``folder`` holds such a checkpoint."""
        raise NotImplementedError

    def fold(self, folder: Path, options: Options) -> Target:
        """The checkpoint with its factors inside the weights."""
        raise NotImplementedError

    def unfold(self, folder: Path, options: Options) -> Target:
        """A folded checkpoint with its factors outside again."""
        raise LNSConfigError(f"--unfold reads OLMo, OLMo-core and Megatron checkpoints, not --source {self.name}")

    def train(self, folder: Path, options: Options) -> Target:
        """The checkpoint as a model folder of ours for transformers, to train on."""
        raise LNSConfigError(f"hf import reads OLMo, OLMo-core and Megatron checkpoints, not {self.kind}")

    def model(self, folder: Path, exported: Record | None = None) -> Any:
        """The model with its factors, in fp32: a module that gives logits.

        :param exported: what its export says of it, for a checkpoint that says nothing itself.
        """
        raise NotImplementedError
