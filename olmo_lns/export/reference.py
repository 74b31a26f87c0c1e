"""A stock Llama with its scheme in hooks on norms and branches: the reference that folding is held to."""

from __future__ import annotations

import re
from typing import Any, Mapping

from olmo_lns.checkpoints.architecture import Architecture
from olmo_lns.checkpoints.tensors import LazyTensor
from olmo_lns.errors import LNSConfigError
from olmo_lns.export import huggingface
from olmo_lns.schemes import Plan, Scheme

__all__ = ["hooked_llama"]

#: Weights of a scheme that a Pre-LN model has no place for.
_OWN = re.compile(r"_(gate|omega|norm_out)\.(weight|bias)$")


def hooked_llama(model: Architecture, weights: Mapping[str, LazyTensor], *, scheme: Scheme) -> Any:
    """The model in fp32 with unfolded weights, the scheme applied to the outputs of norms and sub-layers.

    :param weights: OLMo's or transformers' names, a scheme's own among the former.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    own = {name: tensor.load().float() for name, tensor in weights.items() if _OWN.search(name)}
    weights = {name: tensor for name, tensor in weights.items() if name not in own}
    if "transformer.wte.weight" in weights:
        weights = huggingface.to_huggingface(model, weights)
    values = huggingface.transformers_config(model)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    network = AutoModelForCausalLM.from_config(config, torch_dtype=torch.float32).eval()
    state = {name: tensor.load().float() for name, tensor in weights.items()}
    if model.weight_tying:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    network.load_state_dict(state, strict=True)
    for index, layer in enumerate(network.model.layers):
        for sub_layer, norm, branch in (
            ("attn", layer.input_layernorm, layer.self_attn),
            ("ff", layer.post_attention_layernorm, layer.mlp),
        ):
            plan = scheme.plan(index + 1, model.n_layers, sub_layer)
            if plan == Plan():
                continue
            if plan != Plan(plan.pre, plan.branch, norm_scale=plan.norm_scale, branch_scale=plan.branch_scale,
                            gate=plan.gate) or not plan.pre:  # fmt: skip
                raise LNSConfigError(f"no stock Llama with hooks computes {scheme.definition.title} ({scheme})")
            prefix = f"transformer.blocks.{index}.{sub_layer}_"
            parts = {name.removeprefix(prefix): value for name, value in own.items() if name.startswith(prefix)}
            norm.register_forward_hook(lambda module, inputs, output, scale=plan.norm_scale: output * scale)
            branch.register_forward_hook(_branch_hook(plan, parts, model))
    return network


def _branch_hook(plan: Plan, parts: Mapping[str, Any], model: Architecture) -> Any:
    """``gate * branch_scale * Norm(output)``, the norm written out."""

    def branch(h: Any) -> Any:
        if plan.branch:
            if model.base_norm == "default":
                h = h - h.mean(-1, keepdim=True)
            h = h / (h.pow(2).mean(-1, keepdim=True) + model.layer_norm_eps).sqrt()
            h = h * parts["norm_out.weight"] + parts.get("norm_out.bias", 0)
        return h * plan.branch_scale * parts.get("gate.weight", 1)

    def hook(module: Any, inputs: Any, output: Any) -> Any:
        return (branch(output[0]), *output[1:]) if isinstance(output, tuple) else branch(output)

    return hook
