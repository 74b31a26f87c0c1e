#!/usr/bin/env python3
"""Time a norm and a training step of OLMo under LayerNorm Scaling and stock, with confidence intervals.

    python scripts/bench.py --json docs/bench/cpu.json                    norms, then the step of a small model
    python scripts/bench.py step --device cuda --sizes 60M 1B --compile   on a GPU, blocks compiled one by one

Each round runs every arm once, in random order; ratios are taken within a round. The report has the median of the
ratios and its 95 % interval by order statistics. The arm "stock, again" shows the noise. A norm case is ten forward and
backward passes of OLMo's class. A step case is forward, cross-entropy, backward, clipping and AdamW on random tokens.
CUDA uses bf16 autocast; the CPU uses fp32.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import random
import re
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable, Sequence

import torch

#: Layers, width, heads, SwiGLU inner width, vocabulary, sequence length, sequences per step.
SIZES = {
    "small": (8, 128, 4, 512, 512, 256, 2),
    "60M": (8, 512, 8, 2048, 50_304, 4096, 8),
    "150M": (12, 768, 12, 3072, 50_304, 4096, 8),
    "1B": (16, 2048, 16, 8192, 50_304, 2048, 4),
}
#: Number of tokens and width of a norm's input.
SHAPES = {"cpu": ((512, 256), (2048, 2048)), "cuda": ((8192, 1024), (8192, 4096))}
#: Number of forward and backward passes in one measurement of a norm.
PASSES = 10
Work = Callable[[], object]


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


def autocast(device: torch.device) -> Any:
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else contextlib.nullcontext()


def norm(kind: str, shape: tuple[int, int], device: torch.device) -> Work:
    """Return a function that runs the attention norm of block 7 forward and backward, stock or scaled."""
    from olmo.model import OLMo

    model_config = config(kind, "small", device, d_model=shape[1], mlp_hidden_size=8)
    module = OLMo(model_config).transformer.blocks[6].attn_norm
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
    with autocast(device):
        dy = torch.randn_like(module(x))

    def work() -> None:
        for _ in range(PASSES):
            x.grad = None
            with autocast(device):
                y = module(x)
            y.backward(dy)

    return work


def step(kind: str, size: str, device: torch.device, compiled: bool) -> Work:
    """Return a function that runs one optimizer step of a model."""
    from olmo.model import OLMo

    *_, vocabulary, length, sequences = SIZES[size]
    torch.manual_seed(0)
    model = OLMo(config(kind, size, device)).train()
    if compiled:
        for block in model.transformer.blocks:
            block.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=device.type == "cuda")
    tokens = torch.randint(0, vocabulary, (sequences, length), device=device)

    def work() -> None:
        optimizer.zero_grad(set_to_none=True)
        with autocast(device):
            logits = model(tokens).logits
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return work


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


def compare(works: dict[str, Work], device: torch.device, rounds: int, warmup: int) -> dict[str, Any]:
    """Return the milliseconds of each arm and its ratio to the first arm, which is stock."""
    order, seconds = random.Random(0), {name: [] for name in works}
    for number in range(warmup + rounds):
        for name in order.sample(list(works), len(works)):
            elapsed = seconds_of(works[name], device)
            if number >= warmup:
                seconds[name].append(elapsed)
    stock = next(iter(seconds.values()))
    return {
        name: {
            "milliseconds": 1e3 * statistics.median(values),
            "ratio": median_and_interval([arm / base for arm, base in zip(values, stock, strict=True)]),
        }
        for name, values in seconds.items()
    }


def environment(device: torch.device) -> dict[str, Any]:
    """Return the command, commit, versions and machine of the measurement."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    models = re.findall(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {
        "command": shlex.join(["python", *sys.argv]),
        "commit": subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else (models or ["unknown"])[0],
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg(),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="?", choices=("norm", "step", "both"), default="both")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--sizes", nargs="+", choices=tuple(SIZES), help="default: small on CPU, 60M 150M 1B on CUDA")
    parser.add_argument("--compile", action="store_true", help="compile the blocks of the step")
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--json", type=Path, help="file for the report")
    options = parser.parse_args(argv)
    if options.rounds < 6:
        parser.error("--rounds: expected at least 6: with fewer no interval of 95 % exists")
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device: torch.cuda.is_available() is False here")
    arms = {"stock": "", "stock, again": "", "lns": "lns_"}
    cases: list[tuple[str, Callable[[str], Work]]] = []
    for base, shape in itertools.product(("rms", "default"), SHAPES[device.type] if options.cases != "step" else ()):
        name = f"norm {base}, {shape[0]} x {shape[1]}"
        cases.append((name, lambda prefix, b=base, s=shape: norm(prefix + b, s, device)))
    sizes = options.sizes or (["60M", "150M", "1B"] if device.type == "cuda" else ["small"])
    for size in sizes if options.cases != "norm" else ():
        name = f"step {size}{', compiled' if options.compile else ''}"
        cases.append((name, lambda prefix, s=size: step(f"{prefix}rms", s, device, options.compile)))
    report = {"environment": environment(device), "rounds": options.rounds, "cases": {}}
    print("| case | arm | ms | / stock (95 % interval) |\n| --- | --- | --- | --- |")
    for case, make in cases:
        torch._dynamo.reset()
        results = compare({arm: make(prefix) for arm, prefix in arms.items()}, device, options.rounds, options.warmup)
        report["cases"][case] = results
        for arm, result in results.items():
            ratio, low, high = result["ratio"]
            print(f"| {case} | {arm} | {result['milliseconds']:.3g} | {ratio:.3f} ({low:.3f}-{high:.3f}) |", flush=True)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
