"""A tiny GPT under a parallel layout; run by torchrun, every rank prints one JSON line.

    torchrun --nproc-per-node 2 -m support.megatron_ranks '{"pp": 2, "vpp": 2, "lns": "plugin"}'

``lns``: "plugin", "hooks" (the reference: a stock model, each block norm's output multiplied by a
forward hook) or "off", or several of them with commas, one after the other. All start from plain
initialization, so their weights are equal.
``save`` / ``load``: a folder for a distributed checkpoint; after ``load`` only one loss is computed.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from support import megatron_cpu


def layout(options: dict[str, Any]) -> dict[str, Any]:
    """Options -> fields of TransformerConfig."""
    import torch

    bf16 = bool(options.get("bf16"))
    dtype = torch.bfloat16 if bf16 else torch.float32
    values: dict[str, Any] = {
        "init_method_std": 0.2,  # large enough for the factor to be felt within a few steps
        "tensor_model_parallel_size": options.get("tp", 1),
        "pipeline_model_parallel_size": options.get("pp", 1),
        "virtual_pipeline_model_parallel_size": options.get("vpp"),
        "bf16": bf16,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
    }
    if options.get("vpp"):  # without it Megatron on gloo trains wrongly, with or without LNS
        values |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    if options.get("recompute"):
        values |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return values


def build(options: dict[str, Any]) -> tuple[Any, list[Any]]:
    """The config and this rank's chunks."""
    from megatron.core.transformer.module import Float16Module

    from olmo_lns.integrations.megatron import apply
    from support import megatron_tiny as tiny

    cfg = tiny.config(**layout(options))
    if options["lns"] == "plugin":
        apply(cfg)
    cfg.output_layer_init_method = cfg.init_method
    chunks = options.get("vpp") or 1
    models = [tiny.build(cfg, vp_stage=stage if chunks > 1 else None, seed=1234 + stage) for stage in range(chunks)]
    if options["lns"] == "hooks":
        for model in models:
            tiny.hook_reference(model)
    return cfg, [Float16Module(cfg, model) for model in models] if options.get("bf16") else models


def optimizer_for(cfg: Any, models: list[Any], options: dict[str, Any]) -> tuple[Any, list[Any]]:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    distributed = bool(options.get("distopt"))
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=distributed, grad_reduce_in_fp32=True)
    models = [DistributedDataParallel(cfg, ddp, model) for model in models]
    cfg.finalize_model_grads_func = finalize_model_grads
    settings = OptimizerConfig(
        optimizer="adam",
        lr=3e-3,
        clip_grad=1.0,
        bf16=bool(options.get("bf16")),
        params_dtype=cfg.params_dtype,
        use_distributed_optimizer=distributed,
    )
    optimizer = get_megatron_optimizer(settings, models)
    cfg.grad_scale_func = optimizer.scale_loss
    for group in optimizer.param_groups:
        group["lr"] = 3e-3
    return optimizer, models


def step(models: list[Any], *, seed: int, forward_only: bool = False) -> float | None:
    """Two micro-batches through Megatron's schedule; their mean loss on the last stage, else None."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from support import megatron_tiny as tiny

    shard = parallel_state.get_data_parallel_rank()
    micro = [tiny.batch(seed=seed * 100 + 10 * shard + i) for i in range(2)]
    positions = torch.arange(tiny.SEQUENCE).expand(tiny.BATCH, -1)
    mask = torch.triu(torch.ones(1, 1, tiny.SEQUENCE, tiny.SEQUENCE, dtype=torch.bool), 1)

    def loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        value = output.float().mean()
        return value, {"loss": value.detach().clone()}

    def forward(iterator: Any, model: Any) -> Any:
        tokens = next(iterator)
        return model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]), loss

    iterators = [iter(micro) for _ in models]
    found = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iterators if len(models) > 1 else iterators[0],
        model=models if len(models) > 1 else models[0],
        num_microbatches=len(micro),
        seq_length=tiny.SEQUENCE,
        micro_batch_size=tiny.BATCH,
        forward_only=forward_only,
    )
    return sum(float(f["loss"]) for f in found) / len(found) if found else None


def run(options: dict[str, Any]) -> dict[str, Any]:
    from megatron.core import dist_checkpointing

    from olmo_lns.integrations.megatron.layers import scaled_norms

    cfg, models = build(options)
    sites = [(norm.lns_depth, norm.lns_scale) for model in models for norm in scaled_norms(model)]
    losses: list[float | None] = []
    if folder := options.get("load"):
        for model in models:
            model.load_state_dict(dist_checkpointing.load(model.sharded_state_dict(), folder))
    else:
        optimizer, models = optimizer_for(cfg, models, options)
        for number in range(options.get("steps", 3)):
            for model in models:
                model.zero_grad_buffer()
            optimizer.zero_grad()
            losses.append(step(models, seed=number))
            optimizer.step()
        models = [model.module for model in models]
    if folder := options.get("save"):
        dist_checkpointing.save(models[0].sharded_state_dict(), folder)
    cfg.finalize_model_grads_func = cfg.grad_scale_func = None
    losses.append(step(models, seed=99, forward_only=True))
    return {"losses": losses, "sites": sites}


def main() -> int:
    import torch.distributed as dist

    options = json.loads(sys.argv[1])
    with megatron_cpu.cuda_answered():
        megatron_cpu.initialize(options.get("tp", 1), options.get("pp", 1), options.get("vpp"))
        results = {mode: run(options | {"lns": mode}) for mode in options["lns"].split(",")}
        # In turn: two ranks that print at once share a line.
        for turn in range(dist.get_world_size()):
            if turn == dist.get_rank():
                print("RANK " + json.dumps(results), flush=True)
            dist.barrier()
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
