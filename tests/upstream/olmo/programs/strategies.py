"""One forward, backward and SGD step of an OLMo model under each given strategy, against one process.

Usage: ``torchrun … strategies.py cases.json results.json``. Every case runs with each of its ``kinds``, the stock
type first: a crash there is not ours. A result holds the loss, the reference's loss, the largest gradient error
relative to the largest gradient, or the error that was raised.
"""

import json
import os
import sys
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.olmo_models import build, model_config, tokens
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.nn.parallel import DistributedDataParallel as DDP

from olmo_lns.integrations.olmo import register

BATCH, LENGTH, RATE = 4, 16, 1.0


def precision(case):
    """Autocast on the CPU; OLMo's own works on CUDA only."""
    return torch.autocast("cpu", torch.bfloat16) if case.get("autocast") else nullcontext()


def loss_of(model, ids, case):
    with precision(case):
        logits = model(ids).logits[:, :-1].float()
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))


def prepared(kind, case):
    """Build the same weights on every rank, and do what OLMo's launcher does before it wraps the model."""
    from olmo.config import ActivationCheckpointingStrategy

    model = build(layer_norm_type=kind, **case.get("model", {})).train()
    if case.get("compile"):
        for block in model.transformer.blocks:
            block.compile(backend=case["compile"])
    if case.get("checkpointing"):
        model.set_activation_checkpointing(ActivationCheckpointingStrategy(case["checkpointing"]))
    return model


def wrap(model, case, param_init_fn=None):
    from olmo.config import FSDPConfig, FSDPPrecision, FSDPWrapStrategy, TrainConfig

    if case["strategy"] == "ddp":
        return DDP(model)
    fsdp = FSDPConfig(
        use_orig_params=case["use_orig_params"],
        wrapping_strategy=FSDPWrapStrategy(case["wrap"]) if case["wrap"] else None,
        precision=FSDPPrecision(case["precision"]) if case.get("precision") else None,
    )
    train = TrainConfig(fsdp=fsdp, precision="amp_bf16")
    return FSDP(
        model,
        sharding_strategy=fsdp.sharding_strategy,
        mixed_precision=train.fsdp_precision,
        auto_wrap_policy=model.get_fsdp_wrap_policy(fsdp.wrapping_strategy),
        use_orig_params=fsdp.use_orig_params,
        limit_all_gathers=True,
        device_id=torch.device("cpu"),
        param_init_fn=param_init_fn,
    )


def full_parameters(model, case):
    whole = FSDP.summon_full_params(model, writeback=False) if case["strategy"] == "fsdp" else nullcontext()
    with whole:
        clean = [(name.replace("_fsdp_wrapped_module.", ""), p) for name, p in model.named_parameters()]
        return {name.removeprefix("module."): p.detach().clone() for name, p in clean}


def compare(kind, case):
    ids = tokens(BATCH, LENGTH)
    single = prepared(kind, {**case, "compile": None, "checkpointing": None})
    expected_loss = loss_of(single, ids, case)
    expected_loss.backward()
    gradients = {name: p.grad for name, p in single.named_parameters()}

    model = wrap(prepared(kind, case), case)
    before = full_parameters(model, case)
    optim = torch.optim.SGD(model.parameters(), lr=RATE)
    mine = ids.chunk(dist.get_world_size())[dist.get_rank()]
    loss = loss_of(model, mine, case)
    loss.backward()
    optim.step()
    after = full_parameters(model, case)
    assert set(before) == set(gradients), sorted(set(before) ^ set(gradients))
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    largest = max(g.abs().max() for g in gradients.values())
    errors = [((before[n] - after[n]) / RATE - gradients[n]).abs().max() / largest for n in gradients]
    return {
        "loss": mean.item() / dist.get_world_size(),
        "expected": expected_loss.item(),
        "gradient_error": max(errors).item(),
    }


def allocate(module):
    """Allocate as OLMo's launcher does, and fill with a value that no initialization draws."""
    module.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(7.0)


def initialize(kind, case):
    """Build on the meta device, wrap and reset as OLMo's launcher does; return the mean size of each weight."""
    from olmo.model import OLMo
    from olmo.torch_util import seed_all

    seed_all(1)
    model = OLMo(model_config(layer_norm_type=kind, init_device="meta", d_model=64, **case["model"]))
    wrapped = wrap(model, case, allocate)
    model.reset_parameters()
    # The rows of v, the last third of a fused projection, have their own number.
    return {
        name: [
            part.abs().mean().item()
            for part in ((w[: -len(w) // 3], w[-len(w) // 3 :]) if "att_proj" in name else (w,))
        ]
        for name, w in full_parameters(wrapped, case).items()
    }


def resume(kind, case):
    """Take a step, save with OLMo's sharded checkpointer, load into another model with moments, take a step of both.

    Return the largest difference of any parameter before and after loading and after the last step, and names of the
    scheme's own parameters that moved from their start.
    """
    from olmo.checkpoint import build_sharded_checkpointer
    from olmo.config import OptimizerConfig, OptimizerType, ShardedCheckpointerType, TrainConfig
    from olmo.optim import build_optimizer

    folder = Path(sys.argv[2]).with_name(kind)
    adamw = OptimizerConfig(name=OptimizerType.adamw, learning_rate=1e-2)
    config = TrainConfig(optimizer=adamw, save_folder=str(folder), save_overwrite=True)

    def trained(factor, seed):
        model = wrap(prepared(kind, case), case)
        for parameter in model.parameters():
            parameter.data.mul_(factor)
        start = full_parameters(model, case)
        step(model, optimizer := build_optimizer(config, model), seed)
        return model, optimizer, start

    def step(model, optimizer, seed):
        ids = tokens(BATCH, LENGTH)[torch.randperm(BATCH, generator=torch.Generator().manual_seed(seed))]
        loss_of(model, ids.chunk(dist.get_world_size())[dist.get_rank()], case).backward()
        optimizer.step()
        optimizer.zero_grad()

    def apart():
        one, two = (full_parameters(each, case) for each in (model, other))
        return max((one[name] - two[name]).abs().max().item() for name in one)

    (model, optimizer, start), (other, others, _) = trained(1.0, 1), trained(1.5, 3)
    saved, found = full_parameters(model, case), {"apart": apart()}
    config.model = model.module.config
    checkpointer = build_sharded_checkpointer(config, name=ShardedCheckpointerType.olmo_core)
    checkpointer.save_checkpoint(folder, model, optimizer, {"step": 1})
    dist.barrier()
    found["step"] = checkpointer.restore_checkpoint(folder, other, others)["step"]
    found["loaded"] = apart()
    for each in ((model, optimizer), (other, others)):
        step(*each, 2)
    own = [name for name in saved if any(word in name for word in ("_gate.", "_omega.", "_norm_out."))]
    return {**found, "next": apart(), "own": [name for name in own if not torch.equal(saved[name], start[name])]}


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    os.environ.setdefault("FS_LOCAL_RANK", os.environ["LOCAL_RANK"])
    register()
    with open(sys.argv[1]) as file:
        cases = json.load(file)
    results = {}
    for name, case in cases.items():
        for kind in case["kinds"]:
            torch._dynamo.reset()
            print(f"running {kind}", flush=True)
            try:
                result = {"compare": compare, "initialize": initialize, "resume": resume}[case.get("what", "compare")](
                    kind, case
                )
            except Exception as error:  # the error of a strategy is its result; the test judges it
                result = {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
            results.setdefault(name, {})[kind] = result
            dist.barrier()
    if dist.get_rank() == 0:
        with open(sys.argv[2], "w") as file:
            json.dump(results, file, indent=1)
    dist.destroy_process_group()
    # Compiled graphs and gloo threads can end in the wrong order at exit; the results are written.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
