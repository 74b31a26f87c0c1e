"""Norms of transformers with known arithmetic: the factor is folded into gain and bias.

Each is measured against transformers' own forward when it is installed; the outputs of other norms are multiplied.
"""

from __future__ import annotations

from typing import Any

import torch

from olmo_lns.norm import layer_norm, rms_norm
from olmo_lns.scaled import Scaled


class FoldedLlamaRMSNorm(Scaled):
    """RMSNorm with a gain, as in Llama, Qwen and Mistral."""

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        eps = self.variance_epsilon
        return rms_norm(hidden_states, self.weight, eps, self.lns_factor, backend=self.lns_backend)


class FoldedTorchLayerNorm(Scaled):
    """torch's LayerNorm over the last dimension."""

    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        return layer_norm(input, self.weight, self.bias, self.eps, self.lns_factor, backend=self.lns_backend)


_KNOWN = {
    "torch.nn.modules.normalization.LayerNorm": FoldedTorchLayerNorm,
    "transformers.models.llama.modeling_llama.LlamaRMSNorm": FoldedLlamaRMSNorm,
    "transformers.models.qwen2.modeling_qwen2.Qwen2RMSNorm": FoldedLlamaRMSNorm,
    "transformers.models.qwen3.modeling_qwen3.Qwen3RMSNorm": FoldedLlamaRMSNorm,
    "transformers.models.mistral.modeling_mistral.MistralRMSNorm": FoldedLlamaRMSNorm,
}


def folded(norm: Any) -> type | None:
    """Return the mixin for a norm of known class, or None."""
    norm_class = type(norm)
    return _KNOWN.get(f"{norm_class.__module__}.{norm_class.__qualname__}")
