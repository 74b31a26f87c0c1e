"""Tokens per second of ``variance`` and ``angular`` against a plain forward pass of the same model.

    python scripts/bench_diagnostics.py                      # OLMo 60M, CPU, one thread
    python scripts/bench_diagnostics.py --model <checkpoint or Hugging Face name> --device cuda --dtype bf16

Each round times all of them in random order on the same tokens; ratios are taken within a round, so that slow
drift of a shared machine cancels. "plain" is the full model with its head;
"body" is what the diagnostics run, which leaves the head out where the model allows it. The last line is the
training monitor: a sampled training step (forward and backward) against one that is not.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from types import SimpleNamespace
from typing import Any, Callable

import benchlib
import torch

from olmo_lns.diagnostics.angular import angular_distance
from olmo_lns.diagnostics.capture import evaluating
from olmo_lns.diagnostics.monitor import install
from olmo_lns.diagnostics.variance import block_output_variance
from olmo_lns.models.blocks import body_forward, find_blocks, logits_of, vocabulary_size


def olmo_60m(layers: int) -> Any:
    """The 60M size of the configs (8 layers, width 512, vocabulary 50,304), LNS, random weights."""
    from olmo_lns.integrations.olmo import register

    register()
    from olmo.config import ModelConfig
    from olmo.model import OLMo

    torch.manual_seed(0)
    config = ModelConfig.new(
        d_model=512,
        n_heads=8,
        n_layers=layers,
        mlp_hidden_size=4096,
        activation_type="swiglu",
        rope=True,
        vocab_size=50304,
        embedding_size=50304,
        max_sequence_length=4096,
        include_bias=False,
        layer_norm_type="lns_rms",
        weight_tying=False,
        init_device="cpu",
        init_fn="normal",
    )
    return OLMo(config).eval()


def timer(device: torch.device) -> benchlib.Timer:
    """Events on CUDA; elsewhere wall time, MPS's queue drained before and after."""
    if device.type == "cuda":
        return benchlib.cuda_seconds
    if device.type == "cpu":
        return benchlib.cpu_seconds

    def drained(work: Callable[[], object]) -> float:
        torch.mps.synchronize()
        start = time.perf_counter()
        work()
        torch.mps.synchronize()
        return time.perf_counter() - start

    return drained


def monitor_cost(model: Any, batch: torch.Tensor, device: torch.device, rounds: int) -> float:
    """Median over rounds of (sampled step / plain step) - 1, optimizer left out of both."""
    trainer = SimpleNamespace(model=model, global_step=1)
    trainer.model_forward = lambda data: model(data["input_ids"]).logits

    def train_step(data: dict[str, torch.Tensor]) -> None:
        logits = trainer.model_forward(data)
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), data["input_ids"][:, 1:].flatten()
        )
        loss.backward()
        model.zero_grad()

    trainer.train_step = train_step
    with tempfile.TemporaryDirectory() as folder:
        install(trainer, every=2, path=f"{folder}/rows.csv")

        def step(number: int) -> float:
            trainer.global_step = number
            return timer(device)(lambda: trainer.train_step({"input_ids": batch}))

        step(1)
        step(2)
        return statistics.median(step(2) / step(1) for _ in range(rounds)) - 1


def measure(model: Any, device: torch.device, args: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second of each candidate, and its speed as a share of ``plain`` and ``body``, paired by round."""
    shape = (args.batch_size, args.sequence_length)
    batches = [torch.randint(0, vocabulary_size(model), shape, device=device) for _ in range(args.batches)]

    @torch.no_grad()
    def forward(function: Callable[..., object]) -> None:
        with evaluating(model):
            for batch in batches:
                function(batch, None)

    candidates = {
        "plain": lambda: forward(logits_of(model)),
        "body": lambda: forward(body_forward(model)),
        "variance": lambda: block_output_variance(model, None, batches, device),
        "angular": lambda: angular_distance(model, None, batches, device),
    }
    seconds = benchlib.interleaved(candidates, timer(device), args.rounds, warmup=1)
    tokens = args.batches * args.batch_size * args.sequence_length
    results = {
        name: {
            "tokens_per_second": tokens / benchlib.spread(values)["median"],
            "share_of_plain": benchlib.ratio(seconds["plain"], values),
            "share_of_body": benchlib.ratio(seconds["body"], values),
        }
        for name, values in seconds.items()
    }
    return {
        "environment": benchlib.environment(device),
        "model": f"{type(model).__name__}, {len(find_blocks(model))} blocks, {next(model.parameters()).dtype}",
        "tokens": f"{args.rounds} rounds of {tokens:,} tokens, batches of {shape[0]} x {shape[1]}",
        "results": results,
        "monitor_cost_of_a_sampled_step": monitor_cost(model, batches[0], device, args.rounds),
    }


def show(report: dict[str, Any]) -> None:
    rows = [
        [name, f"{r['tokens_per_second']:,.0f}", *(benchlib.show(r[f"share_of_{base}"]) for base in ("plain", "body"))]
        for name, r in report["results"].items()
    ]
    cost = report["monitor_cost_of_a_sampled_step"]
    print(f"{report['model']}\n{report['tokens']}\n")
    print(benchlib.markdown(["", "tokens/s (median)", "/ plain (quartiles)", "/ body (quartiles)"], rows))
    print(f"\ntraining monitor: a sampled step takes {cost:+.1%}, so every=100 costs {cost / 100:+.3%} a step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: OLMo 60M with random weights")
    parser.add_argument("--layers", type=benchlib.positive, default=8, help="of the default model")
    parser.add_argument("--device", choices=("cpu", "cuda", "mps"), default="cpu")
    parser.add_argument("--dtype", choices=("auto", "fp32", "bf16"), default="auto")
    parser.add_argument("--batch-size", type=benchlib.positive, default=1)
    parser.add_argument("--sequence-length", type=benchlib.positive, default=512)
    parser.add_argument("--batches", type=benchlib.positive, default=1, help="a round")
    parser.add_argument("--rounds", type=benchlib.positive, default=9)
    parser.add_argument("--json", type=benchlib.report_path, help="where to write the report")
    args = parser.parse_args()
    device = benchlib.require_device(args.device)
    if args.model:
        from olmo_lns.models.loading import load_model

        model = load_model(args.model, dtype=args.dtype, device=args.device).model
    else:
        model = olmo_60m(args.layers).to(device, torch.bfloat16 if args.dtype == "bf16" else torch.float32)
    report = measure(model, device, args)
    show(report)
    benchlib.write(report, args.json)


if __name__ == "__main__":
    main()
