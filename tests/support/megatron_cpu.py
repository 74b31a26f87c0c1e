"""Let megatron-core run without CUDA, over gloo. Import this before megatron.

Only Megatron's calls of ``torch.cuda`` get other answers; no arithmetic is replaced. Where there is
a GPU, nothing changes.
"""

import contextlib
import os
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode


def on_cpu(device):
    """``device`` with cuda replaced by cpu."""
    if isinstance(device, torch.device):
        return torch.device("cpu") if device.type == "cuda" else device
    if isinstance(device, str) and device.startswith("cuda"):
        return "cpu"
    return device


class CudaToCpu(TorchFunctionMode):
    """``device="cuda"`` literals become cpu, ``x.cuda()`` is x, ``x.type()`` names a cuda tensor."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
        if func is torch.Tensor.to:
            args = tuple(on_cpu(x) for x in args)
        return func(*args, **kwargs)


@contextlib.contextmanager
def cuda_answered():
    """Install the shims for the length of a ``with``, unless there is a GPU."""
    if torch.cuda.is_available():
        yield
        return
    cuda = torch.cuda
    patches = [
        (cuda, "current_device", lambda: "cpu"),
        (cuda, "synchronize", lambda *a, **k: None),
        (cuda, "current_stream", lambda *a, **k: mock.MagicMock(name="the only stream")),
        (cuda, "get_rng_state", lambda *a, **k: torch.get_rng_state()),
        (cuda.random, "get_rng_state", lambda *a, **k: torch.get_rng_state()),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, value in patches:
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(CudaToCpu())
        yield


@contextlib.contextmanager
def single_process():
    """Shims, one gloo process and Megatron's parallel state; everything is taken down again."""
    import torch.distributed as dist

    with cuda_answered():
        initialize()
        try:
            yield
        finally:
            from megatron.core import parallel_state

            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()


def initialize(tp=1, pp=1, vpp=None, seed=1234):
    """Start gloo from RANK and WORLD_SIZE (one process by default) and Megatron's parallel state."""
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel

    if not dist.is_initialized():
        rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        if world == 1:
            dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        else:
            dist.init_process_group("gloo", rank=rank, world_size=world)
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tp, pp, virtual_pipeline_model_parallel_size=vpp)
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):  # 0.16.1 without TE: a NameError in the router
        moe_utils.te_general_gemm = None
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed, inference_rng_tracker=True, force_reset_rng=True)
