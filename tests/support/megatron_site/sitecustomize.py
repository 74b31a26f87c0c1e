"""Let tests run an unmodified ``pretrain_gpt.py`` on a machine without CUDA, over gloo.

Python imports this at start-up when the folder is on PYTHONPATH; it acts where
MEGATRON_ON_CPU=1 is set and there is no GPU. It answers calls of ``torch.cuda``; the arithmetic stays
torch's. With MEGATRON_NO_HOOK=1 the start-up hook of olmo-lns is removed, as if it had never been installed; with
MEGATRON_REFERENCE=1 the GPTModel is made the reference: hooks on both norms of each block, and plain initialization.
"""

import contextlib
import functools
import importlib.machinery
import os
import sys
import types
from pathlib import Path
from unittest import mock

_kept = []  # a context manager ends when it is collected


class Stream(mock.MagicMock):
    """A CUDA stream or event on a machine that has none."""

    def __init__(self, *args, **kwargs):
        super().__init__()
        self.cuda_stream = self.priority = 0
        self.elapsed_time = lambda other: 0.0


def answer_cuda():
    import torch
    import torch.utils.data
    from support.megatron_cpu import cuda_answered

    cuda = torch.cuda
    if cuda.is_available():
        return
    _kept.append(answers := cuda_answered())
    answers.__enter__()
    properties = types.SimpleNamespace(major=8, minor=0, total_memory=1 << 34, name="cpu", multi_processor_count=1)
    values = dict(
        is_available=True, device_count=1, memory_stats={}, mem_get_info=(1 << 34, 1 << 34), is_bf16_supported=True,
        get_device_name="cpu", get_device_capability=(8, 0), get_device_properties=properties,
        is_current_stream_capturing=False,
    )  # fmt: skip
    values |= dict.fromkeys(("current_stream", "default_stream"), Stream())
    values |= dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"), 0)
    values |= dict.fromkeys(
        ("set_device", "set_stream", "empty_cache", "reset_peak_memory_stats", "manual_seed", "manual_seed_all")
    )
    for name, value in values.items():
        setattr(cuda, name, lambda *args, value=value, **kwargs: value)
    cuda.Stream = cuda.Event = Stream
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda *args, **kwargs: None
    loader = torch.utils.data.DataLoader
    init = loader.__init__

    def unpinned(self, *args, **kwargs):
        init(self, *args, **(kwargs | {"pin_memory": False}))

    loader.__init__ = unpinned


class AfterImport:
    """A finder that calls a function with a module of its table right after the module is executed."""

    def __init__(self, table):
        self.table = table

    def find_spec(self, name, path=None, target=None):
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name in self.table else None
        if spec is not None:
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                self.table[name](module)

            spec.loader.exec_module = exec_module
        return spec


def reference(module):
    """Scale by hooks, count the blocks here, and take the depth factor off the output projections' draw."""
    init = module.GPTModel.__init__

    @functools.wraps(init)
    def referenced(self, *args, **kwargs):
        from megatron.core import parallel_state
        from support.hooked import drawn_plain, hooked

        init(self, *args, **kwargs)
        blocks, rank = self.decoder.layers, parallel_state.get_pipeline_model_parallel_rank()
        first = 1 + rank * len(blocks)
        hooked(self, numbers=range(first, first + len(blocks)))
        drawn_plain(self, lambda number, count: (2 * self.config.num_layers) ** 0.5)

    module.GPTModel.__init__ = referenced


def no_fused_kernels(module):
    """Up to 0.16 ``load`` compiles with nvcc."""
    module.load = lambda args: None


def start():
    import typing

    import typing_extensions

    if not hasattr(typing, "override"):  # main is written for Python 3.12
        typing.override = typing_extensions.override
    sys.path.insert(1, str(Path(__file__).resolve().parents[2]))
    if os.environ.get("MEGATRON_NO_HOOK") == "1":
        from support.start_up import remove_start_up_hook

        remove_start_up_hook()
    answer_cuda()
    table = {"megatron.legacy.fused_kernels": no_fused_kernels}
    if os.environ.get("MEGATRON_REFERENCE") == "1":
        table["megatron.core.models.gpt.gpt_model"] = reference
    sys.meta_path.insert(0, AfterImport(table))


if os.environ.get("MEGATRON_ON_CPU") == "1":
    start()
