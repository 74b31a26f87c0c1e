"""The stock Trainer on a model folder: ``train.py MODEL OUTPUT OPTIONS``, options of TrainingArguments as JSON.

``die_at`` among them: the process kills itself after that step. Nothing of olmo-lns is imported here.
"""

import json
import os
import signal
import sys

import torch
import transformers

folder, output, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
die_at, resume = options.pop("die_at", None), options.pop("resume", False)


class Killer(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **more):
        if state.global_step == die_at:
            os.kill(os.getpid(), signal.SIGKILL)


ids = torch.randint(2, 97, (24, 8), generator=torch.Generator().manual_seed(5))
labels = ids.clone()
labels[:, 0] = -100  # nothing predicts it, but transformers 4 would count it
rows = [{"input_ids": row, "labels": label} for row, label in zip(ids, labels, strict=True)]
common = dict(
    output_dir=output,
    max_steps=8,
    learning_rate=1e-2,
    lr_scheduler_type="cosine",
    warmup_steps=2,
    optim="adamw_torch",
    logging_steps=1,
    logging_nan_inf_filter=False,
    save_steps=3,
    report_to=[],
    disable_tqdm=True,
)
model = transformers.AutoModelForCausalLM.from_pretrained(folder)
trainer = transformers.Trainer(
    model=model,
    args=transformers.TrainingArguments(**common, **options),
    train_dataset=rows,
    callbacks=[Killer()],
)
trainer.train(resume_from_checkpoint=resume)
if trainer.is_world_process_zero():
    lines = [line for line in trainer.state.log_history if "loss" in line]
    distributed = str(trainer.accelerator.distributed_type)
    found = {"losses": [line["loss"] for line in lines], "norms": [line["grad_norm"] for line in lines]}
    found |= {"world": trainer.args.world_size, "distributed": distributed, "class": type(model).__name__}
    with open(f"{output}/found.json", "w") as file:
        json.dump(found, file)
