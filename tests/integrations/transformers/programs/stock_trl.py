"""Runs TRL's functions that read a model's type, and its trainers. Usage: ``stock_trl.py FOLDER``."""

import sys
import types
from functools import partial
from pathlib import Path

import datasets
import peft
import torch
import transformers
import trl
from support import observing
from support.transformers_models import tokenizer
from trl.experimental.async_distillation import async_distillation_trainer
from trl.trainer import distillation_trainer, utils

folder = Path(sys.argv[1])
LLAMA = dict(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
LLAMA |= dict(num_key_value_heads=2, max_position_embeddings=64, eos_token_id=1, pad_token_id=1)
PROMPTS = [{"prompt": "w5 w6 w7"}, {"prompt": "w8 w9"}]
TEXTS = [{"text": "w5 w6 w7 w8 w9"}, {"text": "w9 w3 w4"}]
PAIRS = [
    {"prompt": "w5 w6", "chosen": "w7 w8", "rejected": "w9"},
    {"prompt": "w3", "chosen": "w4", "rejected": "w5 w6"},
]


def model(**changes):
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA, **changes))


def hyperclovax(scaling):
    torch.manual_seed(0)
    sizes = dict(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    config = transformers.HyperCLOVAXConfig(**sizes, use_post_norm=False, logits_scaling=scaling)
    return transformers.AutoModelForCausalLM.from_config(config)


class NoConfig(torch.nn.Module):
    """A module that is no model of transformers."""


def fused(make, *args, **options):
    built, ids = make(), torch.arange(3, 11)[None]
    utils.add_fused_lm_head(built, *args, **options)
    output = built(input_ids=ids, labels=ids, fused_lm_head=True)
    return output.loss, output.log_probs, built(input_ids=ids).logits


def arguments(kind, name):
    options = dict(max_steps=2, per_device_train_batch_size=2, logging_steps=1, save_strategy="no", report_to=[])
    options |= dict(use_cpu=True, bf16=False, disable_tqdm=True)
    if kind is not trl.SFTConfig and kind is not trl.DPOConfig:
        options["max_completion_length"] = 4
    if kind is trl.GRPOConfig:
        options["num_generations"] = 2
    return kind(str(folder / name), **options)


def trained(trainer, config, rows, make=model, **options):
    torch.manual_seed(1)
    data = datasets.Dataset.from_list(rows)
    # The order in which its files are written is not compared.
    run = trainer(
        make(), args=arguments(config, trainer.__name__), train_dataset=data, processing_class=tokenizer(), **options
    )
    run.train()
    losses = [line["loss"] for line in run.state.log_history if "loss" in line]
    return losses, dict(run.model.state_dict())


def rewarded(completions, **_):
    return [float(len(text)) for text in completions]


FUNCTIONS = {
    "fused head": utils.add_fused_lm_head,
    "distillation": distillation_trainer.DistillationTrainer._compute_loss,
    "asynchronous": async_distillation_trainer.AsyncDistillationTrainer._compute_loss,
}
distilled = partial(trained, trl.DistillationTrainer, trl.DistillationConfig, PROMPTS)
cases = {
    "fused head: llama": partial(fused, model),
    "fused head: llama, all outputs": partial(fused, model, 2.0, outputs=("log_probs", "entropy")),
    "fused head: HyperCLOVA X": partial(fused, partial(hyperclovax, 2.0)),
    "fused head: HyperCLOVA X, unscaled": partial(fused, partial(hyperclovax, None)),
    "fused head: a scale of logits": partial(fused, partial(model, logits_scaling=3.0)),
    "fused head: a PEFT model": partial(fused, lambda: peft.get_peft_model(model(), peft.LoraConfig(r=4))),
    "fused head: no config": partial(fused, NoConfig),
    "fused head: None": partial(fused, lambda: None),
    "fused head: by a keyword": lambda: utils.add_fused_lm_head(model=model()),
    "fused head: nothing": lambda: utils.add_fused_lm_head(),
    "fused head: a wrong option": lambda: utils.add_fused_lm_head(model(), no_such=1),
    "distillation: llama": lambda: distilled(teacher_model=model()),
    "distillation: HyperCLOVA X": lambda: distilled(partial(hyperclovax, 2.0), teacher_model=hyperclovax(3.0)),
    "distillation: LoRA": lambda: distilled(teacher_model=model(), peft_config=peft.LoraConfig(r=4)),
    "distillation: no teacher": lambda: distilled(),
    "distillation: nothing": lambda: trl.DistillationTrainer._compute_loss(),
    "distillation: no trainer": lambda: trl.DistillationTrainer._compute_loss(None, model(), {}, None),
    "asynchronous: no batch": lambda: FUNCTIONS["asynchronous"](None, model(), {}),
    "asynchronous: no model": lambda: FUNCTIONS["asynchronous"](types.SimpleNamespace(), None, {"input_ids": None}),
    "asynchronous: nothing": lambda: FUNCTIONS["asynchronous"](),
    "fused head: SFT": lambda: trained(trl.SFTTrainer, trl.SFTConfig, TEXTS),
    "fused head: SFT with LoRA": lambda: trained(
        trl.SFTTrainer, trl.SFTConfig, TEXTS, peft_config=peft.LoraConfig(task_type="CAUSAL_LM", r=4)
    ),
    "fused head: DPO": lambda: trained(trl.DPOTrainer, trl.DPOConfig, PAIRS),
    "fused head: GRPO": lambda: trained(trl.GRPOTrainer, trl.GRPOConfig, PROMPTS, reward_funcs=rewarded),
}
observing.main(cases, FUNCTIONS, folder, "trl")
