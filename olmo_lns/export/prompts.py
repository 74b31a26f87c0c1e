"""Random inputs for a model, and its logits for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def vocabulary(model: nn.Module) -> int:
    """Return the number of rows of the embedding, including padding."""
    return next(module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding))


def token_count(model: nn.Module) -> int:
    """Return the number of valid token ids.

    It is the vocabulary size in the config, or the number of rows of the embedding if the config has none.
    """
    config: Any = getattr(model, "config", None)
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    size = getattr(text_config, "vocab_size", None)
    return size if isinstance(size, int) else vocabulary(model)


def prompt(model: nn.Module, count: int = 1, length: int = 12) -> torch.Tensor:
    """Return a random input for a model.

    :returns: token ids, int64 of shape (count, length), or images, fp32 of shape (count, channels, height, width).
    """
    generator = torch.Generator().manual_seed(0)
    if getattr(model, "main_input_name", "") == "pixel_values":
        from olmo_lns.integrations.transformers.scaling import image_shape

        return torch.randn(image_shape(model.config, count), generator=generator)
    return torch.randint(min(token_count(model), vocabulary(model)), (count, length), generator=generator)


@torch.no_grad()
def logits(model: Any, inputs: torch.Tensor) -> torch.Tensor:
    """Run a model and return its logits, fp32 of shape (count, length, vocabulary).

    :param inputs: an input from :func:`prompt`. Images are converted to the dtype of the model's first parameter.
    """
    output = model(inputs.to(next(model.parameters()).dtype) if inputs.is_floating_point() else inputs)
    result: torch.Tensor = getattr(output, "logits", output).float()
    return result
