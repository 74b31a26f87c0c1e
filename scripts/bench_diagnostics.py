"""Tokens per second of ``variance`` and ``angular`` against a plain forward pass of the same model.

    python scripts/bench_diagnostics.py                      # OLMo 60M, CPU, one thread
    python scripts/bench_diagnostics.py --model <checkpoint or Hugging Face name> --device cuda --dtype bf16

Each round times all three one after the other on the same tokens; the ratio is the median over rounds of the
paired ratios, so that slow drift of a shared machine cancels. "plain" is the full model with its head;
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

import torch

from olmo_lns.diagnostics.angular import angular_distance
from olmo_lns.diagnostics.capture import evaluating
from olmo_lns.diagnostics.models import body_forward, find_blocks, logits_of, vocabulary_size
from olmo_lns.diagnostics.monitor import install
from olmo_lns.diagnostics.variance import block_output_variance


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


def seconds(function: Callable[[], object], device: torch.device) -> float:
    """Wall time of one call, the device's queue drained before and after."""
    synchronize(device)
    start = time.perf_counter()
    function()
    synchronize(device)
    return time.perf_counter() - start


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


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
            return seconds(lambda: trainer.train_step({"input_ids": batch}), device)

        step(1)
        step(2)
        return statistics.median(step(2) / step(1) for _ in range(rounds)) - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: OLMo 60M with random weights")
    parser.add_argument("--layers", type=int, default=8, help="of the default model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("auto", "fp32", "bf16"), default="auto")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--batches", type=int, default=1, help="a round")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    device = torch.device(args.device)
    if args.model:
        from olmo_lns.diagnostics.loading import load_model

        model = load_model(args.model, dtype=args.dtype, device=args.device).model
    else:
        model = olmo_60m(args.layers).to(device, torch.bfloat16 if args.dtype == "bf16" else torch.float32)
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
    for function in candidates.values():
        function()
    rounds = [{name: seconds(function, device) for name, function in candidates.items()} for _ in range(args.rounds)]
    tokens = args.batches * args.batch_size * args.sequence_length
    where = (
        torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device}, {torch.get_num_threads()} thread"
    )
    print(f"{type(model).__name__}, {len(find_blocks(model))} blocks, {next(model.parameters()).dtype}, {where}")
    print(f"{args.rounds} rounds of {tokens:,} tokens, batches of {shape[0]} x {shape[1]}\n")
    print("| | tokens/s (median) | / plain | / body |\n|---|---|---|---|")
    for name in candidates:
        speed = tokens / statistics.median(r[name] for r in rounds)
        ratios = [statistics.median(r[base] / r[name] for r in rounds) for base in ("plain", "body")]
        print(f"| {name} | {speed:,.0f} | {ratios[0]:.3f} | {ratios[1]:.3f} |")
    cost = monitor_cost(model, batches[0], device, args.rounds)
    print(f"\ntraining monitor: a sampled step takes {cost:+.1%}, so every=100 costs {cost / 100:+.3%} a step")


if __name__ == "__main__":
    main()
