"""Runs PEFT on models of each kind; this package adds rows to its tables. Usage: ``stock_peft.py FOLDER``."""

import contextlib
import sys
from functools import partial
from pathlib import Path

import peft
import torch
import transformers
from peft.utils import constants
from support import observing

folder = Path(sys.argv[1])
LLAMA = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
LLAMA |= dict(num_key_value_heads=2, max_position_embeddings=32)
GPT2 = dict(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32)
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**LLAMA),
    "gpt2": lambda: transformers.GPT2Config(**GPT2),
    "mamba": lambda: transformers.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4),
}
#: Default targets, targets that are named, and methods that look the model type up in a table.
ADAPTERS = {
    "LoRA": partial(peft.LoraConfig, task_type="CAUSAL_LM", r=4),
    "LoRA of all linear layers": partial(peft.LoraConfig, target_modules="all-linear"),
    "LoRA with norms": partial(peft.LoraConfig, target_modules=["q_proj"], modules_to_save=["input_layernorm"]),
    "LoRA of a missing module": partial(peft.LoraConfig, target_modules=["no_such"]),
    "LN tuning": partial(peft.LNTuningConfig, task_type="CAUSAL_LM"),
    "IA3": partial(peft.IA3Config, task_type="CAUSAL_LM"),
    "prefixes": partial(peft.PrefixTuningConfig, task_type="CAUSAL_LM", num_virtual_tokens=3),
    "adaption prompts": partial(peft.AdaptionPromptConfig, task_type="CAUSAL_LM", adapter_len=3, adapter_layers=1),
}


def built(kind):
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(CONFIGS[kind]())


def adapted(kind, name):
    model = peft.get_peft_model(built(kind), ADAPTERS[name]())
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    ids = torch.arange(3, 11)[None]
    for _ in range(2):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
    return model.peft_config, loss, dict(model.state_dict())


def saved(name):
    place = folder / f"adapter of {name}"
    model = peft.get_peft_model(built("llama"), ADAPTERS[name]())
    model.save_pretrained(place)
    again = peft.PeftModel.from_pretrained(built("llama"), place)
    return dict(again.state_dict()), dict(again.merge_and_unload().state_dict())


def by_name(kind, task_type):
    """The base and the adapter are loaded by what the adapter's config names."""
    base, place = folder / f"base {kind} {task_type}", folder / f"adapter {kind} {task_type}"
    built(kind).save_pretrained(base)
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    peft.get_peft_model(model, peft.LoraConfig(task_type=task_type, r=4)).save_pretrained(place)
    auto = peft.AutoPeftModelForCausalLM if task_type else peft.AutoPeftModel
    return dict(auto.from_pretrained(place).state_dict())


def tables():
    """The rows of PEFT's tables, without the rows that this package adds."""
    found = {name: table for name, table in vars(constants).items() if name.startswith("TRANSFORMERS_MODELS_TO_")}
    return {name: {k: v for k, v in table.items() if not k.startswith("lns_")} for name, table in found.items()}


FUNCTIONS = {}
with contextlib.suppress(ImportError):  # transformers 4
    from peft.utils.transformers_weight_conversion import get_checkpoint_conversion_mapping

    FUNCTIONS["save"] = get_checkpoint_conversion_mapping
cases = {f"{name}: {kind}": partial(adapted, kind, name) for name in ADAPTERS for kind in CONFIGS}
cases |= {f"save: {name}": partial(saved, name) for name in ("LoRA", "LoRA with norms", "LN tuning", "IA3")}
cases |= {
    "by name: with a task": lambda: by_name("llama", "CAUSAL_LM"),
    "by name: without a task": lambda: by_name("gpt2", None),
    "load: a missing adapter": lambda: peft.PeftModel.from_pretrained(built("llama"), folder / "missing"),
    "load: no model": lambda: peft.AutoPeftModelForCausalLM.from_pretrained(folder / "missing"),
    "tables": tables,
}
observing.main(cases, FUNCTIONS, folder, "peft")
