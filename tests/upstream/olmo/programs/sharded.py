"""Two ranks: train, save with each of OLMo's sharded checkpointers, load into another model, train on.

Usage: ``torchrun … sharded.py kinds checkpointers folder``, with commas. Rank 0 writes ``results.json``: for each
checkpointer and kind the largest difference of any parameter after loading, that of the second step, and the names of
the scheme's own parameters that moved from their start; or the error that was raised.
"""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from strategies import full_parameters, loss_of, prepared, wrap
from support.olmo_models import tokens

from olmo_lns.integrations.olmo import register

CASE = {"strategy": "fsdp", "wrap": "by_block", "use_orig_params": True}
OWN = ("_gate.", "_omega.", "_norm_out.")


def model_and_optimizer(kind, factor):
    """The same weights on every rank, times ``factor``."""
    model = wrap(prepared(kind, CASE), CASE)
    for parameter in model.parameters():
        parameter.data.mul_(factor)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model, optimizer, seed):
    generator = torch.Generator().manual_seed(seed)
    ids = tokens(4, 16)[torch.randperm(4, generator=generator)]
    loss_of(model, ids.chunk(2)[dist.get_rank()], CASE).backward()
    optimizer.step()
    optimizer.zero_grad()


def largest_difference(one, other):
    assert set(one) == set(other)
    return max((one[name] - other[name]).abs().max().item() for name in one)


def checkpointer(name, model, folder):
    from olmo.checkpoint import build_sharded_checkpointer
    from olmo.config import ShardedCheckpointerType, TrainConfig

    cfg = TrainConfig(model=model.module.config, save_folder=str(folder), save_overwrite=True)
    return build_sharded_checkpointer(cfg, name=ShardedCheckpointerType(name))


def written_apart(folder, saved):
    """What no version of torch from 2.4 on lets OLMo read back lies there all the same."""
    from olmo_lns.checkpoints.distributed import DistributedCheckpoint

    state = DistributedCheckpoint(folder / "model_and_optim")
    return max((state.tensor(f"model.{name}").load() - value).abs().max().item() for name, value in saved.items())


def resumed(kind, name, folder, result):
    """Fills ``result`` as far as it gets."""
    model, optimizer = model_and_optimizer(kind, 1.0)
    start = full_parameters(model, CASE)
    step(model, optimizer, 1)
    saved = full_parameters(model, CASE)
    checkpointer(name, model, folder).save_checkpoint(folder, model, optimizer, {"step": 1})
    dist.barrier()
    result["written"] = written_apart(folder, saved) if name == "torch_new" else 0.0
    other, other_optimizer = model_and_optimizer(kind, 1.5)
    step(other, other_optimizer, 3)  # moments of its own, which loading has to replace
    apart = largest_difference(full_parameters(other, CASE), saved)
    state = checkpointer(name, other, folder).restore_checkpoint(folder, other, other_optimizer)
    loaded = full_parameters(other, CASE)
    step(model, optimizer, 2)
    step(other, other_optimizer, 2)
    result |= {
        "step": state["step"],
        "apart": apart,
        "loaded": largest_difference(loaded, saved),
        "next": largest_difference(full_parameters(other, CASE), full_parameters(model, CASE)),
        "own": [n for n in saved if any(word in n for word in OWN) and not torch.equal(saved[n], start[n])],
    }


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    os.environ.setdefault("FS_LOCAL_RANK", os.environ["LOCAL_RANK"])
    register()
    kinds, names, folder = sys.argv[1].split(","), sys.argv[2].split(","), Path(sys.argv[3])
    results = {}
    for name in names:
        for kind in kinds:
            print(f"running {name} {kind}", flush=True)
            result = {}
            try:
                resumed(kind, name, folder / f"{name}-{kind}", result)
            except Exception as error:  # what OLMo raises is the result; the test compares it with stock's
                result["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
            results.setdefault(name, {})[kind] = result
            dist.barrier()
    if dist.get_rank() == 0:
        (folder / "results.json").write_text(json.dumps(results, indent=1))
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
