#!/usr/bin/env python3
"""Time a whole training step of OLMo-core models: its own Pre-LN block against ours, with and without torch.compile.

    OMP_NUM_THREADS=1 python scripts/bench_olmo_core.py --json docs/bench/olmo-core-cpu.json
    python scripts/bench_olmo_core.py --device cuda --sizes 60M 150M 1B --json docs/bench/olmo-core-h200.json

Steps, rounds and sizes as in bench_step.py. The arm "preln again" is the stock block a second time: what its ratio
differs from 1 by is noise.
"""

from __future__ import annotations

import argparse
import contextlib
from typing import Any, Callable, Sequence

import bench_step
import benchlib
import torch
from olmo_core.nn.transformer import TransformerConfig

from olmo_lns.integrations import norm_sites
from olmo_lns.olmo_core import apply


def build(size: str, arm: str, device: torch.device, compiled: bool) -> Any:
    """An OLMo-core model on ``device``; the arms have the same weights."""
    layers, width, heads, inner, length, _ = bench_step.SIZES[size]
    config = TransformerConfig.llama_like(
        d_model=width,
        vocab_size=512 if size == "small" else 50_304,
        n_layers=layers,
        n_heads=heads,
        rope_theta=10_000,
        layer_norm_eps=1e-6,
    )
    config.block.feed_forward.hidden_size = inner
    model = (apply(config) if arm == "lns" else config).build(init_device="meta")
    model.init_weights(max_seq_len=length, device=device)
    if compiled:
        model.apply_compile()
    return model.train()


def training_step(model: Any, tokens: torch.Tensor, device: torch.device) -> Callable[[], torch.Tensor]:
    """One optimizer step on ``tokens``; returns the loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=device.type == "cuda")

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else contextlib.nullcontext():
            logits = model(tokens)
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    return step


def measure(size: str, compiled: bool, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Step times of every arm and their ratio to the stock block."""
    torch._dynamo.reset()
    length, sequences = bench_step.SIZES[size][4:]
    tokens = torch.randint(0, 512 if size == "small" else 50_304, (sequences, length), device=device)
    models = {arm: build(size, arm, device, compiled) for arm in (bench_step.PRELN, "preln again", "lns")}
    steps = {arm: training_step(model, tokens, device) for arm, model in models.items()}
    timer = benchlib.cuda_seconds if device.type == "cuda" else benchlib.CLOCKS[options.clock]
    seconds = benchlib.interleaved(steps, timer, options.rounds, options.warmup)
    results = {}
    for arm, values in seconds.items():
        spread = benchlib.spread(values)
        backends = [module.lns_backend.name for _, module, _ in norm_sites.sites(models[arm])]
        results[arm] = {
            "milliseconds": {key: value * 1e3 for key, value in spread.items()},
            "ratio_to_preln": benchlib.ratio(values, seconds[bench_step.PRELN]),
            "tokens_per_second": sequences * length / spread["median"],
            "norm": backends[0] if backends else "olmo-core",
        }
    return {"size": size, "compile": compiled, "sequences": sequences, "length": length, "results": results}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=tuple(bench_step.SIZES), default=["small"])
    benchlib.add_compile(parser, "both")
    benchlib.add_options(parser, warmup=4)
    options = parser.parse_args(argv)
    device = benchlib.require_device(options.device)
    return benchlib.run(options, device, benchlib.by_compile(options.sizes, options), measure, bench_step.table)


if __name__ == "__main__":
    raise SystemExit(main())
