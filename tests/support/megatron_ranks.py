"""Train a tiny GPT under parallel layouts, one run after the other, on two gloo ranks.

A run has these keys, each of which may be left out:

``mode``: "plugin", "hooks" (the reference: a stock model, each block norm's output multiplied by a forward hook) or
"off". All start from plain initialization, so their weights are equal.
``tp``, ``pp``, ``vpp``, ``bf16``; ``config``: further fields of TransformerConfig; ``ddp``: of DistributedDataParallelConfig.
"""

import os

import torch
import torch.distributed as dist

from support import megatron_cpu

STEPS = 3


def build(options):
    """The config and this rank's chunks."""
    from megatron.core.transformer.module import Float16Module

    from olmo_lns.integrations.megatron import apply
    from support import megatron_tiny as tiny

    bf16, chunks, mode = bool(options.get("bf16")), options.get("vpp") or 1, options.get("mode", "plugin")
    dtype = torch.bfloat16 if bf16 else torch.float32
    cfg = tiny.config(
        init_method_std=0.2,  # large enough for the factor to be felt within a few steps
        tensor_model_parallel_size=options.get("tp", 1),
        pipeline_model_parallel_size=options.get("pp", 1),
        virtual_pipeline_model_parallel_size=options.get("vpp"),
        bf16=bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        **options.get("config", {}),
    )
    cfg.output_layer_init_method = cfg.init_method
    if mode == "plugin":
        apply(cfg)
    spec = tiny.sequence_parallel_spec(cfg) if cfg.sequence_parallel else None
    models = [
        tiny.build(cfg, spec, vp_stage=stage if chunks > 1 else None, seed=1234 + stage) for stage in range(chunks)
    ]
    if mode == "hooks":
        models = [hooked_part(model, cfg, stage) for stage, model in enumerate(models)]
    return cfg, [Float16Module(cfg, model) for model in models] if bf16 else models


def hooked_part(model, cfg, stage):
    """The reference, which counts the blocks before this chunk itself: chunk c of rank r is part c * pp + r."""
    from megatron.core import parallel_state

    from support.hooked import hooked

    part = stage * cfg.pipeline_model_parallel_size + parallel_state.get_pipeline_model_parallel_rank()
    count = len(model.decoder.layers)
    return hooked(model, numbers=range(1 + part * count, 1 + (part + 1) * count))


def optimizer_for(cfg, models, options):
    """Megatron's DDP around the chunks, and its Adam."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, **options.get("ddp", {}))
    models = [DistributedDataParallel(cfg, ddp, model) for model in models]
    cfg.finalize_model_grads_func = finalize_model_grads
    settings = OptimizerConfig(
        optimizer="adam", lr=3e-3, clip_grad=1.0, bf16=cfg.bf16, params_dtype=cfg.params_dtype,
        use_distributed_optimizer=ddp.use_distributed_optimizer,
    )  # fmt: skip
    optimizer = get_megatron_optimizer(settings, models)
    cfg.grad_scale_func = optimizer.scale_loss
    for group in optimizer.param_groups:
        group["lr"] = 3e-3
    return optimizer, models


def step(models, seed):
    """Two micro-batches through Megatron's schedule; their mean loss on the last stage, else None."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from support import megatron_tiny as tiny

    shard = parallel_state.get_data_parallel_rank()
    micro = [tiny.batch(seed=seed * 100 + 10 * shard + i) for i in range(2)]

    def loss(output):
        value = output.float().mean()
        return value, {"loss": value.detach().clone()}

    def forward(iterator, model):
        tokens = next(iterator)
        return model(*tiny.inputs(tokens), labels=tokens[:, 1:]), loss

    iterators = [iter(micro) for _ in models]
    found = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iterators if len(models) > 1 else iterators[0],
        model=models if len(models) > 1 else models[0],
        num_microbatches=len(micro),
        seq_length=tiny.SEQUENCE,
        micro_batch_size=tiny.BATCH,
        forward_only=False,
    )
    return sum(float(f["loss"]) for f in found) / len(found) if found else None


def run(options):
    """The findings of this rank: the losses of its stage (None in others), and its sites."""
    from olmo_lns import sites

    cfg, models = build(options)
    found = [(site.layer_number, site.plan.norm_scale) for model in models for _, _, site in sites.in_model(model)]
    optimizer, models = optimizer_for(cfg, models, options)
    losses = []
    for number in range(STEPS):
        for model in models:
            model.zero_grad_buffer()
        optimizer.zero_grad()
        losses.append(step(models, seed=number))
        optimizer.step()
    return {"losses": losses, "sites": found}


def run_all(rank, runs, folder):
    """The findings of this rank of two in each run. The ranks meet in a file in ``folder``."""
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # sequence parallelism asks for it
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    found = []
    with megatron_cpu.cuda_answered():
        for options in runs:
            megatron_cpu.initialize(options.get("tp", 1), options.get("pp", 1), options.get("vpp"))
            found.append(run(options))
    dist.destroy_process_group()
    return found
