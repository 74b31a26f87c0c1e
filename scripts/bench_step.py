#!/usr/bin/env python3
"""Time a whole training step of OLMo models: stock Pre-LN against LayerNorm Scaling, with and without torch.compile.

    python scripts/bench_step.py --device cuda --sizes 60M 150M 1B --json docs/bench/step-h200.json
    OMP_NUM_THREADS=1 python scripts/bench_step.py --sizes small --json docs/bench/step-cpu.json

A step is zero_grad, forward, cross-entropy, backward, clipping at 1.0 and AdamW, on random tokens. The arms take turns
in random order; ratios are taken within each round. With --compile on, blocks are compiled one by one as OLMo's
trainer does. On CUDA under bf16 autocast, on CPU in fp32 (OLMo's own autocast is for CUDA only).
"""

from __future__ import annotations

import argparse
import contextlib
import os
from typing import Any, Callable, Sequence

import benchlib
import torch

from olmo_lns.environment import NORM_BACKEND
from olmo_lns.norm.backend import NAMES

#: layers, width, heads, SwiGLU inner width, sequence length, sequences in a step on one device
SIZES = {
    "small": (8, 128, 4, 512, 256, 2),
    "60M": (8, 512, 8, 2048, 4096, 8),
    "150M": (12, 768, 12, 3072, 4096, 8),
    "1B": (16, 2048, 16, 8192, 2048, 4),
}
PRELN = "preln"


def build(size: str, norm_type: str, backend: str, device: torch.device, compiled: bool) -> Any:
    """An OLMo model on ``device``, in training mode."""
    try:
        import olmo
    except ImportError as error:
        raise SystemExit(f"OLMo cannot be imported ({error}): pip install 'olmo-lns[olmo]'") from None
    from olmo_lns.integrations.olmo import register

    register()
    os.environ[NORM_BACKEND] = backend
    layers, width, heads, inner, length, _ = SIZES[size]
    config = olmo.ModelConfig(
        n_layers=layers,
        d_model=width,
        n_heads=heads,
        mlp_hidden_size=2 * inner,
        max_sequence_length=length,
        vocab_size=50_304 if size != "small" else 512,
        embedding_size=50_304 if size != "small" else 512,
        layer_norm_type=norm_type,
        layer_norm_eps=1e-6,
        layer_norm_with_affine=True,
        activation_type=olmo.config.ActivationType.swiglu,
        rope=True,
        include_bias=False,
        weight_tying=False,
        attention_dropout=0.0,
        residual_dropout=0.0,
        embedding_dropout=0.0,
        init_fn=olmo.config.InitFnType.normal,
        init_device=device.type,
    )
    torch.manual_seed(0)
    model = olmo.OLMo(config).train()
    if compiled:
        for block in model.transformer.blocks:
            block.compile()
    return model


def training_step(model: Any, tokens: torch.Tensor, device: torch.device) -> Callable[[], torch.Tensor]:
    """One optimizer step on ``tokens``; returns the loss."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=device.type == "cuda"
    )

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else contextlib.nullcontext():
            logits = model(tokens).logits
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    return step


def measure(size: str, compiled: bool, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Step times of every arm and their ratio to Pre-LN."""
    torch._dynamo.reset()  # or the graphs of all sizes count towards Dynamo's limit, after which it runs eagerly
    length, sequences = SIZES[size][4], options.sequences or SIZES[size][5]
    tokens = torch.randint(0, 512 if size == "small" else 50_304, (sequences, length), device=device)
    arms = {PRELN: ("rms", "auto")} | {f"lns ({name})": ("lns_rms", name) for name in options.backends}
    models = {arm: build(size, norm, backend, device, compiled) for arm, (norm, backend) in arms.items()}
    steps = {arm: training_step(model, tokens, device) for arm, model in models.items()}
    timer = benchlib.cuda_seconds if device.type == "cuda" else benchlib.CLOCKS[options.clock]
    seconds = benchlib.interleaved(steps, timer, options.rounds, options.warmup)
    results = {}
    for arm, values in seconds.items():
        norm = models[arm].transformer.blocks[0].attn_norm
        results[arm] = {
            "milliseconds": {key: value * 1e3 for key, value in benchlib.spread(values).items()},
            "ratio_to_preln": benchlib.ratio(values, seconds[PRELN]),
            "tokens_per_second": sequences * length / benchlib.spread(values)["median"],
            "norm": norm.lns_backend.name if hasattr(norm, "lns_backend") else "olmo",
        }
    return {"size": size, "compile": compiled, "sequences": sequences, "length": length, "results": results}


def table(report: dict[str, Any]) -> str:
    lines = [
        [
            case["size"],
            "on" if case["compile"] else "off",
            arm,
            result["norm"],
            benchlib.show(result["milliseconds"], digits=1),
            f"{result['tokens_per_second']:,.0f}",
            benchlib.show(result["ratio_to_preln"], digits=3),
        ]
        for case in report["cases"]
        for arm, result in case["results"].items()
    ]
    return benchlib.markdown(
        ["size", "compile", "arm", "norm", "step ms (quartiles)", "tokens/s", "step / preln (quartiles)"], lines
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=tuple(SIZES), help="default: small on CPU, all others on CUDA")
    parser.add_argument("--backends", nargs="+", choices=NAMES, default=["auto"])
    parser.add_argument("--sequences", type=benchlib.positive, help="sequences in a step (default: by size)")
    benchlib.add_compile(parser, "both")
    benchlib.add_options(parser, warmup=4)
    options = parser.parse_args(argv)
    device = benchlib.require_device(options.device)
    sizes = options.sizes or (["60M", "150M", "1B"] if device.type == "cuda" else ["small"])
    return benchlib.run(options, device, benchlib.by_compile(sizes, options), measure, table)


if __name__ == "__main__":
    raise SystemExit(main())
