"""A checkpoint opened for the diagnostics: the model, its blocks, and what its config says of data and tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from olmo_lns.errors import LNSError
from olmo_lns.export import HF, OLMO, OLMO_CORE
from olmo_lns.export.open import kind_of, open_checkpoint
from olmo_lns.models.structure import find_blocks, is_masked_lm, vocabulary_size
from olmo_lns.norm.dtypes import DTYPES
from olmo_lns.schemes import Scheme
from olmo_lns.tokenizers import load_tokenizer

__all__ = ["LoadedModel", "load_model", "load_tokenizer", "pick_device"]


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode with what the diagnostics ask of it.

    :param kind: ``olmo``, ``olmo-core`` or ``huggingface`` (Megatron's run as a Llama).
    :param scheme: that it was trained with. :param device: where token ids go.
    :param max_length: longest sequence it was made for.
    :param token_dtype: of its raw training data files. :param tokenizer_name: file or name, None when unknown.
    :param eos_token_id: its document end, for tokenizer files that do not say which token that is.
    """

    model: nn.Module
    blocks: list[nn.Module]
    kind: str
    scheme: Scheme
    device: torch.device
    vocabulary: int
    max_length: int
    tokenizer_name: str | None
    token_dtype: str = "uint16"
    eos_token_id: int | None = None

    @property
    def dtype(self) -> str:
        """Of the weights, e.g. ``float32``."""
        return str(next(self.model.parameters()).dtype).removeprefix("torch.")

    @property
    def masked_lm(self) -> bool:
        return is_masked_lm(getattr(getattr(self.model, "config", None), "model_type", None))


def pick_device(name: str) -> torch.device:
    """``auto`` takes CUDA, else MPS, else the CPU."""
    if name != "auto":
        try:
            device = torch.device(name)
        except RuntimeError:
            raise LNSError(f"--device: found {name!r}, expected auto, cpu, cuda, cuda:<n> or mps") from None
        found = {"cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
        if (device.index or 0) >= found.get(device.type, 1):
            raise LNSError(f"--device {name}: found {found[device.type]} {device.type} devices here; use --device cpu")
        return device
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def load_model(
    source: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    device_map: str | None = None,
    blocks: str | None = None,
    scheme: str | None = None,
) -> LoadedModel:
    """Load ``source``, a checkpoint folder or a name of the Hugging Face hub, for analysis.

    :param dtype: ``fp32``, ``bf16``, ``fp16``, or ``auto``: as saved, OLMo's in fp32.
    :param device_map: passed to transformers, which then places the weights (needs accelerate).
    :param blocks: dotted path of the block list. :param scheme: of a checkpoint that doesn't say it.
    :raises LNSError: a folder that holds no checkpoint, a model that cannot be loaded, or blocks not found.
    """
    folder, place = Path(source), pick_device(device)
    kind = kind_of(folder)
    if device_map is not None and kind != HF:
        raise LNSError(f"{source} is of kind {kind}: --device-map is for transformers models, use --device.")
    opened = open_checkpoint(source, scheme, device_map=device_map)
    wanted = DTYPES.get(dtype) or (torch.float32 if kind == OLMO else None)
    model = opened.model.to(dtype=wanted)
    if device_map is None:
        model = model.to(place)
    return LoadedModel(
        model=model,
        blocks=find_blocks(model, blocks),
        kind=opened.kind if opened.kind in (OLMO, OLMO_CORE) else "huggingface",
        scheme=opened.scheme,
        device=next(m for m in model.modules() if isinstance(m, nn.Embedding)).weight.device,
        vocabulary=vocabulary_size(model),
        max_length=opened.max_length,
        tokenizer_name=opened.tokenizer,
        token_dtype=opened.token_dtype,
        eos_token_id=opened.eos_token_id,
    )
