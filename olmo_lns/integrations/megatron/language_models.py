"""The language models of Megatron Core that this integration extends, by name. Megatron is not imported."""

from __future__ import annotations

#: Module of Megatron Core -> its class whose constructor builds a language model.
LANGUAGE_MODELS = {
    "megatron.core.models.gpt.gpt_model": "GPTModel",
    "megatron.core.models.hybrid.hybrid_model": "HybridModel",
    "megatron.core.models.mamba.mamba_model": "MambaModel",
    "megatron.core.models.bert.bert_model": "BertModel",
    "megatron.core.models.T5.t5_model": "T5Model",
}
