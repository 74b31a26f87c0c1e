"""Open a checkpoint for the diagnostics: on a device, with its blocks."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from olmo_lns.diagnostics.structure import find_blocks
from olmo_lns.errors import LNSError
from olmo_lns.export import OLMO
from olmo_lns.export.open import Opened, open_checkpoint
from olmo_lns.norm.dtypes import DTYPES


@dataclass
class LoadedModel(Opened):
    """An opened model on its device. :param blocks: its transformer blocks in order."""

    blocks: list[nn.Module] = field(default_factory=list)

    @property
    def embedding(self) -> nn.Embedding:
        """The token embedding; ids go to its device."""
        return next(module for module in self.model.modules() if isinstance(module, nn.Embedding))

    @property
    def vocabulary(self) -> int:
        """The number of token ids, without padding rows of the embedding."""
        if isinstance(size := getattr(getattr(self.model, "config", None), "vocab_size", None), int):
            return size
        return max(each.num_embeddings for each in self.model.modules() if isinstance(each, nn.Embedding))

    @property
    def dtype(self) -> str:
        """The dtype of the weights, e.g. ``float32``."""
        return str(next(self.model.parameters()).dtype).removeprefix("torch.")


def load_model(
    source: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    blocks: str | None = None,
    scheme: str | None = None,
) -> LoadedModel:
    """Load ``source``, a checkpoint folder or a name of the Hugging Face hub, for analysis.

    :param dtype: ``fp32``, ``bf16``, ``fp16``, or ``auto``: as saved, OLMo's in fp32.
    :param device: ``auto`` selects CUDA if there is some, else the CPU.
    :param blocks: dotted path of the block list. :param scheme: scheme of a checkpoint without one in its config.
    :raises LNSError: a folder without a checkpoint, a model that cannot be loaded, or blocks that are not found.
    """
    opened = open_checkpoint(source, scheme)
    opened.model.to(dtype=DTYPES.get(dtype) or (torch.float32 if opened.kind == OLMO else None))
    try:
        opened.model.to("cuda" if device == "auto" and torch.cuda.is_available() else device.replace("auto", "cpu"))
    except (RuntimeError, AssertionError) as error:  # such as a torch without this device
        raise LNSError(f"--device {device}: {str(error).splitlines()[0]}") from None
    return LoadedModel(**vars(opened), blocks=find_blocks(opened.model, blocks))
