#!/usr/bin/env python3
"""Time OLMo's norms and training step: stock, under LayerNorm Scaling, and with a multiplication after the stock norm.

    python scripts/bench.py --quick --json docs/bench/cpu.json             about 4 minutes on two idle cores
    python scripts/bench.py --json docs/bench/cpu.json                     everything, about half an hour
    python scripts/bench.py --device cuda --minutes 5 --json gpu.json      on a GPU

An arm is one way to build the same thing:

    stock                     OLMo's class
    stock, again              the same a second time: its ratio to stock is the noise
    lns                       OLMo's class under this package, with PyTorch's norms
    lns, te                   the same with Transformer Engine's kernels; on CUDA, where they can be loaded
    stock, then multiplied    norm(x) * s, which a user would write without this package

Each round runs every arm once, in random order, and ratios are taken within a round. The report has the median of the
ratios and its 95 % interval by order statistics. A norm case is ten forward and backward passes. A step case is
forward, cross-entropy, backward, clipping and AdamW on random tokens. bf16 is autocast, as in OLMo's launches.
scripts/bench_docs.py writes the tables of the documentation from the reports in docs/bench.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import math
import os
import platform
import random
import re
import shlex
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterator, Sequence

import torch
from bench_docs import DOCS, HEADER, cells, commit

#: Layers, width, heads, SwiGLU inner width, vocabulary, sequence length, sequences per step. All arms of a case are in
#: memory together; one of the size 1B takes 20 GB.
SIZES = {
    "tiny": (2, 32, 2, 64, 64, 16, 1),
    "small": (8, 128, 4, 512, 512, 256, 2),
    "60M": (8, 512, 8, 2048, 50_304, 4096, 8),
    "150M": (12, 768, 12, 3072, 50_304, 4096, 8),
    "1B": (16, 2048, 16, 8192, 50_304, 2048, 4),
}
#: Number of tokens and width of a norm's input.
SHAPES = {"cpu": ((512, 256), (2048, 2048)), "cuda": ((8192, 1024), (8192, 4096))}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
#: Number of forward and backward passes in one measurement of a norm.
PASSES = 10
#: With fewer rounds no interval of 95 % exists.
FEWEST_ROUNDS = 6
Work = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Arm:
    """A way to build a norm or a model: the beginning of the norm's type, the backend, a multiplication afterwards."""

    prefix: str = ""
    backend: str = "torch"
    multiplied: bool = False


ARMS = {
    "stock": Arm(),
    "stock, again": Arm(),
    "lns": Arm("lns_"),
    "lns, te": Arm("lns_", "te"),
    "stock, then multiplied": Arm(multiplied=True),
}


@dataclass(frozen=True)
class How:
    """The settings that all arms of a case share: the device, the dtype of autocast, compilation, sharding."""

    device: torch.device
    dtype: str = "fp32"
    compiled: bool = False
    fsdp: bool = False

    def __str__(self) -> str:
        return ", ".join([self.dtype, *["compiled"] * self.compiled, *["FSDP2"] * self.fsdp])

    def autocast(self) -> Any:
        if self.dtype == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, DTYPES[self.dtype])


class Multiplied(torch.nn.Module):
    """Multiply the output of a norm by a factor."""

    def __init__(self, norm: torch.nn.Module, factor: float) -> None:
        super().__init__()
        self.norm, self.factor = norm, factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x) * self.factor


def config(kind: str, size: str, device: torch.device, **changes: Any) -> Any:
    """Return an OLMo ``ModelConfig``."""
    from olmo.config import ModelConfig

    layers, width, heads, inner, vocabulary, length, _ = SIZES[size]
    values = dict(n_layers=layers, d_model=width, n_heads=heads, mlp_hidden_size=2 * inner, max_sequence_length=length)
    values |= dict(vocab_size=vocabulary, embedding_size=vocabulary, layer_norm_type=kind, init_device=device.type)
    values |= dict(layer_norm_with_affine=True, activation_type="swiglu", rope=True, init_fn="normal")
    values |= dict.fromkeys(("include_bias", "weight_tying"), False)
    values |= dict.fromkeys(("attention_dropout", "residual_dropout", "embedding_dropout"), 0.0)
    return ModelConfig.new(**{**values, **changes})


def build(arm: Arm, model_config: Any) -> Any:
    """Return a model of OLMo under an arm."""
    from olmo.model import OLMo

    os.environ["OLMO_LNS_NORM_BACKEND"] = arm.backend  # read when the norms are built
    model = OLMo(model_config)
    if arm.multiplied:
        for number, block in enumerate(model.transformer.blocks, start=1):
            block.attn_norm = Multiplied(block.attn_norm, number**-0.5)
            block.ff_norm = Multiplied(block.ff_norm, number**-0.5)
    return model


def norm(arm: Arm, kind: str, shape: tuple[int, int], how: How) -> Work:
    """Return a function that runs the attention norm of block 7 forward and backward."""
    model_config = config(arm.prefix + kind, "small", torch.device("meta"), d_model=shape[1], mlp_hidden_size=8)
    module = build(arm, model_config).transformer.blocks[6].attn_norm.to_empty(device=how.device)
    for parameter in module.parameters():
        torch.nn.init.ones_(parameter)
    if how.compiled:
        module.compile()
    x = torch.randn(shape, device=how.device, dtype=DTYPES[how.dtype], requires_grad=True)
    with how.autocast():
        dy = torch.randn_like(module(x))

    def work() -> torch.Tensor:
        for _ in range(PASSES):
            x.grad = None
            with how.autocast():
                y = module(x)
            y.backward(dy)
        return y.detach()

    return work


def step(arm: Arm, size: str, how: How) -> Work:
    """Return a function that runs one optimizer step of a model and returns its loss."""
    *_, vocabulary, length, sequences = SIZES[size]
    torch.manual_seed(0)
    model = build(arm, config(f"{arm.prefix}rms", size, how.device)).train()
    if how.fsdp:
        shard(model, how.device)
    if how.compiled:
        for block in model.transformer.blocks:
            block.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=how.device.type == "cuda")
    tokens = torch.randint(0, vocabulary, (sequences, length), device=how.device)

    def work() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        with how.autocast():
            logits = model(tokens).logits
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    return work


def shard(model: Any, device: torch.device) -> None:
    """Shard a model by FSDP2, block by block, over a process group of this process alone."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    for block in model.transformer.blocks:
        fully_shard(block)
    fully_shard(model)


def seconds_of(work: Work, device: torch.device) -> float:
    """Time ``work``: wall time on CUDA; on a CPU the time of this process, which other processes disturb less."""
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    start = clock()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return clock() - start


def median_and_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median and its 95 % interval by order statistics: the 6th of 21 values from either end.

    >>> median_and_interval(range(21))
    (10, 5, 15)
    """
    count, rank = len(values), 0
    tail = 0.5**count  # probability that the interval from rank 1 misses the median on one side
    while tail <= 0.025:
        rank += 1
        tail += math.comb(count, rank) / 2**count
    ordered = sorted(values)
    return statistics.median(ordered), ordered[rank - 1], ordered[count - rank]


def compare(
    works: dict[str, Work], device: torch.device, rounds: int, warmup: int, deadline: float
) -> dict[str, dict[str, Any]]:
    """Return the milliseconds of each arm, its ratio to the first arm, which is stock, and to the last.

    :param deadline: reading of ``time.monotonic`` after which no more than the fewest rounds are run.
    """
    order, seconds = random.Random(0), {name: [] for name in works}
    for number in range(warmup + rounds):
        if number >= warmup + FEWEST_ROUNDS and time.monotonic() > deadline:
            break
        for name in order.sample(list(works), len(works)):
            elapsed = seconds_of(works[name], device)
            if number >= warmup:
                seconds[name].append(elapsed)

    def ratio(values: list[float], base: str) -> tuple[float, float, float]:
        return median_and_interval([arm / other for arm, other in zip(values, seconds[base], strict=True)])

    return {
        name: {
            "milliseconds": 1e3 * statistics.median(values),
            "rounds": len(values),
            "ratio": ratio(values, "stock"),
            "ratio_to_multiplied": ratio(values, "stock, then multiplied"),
        }
        for name, values in seconds.items()
    }


def first_losses(size: str, how: How, arms: dict[str, Arm]) -> dict[str, dict[str, float]]:
    """Return the loss of each arm's first step, sharded and whole."""
    whole = How(how.device, how.dtype)
    return {
        name: {"sharded": float(step(arm, size, how)()), "whole": float(step(arm, size, whole)())}
        for name, arm in arms.items()
    }


def environment(device: torch.device) -> dict[str, Any]:
    """Return the command, commit, versions and machine of the measurement."""
    from olmo_lns.norm.transformer_engine import availability

    models = re.findall(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device_type": device.type,
        "transformer_engine": availability().version if device.type == "cuda" else None,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else (models or ["unknown"])[0],
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg(),
    }


def arms_on(device: torch.device) -> dict[str, Arm]:
    """Return the arms that can run on a device; those of Transformer Engine only where its kernels can be loaded."""
    from olmo_lns.norm.transformer_engine import availability

    without_te = device.type != "cuda" or availability().problem
    return {name: arm for name, arm in ARMS.items() if arm.backend != "te" or not without_te}


def cases(options: argparse.Namespace, device: torch.device) -> Iterator[tuple[str, Callable[[Arm], Work]]]:
    """Yield the name of each case and the function that builds an arm of it."""
    hows = [
        How(device, dtype, mode == "compiled", options.fsdp)
        for mode, dtype in itertools.product(options.modes, options.dtypes)
    ]
    shapes = options.shapes or (SHAPES[device.type][-1:] if options.quick else SHAPES[device.type])
    for how, base, shape in itertools.product(hows, ("rms", "default"), shapes if options.cases != "step" else ()):
        name = f"norm {base}, {shape[0]} x {shape[1]}, {how}"
        yield name, lambda arm, b=base, s=shape, h=how: norm(arm, b, s, h)
    for how, size in itertools.product(hows, options.sizes if options.cases != "norm" else ()):
        if options.quick and how.compiled and options.cases == "both":
            continue  # compiling the blocks of a model takes longer than all norms
        yield f"step {size}, {how}", lambda arm, s=size, h=how: step(arm, s, h)


def shape_of(text: str) -> tuple[int, int]:
    """Read a shape.

    >>> shape_of("512x256")
    (512, 256)
    """
    tokens, width = text.split("x")
    return int(tokens), int(width)


def main(argv: Sequence[str] | None = None) -> int:
    committed = json.loads((DOCS / "bench" / "cpu.json").read_text(encoding="utf-8"))["environment"]["command"]
    description = f"{__doc__}\nThe committed docs/bench/cpu.json is from: {committed}"
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="?", choices=("norm", "step", "both"), default="both")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--sizes", nargs="+", choices=tuple(SIZES), help="default: small on CPU, 60M 150M on CUDA")
    parser.add_argument("--shapes", nargs="+", type=shape_of, metavar="TOKENSxWIDTH", help="of a norm's input")
    parser.add_argument("--dtypes", nargs="+", choices=tuple(DTYPES), default=list(DTYPES))
    parser.add_argument("--modes", nargs="+", choices=("eager", "compiled"), default=["eager", "compiled"])
    parser.add_argument(
        "--fsdp", action="store_true", help="shard the model of the step by FSDP2 over this one process"
    )
    parser.add_argument("--quick", action="store_true", help="the larger norm only, no compiled step, 4 minutes")
    parser.add_argument("--minutes", type=float, help="share this time among the cases; each has 6 rounds at least")
    parser.add_argument("--rounds", type=int, default=41, help="most rounds of a case (41)")
    parser.add_argument("--warmup", type=int, default=3, help="rounds before those that count (3)")
    parser.add_argument("--threads", type=int, default=1, help="threads of PyTorch on a CPU (1)")
    parser.add_argument("--json", type=Path, help="file for the report, written after each case")
    options = parser.parse_args(argv)
    if options.rounds < FEWEST_ROUNDS:
        parser.error("--rounds: expected at least 6: with fewer no interval of 95 % exists")
    if options.fsdp and (options.cases != "step" or "compiled" in options.modes):
        parser.error("--fsdp shards the model of an eager step; give it as: step --modes eager --fsdp")
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device: torch.cuda.is_available() is False here")
    torch.set_num_threads(options.threads)
    options.sizes = options.sizes or (["60M", "150M"] if device.type == "cuda" else ["small"])
    minutes = options.minutes or (4 if options.quick else math.inf)
    end, listed, arms = time.monotonic() + 60 * minutes, list(cases(options, device)), arms_on(device)
    report: dict[str, Any] = {"environment": environment(device), "cases": {}}
    print(HEADER)
    for number, (case, make) in enumerate(listed):
        torch._dynamo.reset()
        now = time.monotonic()
        deadline = now + (end - now) / (len(listed) - number)
        works = {name: make(arm) for name, arm in arms.items()}
        report["cases"][case] = results = compare(works, device, options.rounds, options.warmup, deadline)
        for arm, result in results.items():
            print(cells(case, arm, result), flush=True)
        if options.json:
            options.json.write_text(json.dumps(report, indent=1) + "\n")
        del works
    if options.fsdp:
        how = How(device, options.dtypes[0], fsdp=True)
        report["first_losses"] = first_losses(options.sizes[0], how, arms)
        if options.json:
            options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
