"""OLMo under one distributed strategy after the other, against one process.

Usage: ``torchrun … strategies.py cases.json results.json``. Every case runs with each of its ``kinds``, the stock
type first. The result of a kind is the text of the error that was raised, or of :func:`compare` or :func:`initialize`.
"""

import json
import os
import sys
from contextlib import nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from olmo.config import ActivationCheckpointingStrategy, FSDPConfig, FSDPPrecision, FSDPWrapStrategy, TrainConfig
from olmo.model import OLMo
from olmo.torch_util import seed_all
from support.olmo_models import build, model_config, tokens
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.nn.parallel import DistributedDataParallel as DDP

BATCH, LENGTH, RATE = 4, 16, 1.0


def loss_of(model, ids, case):
    """The mean loss; autocast on the CPU, as OLMo's own works on CUDA only."""
    with torch.autocast("cpu", torch.bfloat16) if case.get("autocast") else nullcontext():
        logits = model(ids).logits[:, :-1].float()
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))


def prepared(kind, case):
    """Build the same weights on every rank, and do what OLMo's launcher does before it wraps the model."""
    model = build(layer_norm_type=kind, **case.get("model", {})).train()
    for block in model.transformer.blocks if case.get("compile") else ():
        block.compile(backend=case["compile"])
    if case.get("checkpointing"):
        model.set_activation_checkpointing(ActivationCheckpointingStrategy(case["checkpointing"]))
    return model


def wrap(model, case, param_init_fn=None):
    """Wrap a model as OLMo's launcher does. :param case: ``wrap`` names the strategy of FSDP; without it, DDP."""
    if "wrap" not in case:
        return DDP(model)
    fsdp = FSDPConfig(
        wrapping_strategy=FSDPWrapStrategy(case["wrap"]),
        precision=FSDPPrecision(case["precision"]) if case.get("precision") else None,
    )
    return FSDP(
        model,
        sharding_strategy=fsdp.sharding_strategy,
        mixed_precision=TrainConfig(fsdp=fsdp, precision="amp_bf16").fsdp_precision,
        auto_wrap_policy=model.get_fsdp_wrap_policy(fsdp.wrapping_strategy),
        use_orig_params=case.get("use_orig_params", True),
        limit_all_gathers=True,
        device_id=torch.device("cpu"),
        param_init_fn=param_init_fn,
    )


def full_parameters(model):
    whole = FSDP.summon_full_params(model, writeback=False) if isinstance(model, FSDP) else nullcontext()
    with whole:
        clean = [(name.replace("_fsdp_wrapped_module.", ""), p) for name, p in model.named_parameters()]
        return {name.removeprefix("module."): p.detach().clone() for name, p in clean}


def compare(kind, case):
    """Return the loss, that of one process, and the largest gradient error relative to the largest gradient."""
    ids = tokens(BATCH, LENGTH)
    single = prepared(kind, {**case, "compile": None, "checkpointing": None})
    expected = loss_of(single, ids, case)
    expected.backward()
    gradients = {name: p.grad for name, p in single.named_parameters()}
    model = wrap(prepared(kind, case), case)
    before, optim = full_parameters(model), torch.optim.SGD(model.parameters(), lr=RATE)
    mean = loss_of(model, ids.chunk(dist.get_world_size())[dist.get_rank()], case)
    mean.backward()
    optim.step()
    after, mean = full_parameters(model), mean.detach().clone()
    assert set(before) == set(gradients), sorted(set(before) ^ set(gradients))
    dist.all_reduce(mean)
    largest = max(g.abs().max() for g in gradients.values())
    error = max(((before[n] - after[n]) / RATE - gradients[n]).abs().max() / largest for n in gradients)
    return {"loss": mean.item() / dist.get_world_size(), "expected": expected.item(), "gradient_error": error.item()}


def initialize(kind, case):
    """Build on the meta device, wrap and reset as OLMo's launcher does; return the mean size of each weight."""

    def allocate(module):
        module.to_empty(device="cpu")
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.fill_(7.0)  # no initialization draws it

    seed_all(1)
    model = OLMo(model_config(layer_norm_type=kind, init_device="meta", d_model=64, **case["model"]))
    wrapped = wrap(model, case, allocate)
    model.reset_parameters()
    sizes = {}
    for name, w in full_parameters(wrapped).items():
        # The rows of v, the last third of a fused projection, have their own number.
        parts = (w[: -len(w) // 3], w[-len(w) // 3 :]) if "att_proj" in name else (w,)
        sizes[name] = [part.abs().mean().item() for part in parts]
    return sizes


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    os.environ.setdefault("FS_LOCAL_RANK", os.environ["LOCAL_RANK"])
    results = {}
    with open(sys.argv[1]) as file:
        cases = json.load(file)
    for name, case in cases.items():
        for kind in case["kinds"]:
            torch._dynamo.reset()
            print(f"running {name}, {kind}", flush=True)
            try:
                result = (initialize if case.get("initialize") else compare)(kind, case)
            except Exception as error:  # the error of a strategy is its result; the test judges it
                result = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
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
