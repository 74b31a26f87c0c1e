"""A tiny GPT under parallel layouts, one after the other; run by torchrun, every rank prints one JSON line.

    torchrun --nproc-per-node 2 -m support.megatron_ranks '[{"pp": 2, "vpp": 2, "lns": "plugin"}]'

``lns``: "plugin", "hooks" (the reference: a stock model, each block norm's output multiplied by a
forward hook) or "off", or several of them with commas, one after the other. All start from plain
initialization, so their weights are equal.
``schemes``: a list of others than LayerNorm Scaling; each is run with the plugin, in a folder of its own.
``save`` / ``load``: a folder for a distributed checkpoint; after ``load`` only one loss is computed, unless ``steps``
says how many to train. ``allow``: what ``OLMO_LNS_ALLOW_MISMATCH`` accepts while it is loaded.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any, Iterator
from unittest import mock

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
        "sequence_parallel": bool(options.get("sp")),
    }
    if options.get("vpp"):  # without it Megatron on gloo trains wrongly, with or without LNS
        values |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    if options.get("fsdp2"):  # for another implementation it shards linear layers twice
        values["transformer_impl"] = "local"
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
        apply(cfg, scheme=options.get("scheme", "lns"))
    cfg.output_layer_init_method = cfg.init_method
    chunks = options.get("vpp") or 1
    spec = tiny.spec_with(cfg) if cfg.sequence_parallel else None
    models = [
        tiny.build(cfg, spec, vp_stage=stage if chunks > 1 else None, seed=1234 + stage) for stage in range(chunks)
    ]
    if options["lns"] == "hooks":
        for model in models:
            tiny.hook_reference(model)
    return cfg, [Float16Module(cfg, model) for model in models] if options.get("bf16") else models


def optimizer_for(cfg: Any, models: list[Any], options: dict[str, Any]) -> tuple[Any, list[Any]]:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    own = bool(options.get("mfsdp"))
    distributed = bool(options.get("distopt")) or own
    more = (
        {
            "use_megatron_fsdp": True,
            "data_parallel_sharding_strategy": "optim_grads_params",
            "gradient_reduce_div_fusion": False,
        }
        if own
        else {}
    )
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=distributed, grad_reduce_in_fp32=True, **more)
    wrap = megatron_fsdp if own else fully_sharded if options.get("fsdp2") else DistributedDataParallel
    models = [wrap(cfg, ddp, model) for model in models]
    if not options.get("fsdp2"):  # which reduces by itself; in 0.16.1 the two do not fit each other
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


def fully_sharded(cfg: Any, ddp: Any, model: Any) -> Any:
    """Megatron's wrapper of PyTorch's FSDP2, which asks for a mesh of CUDA devices by name."""
    from megatron.core.distributed import TorchFullyShardedDataParallel
    from torch.distributed.device_mesh import DeviceMesh

    from_group = DeviceMesh.from_group
    with mock.patch.object(
        DeviceMesh, "from_group", lambda group, device: from_group(group, megatron_cpu.on_cpu(device))
    ):
        return TorchFullyShardedDataParallel(cfg, ddp, model)


def megatron_fsdp(cfg: Any, ddp: Any, model: Any) -> Any:
    """Megatron's own FSDP; its streams, of which a CPU has one, stand still."""
    import torch
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
    from torch.distributed.device_mesh import DeviceMesh

    from_group = DeviceMesh.from_group

    def on_cpu(group: Any, device_type: str, **kwargs: Any) -> Any:
        return from_group(group, megatron_cpu.on_cpu(device_type), **kwargs)

    number = mock.patch.object(torch.cuda, "current_device", lambda: 0)  # it only compares: another device, a warning
    with number, mock.patch.object(DeviceMesh, "from_group", on_cpu):
        return FullyShardedDataParallel(cfg, ddp, model, device=torch.device("cpu"))


@contextlib.contextmanager
def streams_stand_still() -> Iterator[None]:
    """No streams, and a collective has ended when its call returns.

    Megatron-FSDP frees a bucket in the order of its streams. On a CPU nothing keeps that order: a gather of gloo still
    under way in a thread of its own would write into memory that was given back.
    """
    import torch
    import torch.distributed as dist
    from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer

    gather = dist.all_gather_into_tensor

    def at_once(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        gather(*args, **kwargs)
        return mock.MagicMock(name="an ended gather")

    @contextlib.contextmanager
    def one_by_one(*args: Any, **kwargs: Any) -> Iterator[Any]:
        yield mock.MagicMock(name="ended collectives")

    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (torch.cuda, "Stream", lambda *args, **kwargs: mock.MagicMock(name="a stream")),
            (torch.cuda, "stream", lambda stream: contextlib.nullcontext()),
            (torch.cuda, "empty_cache", lambda: None),
            (dist, "all_gather_into_tensor", at_once),
            (param_and_grad_buffer, "_coalescing_manager", one_by_one),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


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

    from olmo_lns.integrations import norm_sites

    cfg, models = build(options)
    sites = [(site.layer_number, site.plan.norm_scale) for model in models for _, _, site in norm_sites.sites(model)]
    losses: list[float | None] = []
    if folder := options.get("load"):
        # All chunks at once, as Megatron does: together they must want every shard.
        state = {f"model{index}": model.sharded_state_dict() for index, model in enumerate(models)}
        with mock.patch.dict(os.environ, OLMO_LNS_ALLOW_MISMATCH=options.get("allow", "")):
            loaded = dist_checkpointing.load(state, folder)
        for index, model in enumerate(models):
            model.load_state_dict(loaded[f"model{index}"])
    if not folder or options.get("steps"):
        optimizer, models = optimizer_for(cfg, models, options)
        for number in range(options.get("steps", 3)):
            for model in models:
                model.zero_grad_buffer()
            optimizer.zero_grad()
            losses.append(step(models, seed=number))
            optimizer.step()
        if not options.get("mfsdp"):
            models = [model.module for model in models]
    if folder := options.get("save"):
        dist_checkpointing.save(models[0].sharded_state_dict(), folder)
    cfg.finalize_model_grads_func = cfg.grad_scale_func = None
    losses.append(step(models, seed=99, forward_only=True))
    return {"losses": losses, "sites": sites}


def cases(options: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What is run one after the other: name -> changes of the options."""
    if "schemes" not in options:
        return {mode: {"lns": mode} for mode in options["lns"].split(",")}
    folders = [key for key in ("save", "load") if key in options]
    return {
        scheme: {"lns": "plugin", "scheme": scheme} | {key: f"{options[key]}/{scheme.split(':')[0]}" for key in folders}
        for scheme in options["schemes"]
    }


def results(options: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What this rank found under one layout."""
    megatron_cpu.initialize(options.get("tp", 1), options.get("pp", 1), options.get("vpp"))
    with streams_stand_still() if options.get("mfsdp") else contextlib.nullcontext():
        return {mode: run(options | changes) for mode, changes in cases(options).items()}


def main() -> int:
    import torch.distributed as dist

    with megatron_cpu.cuda_answered():
        found = [results(options) for options in json.loads(sys.argv[1])]
        # In turn: two ranks that print at once share a line.
        for turn in range(dist.get_world_size()):
            if turn == dist.get_rank():
                print("RANK " + json.dumps(found), flush=True)
            dist.barrier()
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
