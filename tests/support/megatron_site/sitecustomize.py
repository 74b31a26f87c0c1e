"""For tests: an unmodified ``pretrain_gpt.py`` on a machine without CUDA, over gloo.

Python imports this at start-up when the folder is on PYTHONPATH; it acts with MEGATRON_ON_CPU=1
and where there is no GPU. ``torch.cuda`` gets answers, arithmetic stays torch's. With
MEGATRON_PROBE=1 rank 0 also prints the standard deviation of the residual output projections, with
MEGATRON_NO_HOOK=1 the start-up hook of olmo-lns is taken out again, as if there were none.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import types
from pathlib import Path
from typing import Any, Callable

_kept: list[Any] = []  # a context manager that is collected, ends


class Stream:
    """A CUDA stream or event on a machine that has none."""

    cuda_stream = priority = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = None

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *args: Any) -> None:
        return None

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0

    def record_event(self, *args: Any) -> Stream:
        return Stream()

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


def answer_cuda() -> None:
    import torch
    import torch.utils.data
    from support.megatron_cpu import cuda_answered

    cuda: Any = torch.cuda
    if cuda.is_available():
        return
    _kept.append(answers := cuda_answered())
    answers.__enter__()
    properties = types.SimpleNamespace(major=8, minor=0, total_memory=1 << 34, name="cpu", multi_processor_count=1)
    stream = Stream()
    values: dict[str, Any] = {
        "is_available": True,
        "device_count": 1,
        "current_stream": stream,
        "default_stream": stream,
        "memory_stats": {},
        "mem_get_info": (1 << 34, 1 << 34),
        "get_device_capability": (8, 0),
        "get_device_name": "cpu",
        "get_device_properties": properties,
        "is_current_stream_capturing": False,
        "is_bf16_supported": True,
    }
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

    def unpinned(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **(kwargs | {"pin_memory": False}))

    loader.__init__ = unpinned  # type: ignore[method-assign]


def no_fused_kernels(module: Any) -> None:
    """Up to 0.16 ``load`` compiles with nvcc."""
    module.load = lambda args: None


def probe(module: Any) -> None:
    setup = module.setup_model_and_optimizer

    @functools.wraps(setup)  # olmo-lns looks at the source of what it replaces
    def probed(*args: Any, **kwargs: Any) -> Any:
        result = setup(*args, **kwargs)
        if int(os.environ.get("RANK", 0)) == 0:
            for kind in ("linear_proj", "linear_fc2", "linear_qkv"):
                weights = [
                    p.detach().float().flatten()
                    for chunk in result[0]
                    for name, p in chunk.named_parameters()
                    if name.endswith(f"{kind}.weight")
                ]
                print(f"probe: std {kind} {float(__import__('torch').cat(weights).std()):.5f}", flush=True)
        return result

    module.setup_model_and_optimizer = probed


class AfterImport:
    """Runs one function after one module, for as long as it is asked."""

    def __init__(self, actions: dict[str, Callable[[Any], None]]) -> None:
        self.actions = actions

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        action = self.actions.pop(name, None)
        if action is None:
            return None
        spec = next((s for f in sys.meta_path if f is not self and (s := f.find_spec(name, path, target))), None)
        if spec is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            action(module)

        spec.loader.exec_module = exec_module
        return spec


def start() -> None:
    import typing

    import typing_extensions

    if not hasattr(typing, "override"):  # main is written for Python 3.12
        typing.override = typing_extensions.override  # type: ignore[attr-defined]
    sys.path.insert(1, str(Path(__file__).resolve().parents[2]))
    if os.environ.get("MEGATRON_NO_HOOK") == "1":
        sys.meta_path[:] = [f for f in sys.meta_path if not getattr(f, "olmo_lns_start_up", False)]
    answer_cuda()
    actions: dict[str, Callable[[Any], None]] = {"megatron.legacy.fused_kernels": no_fused_kernels}
    if os.environ.get("MEGATRON_PROBE") == "1":
        actions["megatron.training.training"] = probe
    sys.meta_path.insert(0, AfterImport(actions))


if os.environ.get("MEGATRON_ON_CPU") == "1":
    start()
