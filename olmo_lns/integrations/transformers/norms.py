"""The norms of transformers whose arithmetic is known. Their gain and bias are multiplied by the factor.

Each scaled norm is compared with transformers' own forward. The outputs of all other norms are multiplied.
"""

from __future__ import annotations

from typing import Any

from olmo_lns.norm import NormArithmetic, arithmetic_of_torch

#: RMSNorm with a gain, as in Llama, Qwen and Mistral.
_LLAMA = NormArithmetic(eps="variance_epsilon")
_KNOWN = {
    "transformers.models.llama.modeling_llama.LlamaRMSNorm": _LLAMA,
    "transformers.models.qwen2.modeling_qwen2.Qwen2RMSNorm": _LLAMA,
    "transformers.models.qwen3.modeling_qwen3.Qwen3RMSNorm": _LLAMA,
    "transformers.models.mistral.modeling_mistral.MistralRMSNorm": _LLAMA,
}


def arithmetic_of(norm: Any) -> NormArithmetic | None:
    """Return the arithmetic of a norm of known class, of transformers or of torch, or None."""
    norm_class = type(norm)
    known = _KNOWN.get(f"{norm_class.__module__}.{norm_class.__qualname__}")
    return arithmetic_of_torch(norm) if known is None else known
