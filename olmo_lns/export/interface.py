"""The interface of a checkpoint format.

:class:`Format` says what an export needs of a format. Each format has a module with a subclass, whose instance is
called ``FORMAT``. The table of all formats is :data:`olmo_lns.export.formats.FORMATS`.

``olmo-lns export`` first asks :meth:`Format.recognizes` of every format. If the output has the format of the
checkpoint, it then calls :meth:`Format.fold_tensors`, which only Megatron's format overrides. If that returns None, or
if the output has another format, the export builds the model with these calls:

.. code-block:: python

    opened = source.open(folder, scheme)
    source.require_transformers(opened)  # for an output in transformers' format only
    stock = source.folded(opened, dtype)
    stock = source.to_transformers(stock)  # for an output in transformers' format only
    FORMATS[output_format].save(stock, out)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

import torch

from olmo_lns.export.checkpoint import OpenCheckpoint
from olmo_lns.schemes import Scheme


class Format(ABC):
    """A format in which a framework saves checkpoints.

    Example: ``stock = FORMAT.folded(FORMAT.open(folder))``, then ``FORMAT.save(stock, out)``.
    """

    #: Name of the format, as on the command line.
    name: str
    #: Names of the formats to which a checkpoint of this format can be exported. The first is the default.
    outputs: tuple[str, ...]
    #: The files of a complete checkpoint, for the error that is raised when no format recognizes a folder.
    files: str

    @abstractmethod
    def recognizes(self, folder: Path) -> bool:
        """Return true if a folder has the files of a checkpoint of this format."""

    @abstractmethod
    def open(self, folder: Path, scheme: Scheme | None = None) -> OpenCheckpoint:
        """Open a checkpoint on the CPU, under the scheme with which it was trained.

        :param scheme: scheme of a checkpoint whose config names none.
        :raises LNSConfigError: if the checkpoint is damaged, or its framework refuses it.
        """

    def fold_tensors(self, folder: Path, out: Path, scheme: Scheme | None = None) -> str | None:
        """Fold a checkpoint into the empty folder ``out`` without building its model.

        :returns: a line for the user, or None for a format whose model has to be built.
        :raises LNSConfigError: if the checkpoint cannot be folded.
        """
        return None

    @abstractmethod
    def folded(self, opened: OpenCheckpoint, dtype: torch.dtype | None = None) -> OpenCheckpoint:
        """Fold the factors of an opened model in place, and return it as a stock model of its framework.

        :param dtype: dtype of the weights; None keeps their dtypes.
        :raises LNSConfigError: if the scheme cannot be folded.
        """

    def require_transformers(self, opened: OpenCheckpoint) -> None:
        """Check that a stock class of transformers can represent an opened model.

        An export calls this method before it folds the model. :meth:`to_transformers` compares the logits of the
        converted model with those of the original later, on a few random tokens. This method has to refuse only what
        these tokens may not reveal, such as a sliding window of 4,096 tokens.

        :raises LNSConfigError: if no stock class can. The message lists the reasons.
        """
        return

    def to_transformers(self, stock: OpenCheckpoint) -> OpenCheckpoint:
        """Convert a folded model to a stock model of transformers that computes the same.

        :raises LNSConfigError: if the weights do not fit that model, or its logits differ.
        """
        return stock

    def save(self, stock: OpenCheckpoint, out: Path) -> None:
        """Write a folded model as its framework does.

        A format that has :meth:`fold_tensors` instead does not override this method.
        """
        raise NotImplementedError(f"The format {self.name} has no model to save. fold_tensors() writes it.")
