"""FSDP over gloo, two processes: the same loss and gradients as one process on all the data."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from support import tex
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.checkpoint import checkpoint

from olmo_lns import lns_scale
from olmo_lns.norm import choose_backend, layer_norm, rms_norm

WIDTH, LAYERS, WORLD = 32, 4, 2


class Block(torch.nn.Module):
    def __init__(self, number, backend):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.bias = torch.nn.Parameter(torch.randn(WIDTH) * 0.1)
        self.linear = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.lns_scale, self.backend = lns_scale(number), backend

    def forward(self, x):
        return x + checkpoint(self.inner, x, use_reentrant=False)

    def inner(self, x):
        y = rms_norm(x, self.weight, 1e-6, self.lns_scale, backend=self.backend)
        return self.linear(layer_norm(y, self.weight, self.bias, 1e-6, self.lns_scale, backend=self.backend))


def build(backend):
    torch.manual_seed(0)
    return torch.nn.Sequential(*(Block(number, backend) for number in range(1, LAYERS + 1)))


def data():
    return torch.randn(WORLD * 3, WIDTH, generator=torch.Generator().manual_seed(1))


def step(model, x, scale):
    loss = model(x).square().mean() * scale
    loss.backward()
    return loss.detach().float()


def worker(rank, name, low_precision, store, queue):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    with tex.installed():
        mixed = MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16) if low_precision else None
        model = FSDP(
            build(choose_backend(name)),
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            mixed_precision=mixed,
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
        x = data()[rank * 3 : rank * 3 + 3]
        loss = step(model, x.bfloat16() if low_precision else x, 1.0)
        dist.all_reduce(loss)
        called = len(tex.CALLS) if rank == 0 else 0
        with FSDP.summon_full_params(model, with_grads=True):
            grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        if rank == 0:
            queue.put(
                (
                    float(loss) / WORLD,
                    called,
                    {k.replace("_fsdp_wrapped_module.", ""): v.numpy() for k, v in grads.items()},
                )
            )
        dist.barrier()
    dist.destroy_process_group()


@pytest.mark.exhaustive  # the same under OLMo's own wrapping: tests/upstream/olmo/test_strategies.py
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "low_precision"),
    [
        pytest.param("torch", False, id="torch-fp32"),
        pytest.param("te", True, id="te-bf16-mixed"),
        pytest.param("torch", True, id="torch-bf16-mixed"),
        pytest.param("te", False, id="te-fp32"),
    ],
)
def test_two_ranks_equal_one_process(name, low_precision, tmp_path):
    queue = mp.get_context("spawn").SimpleQueue()
    context = mp.spawn(worker, (name, low_precision, tmp_path / "store", queue), nprocs=WORLD, join=False)
    loss, called, grads = queue.get()
    while not context.join():
        continue
    assert (called > 0) is (name == "te")
    single = build(choose_backend("torch"))
    expected = step(single, data(), 1.0)
    tolerance = 5e-2 if low_precision else 1e-5
    assert loss == pytest.approx(float(expected), rel=tolerance)
    for key, parameter in single.named_parameters():
        error = (torch.from_numpy(grads[key]) - parameter.grad).norm() / parameter.grad.norm()
        assert error < tolerance, key
