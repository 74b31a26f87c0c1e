"""Runs DeepSpeed's choice of a kernel's container, with policies of every kind. Usage: ``stock_deepspeed.py FOLDER``."""

import sys
from functools import partial
from pathlib import Path

import torch
import transformers
from deepspeed.module_inject import replace_module, replace_policy
from deepspeed.runtime import hybrid_engine
from support import observing

folder = Path(sys.argv[1])
SIZES = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)


def block(kind):
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32)
        return transformers.GPT2LMHeadModel(config).transformer.h[1]
    if kind == "opt":
        config = transformers.OPTConfig(**SIZES, ffn_dim=48, word_embed_proj_dim=32, max_position_embeddings=32)
        return transformers.OPTForCausalLM(config).model.decoder.layers[1]
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).model.layers[1]


POLICIES = {
    "Llama": lambda: replace_policy.LLAMALayerPolicy(block("llama"), inference=True),
    "Llama in training": lambda: replace_policy.LLAMALayerPolicy(block("llama"), inference=False),
    "GPT-2": lambda: replace_policy.HFGPT2LayerPolicy(block("gpt2"), inference=True),
    "OPT": lambda: replace_policy.HFOPTLayerPolicy(block("opt"), inference=True),
    "another policy": lambda: replace_policy.HFGPT2LayerPolicy(torch.nn.Linear(3, 3), inference=True),
    "no policy": lambda: None,
    "a text": lambda: "llama",
}
FUNCTIONS = {
    "replacement": replace_module.policy_to_ds_container,
    "hybrid engine": hybrid_engine.policy_to_ds_container,
}


def chosen(function, make, **options):
    container = function(policy=make(), **options)
    names = ("num_attention_heads", "hidden_size", "layer_norm_eps", "pre_attn_norm", "mlp_after_attn")
    return type(container).__name__, {name: getattr(container, name, None) for name in names}


cases = {}
for name, function in FUNCTIONS.items():
    for policy, make in POLICIES.items():
        cases[f"{name}: {policy}"] = partial(chosen, function, make)
    cases[f"{name}: with a config"] = partial(chosen, function, POLICIES["Llama"], config=None, model_config=None)
    cases[f"{name}: by position"] = lambda function=function: function(POLICIES["Llama"]())
    cases[f"{name}: nothing"] = lambda function=function: function()
    cases[f"{name}: a wrong option"] = partial(chosen, function, POLICIES["Llama"], no_such=1)
observing.main(cases, FUNCTIONS, folder, "deepspeed")
