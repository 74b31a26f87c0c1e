"""``plain_initialization`` of weights that are drawn later, and of shards."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from support import forked
from support.drawn_models import constant, draw, nanogpt, open_lm, stds, wide
from torch import nn
from torch.distributed.fsdp import fully_shard

import olmo_lns


@pytest.mark.parametrize("call", [olmo_lns.apply, olmo_lns.plain_initialization])
def test_weights_may_be_drawn_after_the_projections_are_found(call):
    model = call(wide(constant).to("meta"))
    later = draw(copy.deepcopy(model).to_empty(device="cpu"), nanogpt)
    assert stds(later)[0][3] == pytest.approx(0.005, rel=0.1)
    o, down, others = stds(olmo_lns.plain_initialization(later))
    assert [*o, *down] == pytest.approx([0.02] * 16, rel=0.1) and others == pytest.approx(0.02, rel=0.1)


def sharded(rank, world, folder, kind):
    """Each process draws its shards of a model that was sharded on the meta device, then makes them plain."""
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    model = olmo_lns.apply(wide(constant).to("meta"))
    for block in model.layers.values():
        fully_shard(block)
    fully_shard(model)
    draw(model.to_empty(device="cpu"), {"nanogpt": nanogpt, "open_lm": open_lm}[kind])
    for name, parameter in model.named_parameters():
        if not name.startswith("layers."):  # empty memory may hold NaN, which equals nothing
            nn.init.ones_(parameter)
    before = {name: weight.full_tensor() for name, weight in model.state_dict().items()}
    olmo_lns.plain_initialization(model)
    for name, weight in model.state_dict().items():
        block = int(name.split(".")[1]) if name.startswith("layers.") else 0
        factor = 4.0 if kind == "nanogpt" else math.sqrt(2 * block + 2)
        projects = name.endswith(("o.weight", "down.weight"))
        torch.testing.assert_close(weight.full_tensor(), before[name] * (factor if projects else 1.0), rtol=0, atol=0)
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nanogpt", "open_lm"])
def test_two_processes_make_their_shards_plain(kind, tmp_path):
    forked.run_ranks(__file__, "sharded", 2, str(tmp_path), kind)


def partition(model):
    """Leave of each matrix what DeepSpeed ZeRO-3 leaves: no elements, the full shape, and this process's shard."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.dim() > 1:
                shard = torch.cat([parameter.detach().flatten(), torch.zeros(3)])
                left = nn.Parameter(torch.empty(0))
                left.ds_shape, left.ds_numel, left.ds_tensor = parameter.shape, parameter.numel(), shard
                left.ds_process_group = dist.group.WORLD
                setattr(module, name, left)


def test_the_shards_of_deepspeed_are_made_plain(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        model = olmo_lns.apply(wide(nanogpt))
        before = model.layers["2"].down.weight.detach().clone().flatten()
        partition(model)
        olmo_lns.plain_initialization(model)
        shard = model.layers["2"].down.weight.ds_tensor
        torch.testing.assert_close(shard, torch.cat([before * 4.0, torch.zeros(3)]), rtol=0, atol=0)
    finally:
        dist.destroy_process_group()
