"""What a kind of checkpoint can be made into: folded, unfolded, or a transformers folder to train on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from olmo_lns.errors import LNSConfigError
from olmo_lns.export.fold import fold_record
from olmo_lns.export.options import HF, Options, Target
from olmo_lns.export.transformers_folder import Stock, export_target, train_target
from olmo_lns.record import Record

__all__ = ["Source"]


class Source:
    """A kind of checkpoint; :func:`olmo_lns.export.cli.source_of` has the table.

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

    def open(self, folder: Path, exponent: float | None = None) -> Any:
        """The checkpoint, read and compared; its ``record`` says what it was trained with.

        :param exponent: of the factor, for a checkpoint that does not say it.
        """
        raise NotImplementedError

    def stock(self, checkpoint: Any, options: Options, *, trained: bool = False) -> Stock:
        """The model for transformers, folded; ``trained``: as it was trained, its factors outside the weights."""
        raise NotImplementedError

    def folded(self, checkpoint: Any, options: Options) -> Target:
        """The checkpoint in its own format with its factors inside the weights."""
        raise NotImplementedError

    def unfolded(self, checkpoint: Any, options: Options) -> Target:
        """A folded checkpoint in its own format with its factors outside again."""
        raise NotImplementedError

    def model(self, folder: Path, exported: Record | None = None) -> Any:
        """The model with its factors, in fp32: a module that gives logits.

        :param exported: what its export says of it, for a checkpoint that says nothing itself.
        """
        raise NotImplementedError

    def fold(self, folder: Path, options: Options) -> Target:
        """The export in ``options.format``."""
        checkpoint = self.open(folder, options.exponent)
        options.require_exponent(checkpoint.record, folder)
        if options.format == HF:
            return export_target(self.stock(checkpoint, options), fold_record(checkpoint.record), options)
        return self.folded(checkpoint, options)

    def unfold(self, folder: Path, options: Options) -> Target:
        """A checkpoint to train on in the framework that wrote it."""
        if self.formats == (HF,):
            raise LNSConfigError(f"--unfold reads OLMo, OLMo-core and Megatron checkpoints, not --source {self.name}")
        checkpoint = self.open(folder)
        options.require_exponent(checkpoint.record, folder)
        return self.unfolded(checkpoint, options)

    def train(self, folder: Path, options: Options) -> Target:
        """A model folder of ours for transformers, to train on."""
        if self.formats == (HF,):
            raise LNSConfigError(f"hf import reads OLMo, OLMo-core and Megatron checkpoints, not {self.kind}")
        checkpoint = self.open(folder)
        return train_target(self.stock(checkpoint, options, trained=True), checkpoint.record, options)


def nothing_to_fold(record: Record, folder: Path, otherwise: str = "Pre-LN", note: str = "") -> LNSConfigError:
    """:param otherwise: what the checkpoint is where it is not folded."""
    state = "folded already" if record.folded else otherwise
    return LNSConfigError(f"{folder} is {state}: there is nothing to fold{note}")
