"""Train the model in a folder under torch's ``fully_shard``: ``torchrun shard.py MODEL OUTPUT``."""

import json
import os
import sys

import torch
import torch.distributed as dist
import transformers
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

folder, output = sys.argv[1:]
world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
model = transformers.AutoModelForCausalLM.from_pretrained(folder)
factors = [block.input_layernorm.lns_scale for block in model.model.layers]
if world > 1:
    dist.init_process_group("gloo")
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)
    assert all(type(parameter).__name__ == "DTensor" for parameter in model.parameters())
assert [block.input_layernorm.lns_scale for block in model.model.layers] == factors
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
ids = torch.randint(2, 97, (6, 4, 8), generator=torch.Generator().manual_seed(5))
losses = []
for batch in ids:
    part = batch.chunk(world)[rank]
    logits = model(input_ids=part).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), part[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach().clone()
    if world > 1:
        dist.all_reduce(mean)
    losses.append(mean.item() / world)
state = model.state_dict()
if world > 1:
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
if rank == 0:
    model.save_pretrained(output, state_dict={name: value.contiguous() for name, value in state.items()})
    with open(f"{output}/found.json", "w") as file:
        json.dump({"losses": losses, "world": world}, file)
if world > 1:
    dist.destroy_process_group()
