#!/usr/bin/env python3
"""Time a whole training step of OLMo models under every scheme, against stock Pre-LN.

    OMP_NUM_THREADS=1 python scripts/bench_schemes.py --json docs/bench/schemes-cpu.json
    python scripts/bench_schemes.py --device cuda --sizes 60M --json docs/bench/schemes-h200.json

The step, the sizes and the rounds are those of bench_step.py. The last column names what a scheme computes or keeps
beside Pre-LN's work, read from its plan: everything else is constants that are folded into what is computed anyway.
"""

from __future__ import annotations

import argparse
from typing import Any, Sequence

import bench_step
import benchlib
import torch

from olmo_lns.norm.backend import NAMES
from olmo_lns.schemes import PRE_LN, Scheme, names, parse

BASE = "rms"
NONE = "none"


def extra_work(scheme: Scheme, n_layers: int) -> str:
    """What the scheme cannot avoid doing, over all blocks."""
    plans = [plan for _, _, plan in scheme.plans(n_layers)]
    more = sum(plan.norms for plan in plans) - 2 * n_layers
    gates = sum(plan.gate is not None for plan in plans)
    omegas = sum(plan.omega is not None for plan in plans)
    passes = sum(plan.stream_scale != 1.0 for plan in plans)
    grouped = sum(plan.groups != 1 for plan in plans)
    found = {
        f"{more} more norms": more,
        f"{gates} branches kept for the gradients of their gates": gates,
        f"{omegas} shortcuts kept for the gradients of omega": omegas,
        f"{passes} multiplications of the stream": passes,
        f"{grouped} norms with their gain in a pass of its own": grouped,
    }
    return "; ".join(words for words, count in found.items() if count) or NONE


def measure(size: str, compiled: bool, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Step times of every scheme and their ratio to Pre-LN."""
    torch._dynamo.reset()  # or the graphs of all sizes count towards Dynamo's limit, after which it runs eagerly
    layers, _, _, _, length, sequences = bench_step.SIZES[size]
    sequences = options.sequences or sequences
    tokens = torch.randint(0, 512 if size == "small" else 50_304, (sequences, length), device=device)
    schemes = {scheme.name: scheme for scheme in (PRE_LN, *map(parse, options.schemes))}
    steps = {}
    for name, scheme in schemes.items():
        norm = BASE if scheme.is_pre_ln else f"{name}_{BASE}"
        model = bench_step.build(size, norm, options.backend, device, compiled)
        steps[name] = bench_step.training_step(model, tokens, device)
    timer = benchlib.cuda_seconds if device.type == "cuda" else benchlib.CLOCKS[options.clock]
    seconds = benchlib.interleaved(steps, timer, options.rounds, options.warmup)
    results = {
        name: {
            "milliseconds": {key: value * 1e3 for key, value in benchlib.spread(values).items()},
            "ratio_to_preln": benchlib.ratio(values, seconds[PRE_LN.name]),
            "extra_work": extra_work(schemes[name], layers),
        }
        for name, values in seconds.items()
    }
    return {"size": size, "compile": compiled, "sequences": sequences, "length": length, "results": results}


def table(report: dict[str, Any]) -> str:
    lines = [
        [
            case["size"],
            "on" if case["compile"] else "off",
            name,
            benchlib.show(result["milliseconds"], digits=1),
            benchlib.show(result["ratio_to_preln"], digits=3),
            result["extra_work"],
        ]
        for case in report["cases"]
        for name, result in case["results"].items()
    ]
    return benchlib.markdown(
        ["size", "compile", "scheme", "step ms (quartiles)", "step / preln (quartiles)", "work beside Pre-LN's"], lines
    )


def main(argv: Sequence[str] | None = None) -> int:
    others = [name for name in names() if name != PRE_LN.name]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sizes", nargs="+", choices=tuple(bench_step.SIZES), help="default: small on CPU, 60M on CUDA"
    )
    parser.add_argument("--schemes", nargs="+", choices=others, default=others, help="default: all")
    parser.add_argument("--backend", choices=NAMES, default="auto")
    parser.add_argument("--sequences", type=benchlib.positive, help="sequences in a step (default: by size)")
    benchlib.add_compile(parser, "off")
    benchlib.add_options(parser, warmup=3)
    options = parser.parse_args(argv)
    device = benchlib.require_device(options.device)
    sizes = options.sizes or ["60M" if device.type == "cuda" else "small"]
    return benchlib.run(options, device, benchlib.by_compile(sizes, options), measure, table)


if __name__ == "__main__":
    raise SystemExit(main())
