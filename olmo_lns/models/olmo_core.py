"""An OLMo-core checkpoint as the model it was trained as."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

from olmo_lns.checkpoints.olmo_core import BUFFER, OLMoCoreCheckpoint
from olmo_lns.errors import LNSConfigError, LNSError

__all__ = ["open_olmo_core"]


def open_olmo_core(folder: Path) -> Any:
    """The model in fp32 on the CPU, built by OLMo-core from the checkpoint's own config.

    :raises LNSConfigError: OLMo-core is not installed, or has another model.
    """
    try:
        from olmo_core.nn.transformer import TransformerConfig
    except ImportError as error:
        raise LNSConfigError(
            f"running {folder} needs OLMo-core ({error}): pip install 'olmo-lns[olmo-core]', in an environment "
            "without OLMo"
        ) from None
    checkpoint = OLMoCoreCheckpoint.open(folder)
    try:
        model = TransformerConfig.from_dict(copy.deepcopy(checkpoint.model)).build(init_device="cpu")
        state = {name: tensor.load().float() for name, tensor in checkpoint.tensors.items()}
        for index in range(len(checkpoint.blocks)):
            # Where OLMo-core keeps the factor in a buffer; those of the checkpoint were compared when it was opened.
            if (name := f"blocks.{index}.{BUFFER}") in dict(model.named_buffers()):
                state[name] = torch.tensor((index + 1) ** -0.5)
        model.load_state_dict(state)
    except LNSError:
        raise
    except Exception as error:  # OLMo-core's and torch's own, of many kinds
        raise LNSConfigError(f"{folder}: OLMo-core cannot build this model: {error}") from error
    return model.float().eval()
