"""A model that is built on meta, scaled, sharded and then filled trains on two gloo ranks as hooks on a stock model do."""

import contextlib
import importlib
import os
import sys

import pytest
import torch
import torch.distributed as dist
from support import forked
from support.hooked import hooked
from support.other_models import litgpt
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import olmo_lns

IDS = torch.randint(2, 96, (6, 4, 8), generator=torch.Generator().manual_seed(5))


PROJECTIONS = ("o_proj.weight", "down_proj.weight", ".proj.weight")


def llama():
    import transformers

    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
    return transformers.AutoModelForCausalLM.from_config(
        transformers.LlamaConfig(num_attention_heads=4, num_key_value_heads=2, use_cache=False, **sizes)
    )


def initialize_litgpt(model):
    """litgpt's initialization, with the depth factor of GPT-2."""
    model.apply(model._init_weights)
    for name, parameter in model.named_parameters():
        if name.endswith("proj.weight"):
            torch.nn.init.normal_(parameter, std=0.02 / (2 * 3) ** 0.5)
    for module in model.modules():
        if hasattr(module, "reset_parameters") and not isinstance(module, torch.nn.Embedding | torch.nn.Linear):
            module.reset_parameters()


#: Name -> how the model is made, its own initialization, its blocks, their norms, the class of a block.
KINDS = {
    "transformers": (
        llama,
        lambda model: model.init_weights(),
        lambda model: model.model.layers,
        ("input_layernorm", "post_attention_layernorm"),
        "LlamaDecoderLayer",
    ),
    "litgpt": (
        lambda: litgpt(parallel_residual=False)[0],
        initialize_litgpt,
        lambda model: model.transformer.h,
        ("norm_1", "norm_2"),
        "Block",
    ),
}


def losses(model, optimizer, part=slice(None), backward=torch.Tensor.backward):
    found = []
    for ids in IDS[:, part]:
        output = model(ids)
        logits = getattr(output, "logits", output)
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach().clone())
    return torch.stack(found)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def full_state(model):
    """The whole state dict, in rank 0."""
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def by_fully_shard(rank, kind, folder):
    build, initialize, blocks, _, _ = KINDS[kind]
    with torch.device("meta"):
        model = build()
    olmo_lns.apply(model, "lns:exponent=0.7")
    for block in blocks(model):
        fully_shard(block)
    fully_shard(model)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, torch.nan)
    torch.manual_seed(1)
    initialize(model)
    olmo_lns.plain_initialization(model)
    return model, adamw(model), full_state(model)


def by_accelerate(rank, kind, folder):
    from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, init_empty_weights

    build, _, _, _, block = KINDS[kind]
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        cpu_ram_efficient_loading=True,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[block],
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    # AcceleratorState takes a plugin for FSDP on MULTI_GPU and its kin only. On two CPU processes accelerate ignores the
    # plugin without a word and would wrap the model by DDP. All that follows is accelerate's own FSDP2.
    assert accelerator.distributed_type is DistributedType.MULTI_CPU
    accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
    with init_empty_weights() if rank else contextlib.nullcontext():
        model = build()
    on_meta = {name for name, parameter in model.named_parameters() if parameter.is_meta}
    assert on_meta == (set(dict(model.named_parameters())) if rank else set())
    olmo_lns.apply(model, "lns:exponent=0.7")
    # accelerate maps the optimizer's parameters by address, and all meta tensors have the same one.
    model._apply(lambda tensor: torch.empty_like(tensor, device="cpu") if tensor.is_meta else tensor)
    model, optimizer = accelerator.prepare(model, adamw(model))
    return model, optimizer, full_state(model)


def by_zero_3(rank, kind, folder):
    import deepspeed

    # The first import of torch._dynamo, by transformers, fails while zero.Init replaces torch.Tensor's constructors.
    importlib.import_module("torch._dynamo")
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # it would compile C++ for gloo on a CPU
    deepspeed.init_distributed("gloo")
    build, initialize, _, _, _ = KINDS[kind]
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,  # the default is 1
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 100},
        "zero_force_ds_cpu_optimizer": False,
    }
    if kind == "transformers":  # it calls zero.Init itself while this object exists
        from transformers.integrations import HfDeepSpeedConfig

        keep = HfDeepSpeedConfig(config)  # noqa: F841
        model = build()
    else:
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = build()
    assert all(parameter.numel() < parameter.ds_numel for parameter in model.parameters() if parameter.dim() > 1)
    olmo_lns.apply(model, "lns:exponent=0.7")
    if kind != "transformers":
        with deepspeed.zero.GatheredParameters([*model.parameters()], modifier_rank=0):
            initialize(model)
        olmo_lns.plain_initialization(model)
    with deepspeed.zero.GatheredParameters([*model.parameters()]):
        state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model), config=config)
    return engine, engine, state


def train(rank, way, kind, folder):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "DS_ACCELERATOR": "cpu"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # accelerate and DeepSpeed ask for them
    if way == "by_accelerate":
        os.environ |= {"ACCELERATE_USE_CPU": "true", "ACCELERATE_USE_FSDP": "true"}
        os.environ |= {"FSDP_VERSION": "2", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    model, optimizer, state = globals()[way](rank, kind, folder)
    is_zero = way == "by_zero_3"
    assert all(hasattr(p, "ds_tensor") if is_zero else type(p).__name__ == "DTensor" for p in model.parameters())
    if way != "by_accelerate" and rank == 0:
        projections = [value.std().item() for name, value in state.items() if name.endswith(PROJECTIONS)]
        assert len(projections) == 6 and all(0.018 < std < 0.022 for std in projections)
    backward = optimizer.backward if is_zero else torch.Tensor.backward
    found = losses(model, optimizer, slice(2 * rank, 2 * rank + 2), backward)
    dist.all_reduce(found)
    if rank == 0:
        build, _, blocks, norms, _ = KINDS[kind]
        stock, reference = build(), build()
        for each in (stock, reference):
            each.load_state_dict(state)
        hooked(reference, blocks(reference), norms, exponent=0.7)
        expected = losses(reference, adamw(reference))
        torch.testing.assert_close(found / 2, expected, rtol=1e-5, atol=0)
        assert (losses(stock, adamw(stock)) - expected).abs().max() > 1e-3
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "way, package", [("by_fully_shard", "torch"), ("by_accelerate", "accelerate"), ("by_zero_3", "deepspeed")]
)
def test_six_steps_equal_hooks_on_an_unsharded_stock_model(way, package, kind, tmp_path):
    pytest.importorskip(package)
    if kind == "litgpt":
        litgpt()
    forked.run_ranks(__file__, "train", way, kind, str(tmp_path))
