#!/usr/bin/env python3
"""Time generation token by token, batch 1: stock Pre-LN against LayerNorm Scaling, keys and values cached.

    OMP_NUM_THREADS=1 python scripts/bench_generate.py --json docs/bench/generate-cpu.json
    python scripts/bench_generate.py --device cuda --sizes 60M 150M 1B --dtype bf16 --json docs/bench/generate-h200.json

A round of an arm is --tokens greedy steps of one token each after a prompt of 16, which is read once and not timed.
The arms take turns in random order; ratios are taken within each round. At this size of input a norm costs what it
takes to launch it, so this is where Python operations show.
"""

from __future__ import annotations

import argparse
from typing import Any, Callable, Sequence

import benchlib
import torch
from bench_step import SIZES, build

from olmo_lns.norm.backend import NAMES

PROMPT = 16
#: Stock type of norm -> its scaled one.
NORMS = {"rms": "lns_rms", "default": "lns_default"}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def generation(model: Any, prompt: torch.Tensor, tokens: int) -> Callable[[], torch.Tensor]:
    """Greedy steps of one token each; returns the last token."""
    with torch.no_grad():
        read = model(prompt, use_cache=True, last_logits_only=True)

    @torch.no_grad()
    def generate() -> torch.Tensor:
        output = read
        for _ in range(tokens):
            token = output.logits[:, -1:].argmax(-1)
            output = model(token, past_key_values=output.attn_key_values, use_cache=True, last_logits_only=True)
        return token

    return generate


def measure(size: str, stock: str, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Milliseconds a token of every arm and their ratio to Pre-LN."""
    if (longest := SIZES[size][4]) < PROMPT + options.tokens:
        raise SystemExit(f"--tokens {options.tokens}: {size} reads at most {longest} with its prompt of {PROMPT}")
    prompt = torch.arange(1, PROMPT + 1, device=device)[None]
    arms = {f"preln ({stock})": (stock, "auto")}
    arms |= {f"lns ({NORMS[stock]}, {backend})": (NORMS[stock], backend) for backend in options.backends}
    works = {}
    for name, (norm, backend) in arms.items():
        model = build(size, norm, backend, device, False).to(DTYPES[options.dtype]).eval()
        works[name] = generation(model, prompt, options.tokens)
    timer = benchlib.cuda_seconds if device.type == "cuda" else benchlib.CLOCKS[options.clock]
    seconds = benchlib.interleaved(works, timer, options.rounds, options.warmup)
    base = next(iter(seconds.values()))
    results = {
        name: {
            "milliseconds_per_token": benchlib.spread([1e3 * value / options.tokens for value in values]),
            "ratio_to_preln": benchlib.ratio(values, base),
        }
        for name, values in seconds.items()
    }
    return {"size": size, "dtype": options.dtype, "tokens": options.tokens, "results": results}


def table(report: dict[str, Any]) -> str:
    lines = [
        [
            case["size"],
            case["dtype"],
            arm,
            benchlib.show(result["milliseconds_per_token"], digits=3),
            benchlib.show(result["ratio_to_preln"], digits=3),
        ]
        for case in report["cases"]
        for arm, result in case["results"].items()
    ]
    return benchlib.markdown(["size", "dtype", "arm", "ms/token (quartiles)", "/ preln (quartiles)"], lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=tuple(SIZES), default=["small"])
    parser.add_argument("--norms", nargs="+", choices=tuple(NORMS), default=list(NORMS))
    parser.add_argument("--backends", nargs="+", choices=NAMES, default=["auto"])
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="fp32")
    parser.add_argument("--tokens", type=benchlib.positive, default=16, help="of a round")
    benchlib.add_options(parser, warmup=2)
    options = parser.parse_args(argv)
    device = benchlib.require_device(options.device)
    cases = [(size, stock) for size in options.sizes for stock in options.norms]
    return benchlib.run(options, device, cases, measure, table)


if __name__ == "__main__":
    raise SystemExit(main())
