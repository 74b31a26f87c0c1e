"""A stock Llama whose block norms are multiplied by a hook: the reference that folding is held to."""

from __future__ import annotations

from typing import Any, Mapping

from olmo_lns.export import huggingface
from olmo_lns.export.architecture import Architecture
from olmo_lns.export.fold import LazyTensor
from olmo_lns.record import LNSRecord
from olmo_lns.scale import lns_scale

__all__ = ["hooked_llama"]


def hooked_llama(model: Architecture, weights: Mapping[str, LazyTensor], *, exponent: float) -> Any:
    """The model in fp32 with unfolded weights, the factor applied to the norms' outputs.

    :param weights: OLMo's or transformers' names.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if "transformer.wte.weight" in weights:
        weights = huggingface.to_huggingface(model, weights)
    values = huggingface.transformers_config(model, torch.float32, LNSRecord())
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    network = AutoModelForCausalLM.from_config(config, torch_dtype=torch.float32).eval()
    state = {name: tensor.load().float() for name, tensor in weights.items()}
    if model.weight_tying:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    network.load_state_dict(state, strict=True)
    for index, layer in enumerate(network.model.layers):
        scale = lns_scale(index + 1, exponent=exponent)
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.register_forward_hook(lambda module, inputs, output, scale=scale: output * scale)
    return network
