"""Runs Liger's functions that replace norms, on every kind of module. Usage: ``stock_liger.py FOLDER``."""

import os
import sys
from functools import partial
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"  # its kernels need no GPU

import torch
import transformers
from liger_kernel.transformers import monkey_patch
from support import observing
from transformers.models.llama import modeling_llama

folder = Path(sys.argv[1])
LLAMA = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
LLAMA |= dict(num_key_value_heads=2, max_position_embeddings=32)
NORMS_ALONE = dict(rope=False, cross_entropy=False, fused_linear_cross_entropy=False)


def llama():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))


def described(module):
    """The attributes that Liger has set on a module, and the names of its functions."""
    own = {k: v for k, v in vars(module).items() if k not in ("_parameters", "_modules", "_buffers") and k[0] != "_"}
    return {name: getattr(value, "__qualname__", value) for name, value in own.items()}


def patched(function, make, *args, **options):
    module = make()
    result = getattr(monkey_patch, function)(module, *args, **options)
    return result, described(module)


def applied(function, model=None, **options):
    before = modeling_llama.LlamaRMSNorm
    try:
        getattr(monkey_patch, function)(model=model, **options)
        in_module = modeling_llama.LlamaRMSNorm.__qualname__
    finally:
        modeling_llama.LlamaRMSNorm = before
    return in_module, {name: described(module) for name, module in model.named_modules()} if model else None


RMS, LAYER = "_patch_rms_norm_module", "_patch_layer_norm_module"
FUNCTIONS = {RMS: getattr(monkey_patch, RMS), LAYER: getattr(monkey_patch, LAYER)}
MODULES = {
    "RMSNorm": lambda: modeling_llama.LlamaRMSNorm(32),
    "torch's RMSNorm": lambda: torch.nn.RMSNorm(32),
    "LayerNorm": lambda: torch.nn.LayerNorm(32),
    "LayerNorm without gains": lambda: torch.nn.LayerNorm(32, elementwise_affine=False),
    "a linear layer": lambda: torch.nn.Linear(3, 3),
    "a model": llama,
    "None": lambda: None,
    "a number": lambda: 3,
}
cases = {}
for function in FUNCTIONS:
    for name, make in MODULES.items():
        cases[f"{function}: {name}"] = partial(patched, function, make)
    cases[f"{function}: by a keyword"] = lambda f=function: getattr(monkey_patch, f)(module=MODULES["LayerNorm"]())
    cases[f"{function}: of nothing"] = lambda f=function: getattr(monkey_patch, f)()
    cases[f"{function}: a wrong option"] = partial(patched, function, MODULES["LayerNorm"], no_such=1)
cases |= {
    f"{RMS}: options": partial(patched, RMS, MODULES["RMSNorm"], 1.0, eps=1e-4, casting_mode="gemma"),
    f"{RMS}: Llama": lambda: applied("apply_liger_kernel_to_llama", llama(), **NORMS_ALONE),
    f"{RMS}: Llama, all kernels": lambda: applied("apply_liger_kernel_to_llama", llama()),
    f"{RMS}: before the model": lambda: applied("apply_liger_kernel_to_llama", **NORMS_ALONE),
    f"{RMS}: another family": lambda: applied("apply_liger_kernel_to_qwen2", llama()),
}
for model_type in ("llama", "gpt2", "", None):
    cases[f"{RMS}: by the model type {model_type!r}"] = lambda model_type=model_type: (
        monkey_patch._apply_liger_kernel_to_instance(llama()) if model_type else monkey_patch._apply_liger_kernel("")
    )
observing.main(cases, FUNCTIONS, folder, "liger_kernel")
