"""``olmo-lns vision digits``: the four arms on scikit-learn's 8x8 digits, one table and one figure.

1,797 images and minutes on a CPU: it shows that the recipe runs and that the arms differ where
they should (the variance over depth). It is no evidence about ImageNet, and its output says so.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any, Iterable, Mapping

import torch

from olmo_lns.errors import LNSConfigError
from olmo_lns.vision.arms import ARMS, Arm, build

__all__ = ["block_variance", "data", "report", "run", "train"]

NOTE = (
    "Scikit-learn's digits (1,437 images to train, 360 to test): a check that the recipe runs, no evidence. With one "
    "seed and 360 test images, differences of a few points mean nothing. The paper's column is ImageNet-1K, ViT-S."
)
TRAIN = 1437


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """All digits, images (1797, 1, 8, 8) with mean 0 and variance 1, and labels, in a fixed random order.

    :raises LNSConfigError: scikit-learn is missing.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise LNSConfigError(f"scikit-learn cannot be imported ({error}): pip install 'olmo-lns[vision]'") from error
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return ((images - images.mean()) / images.std())[order], torch.tensor(found.target)[order]


def shape(args: argparse.Namespace) -> dict[str, Any]:
    """The architecture, as ``Dinov2Config`` names it."""
    return {
        "image_size": 8,
        "patch_size": 2,
        "num_channels": 1,
        "hidden_size": args.width,
        "num_hidden_layers": args.depth,
        "num_attention_heads": max(1, args.width // 16),
        "mlp_ratio": 4,
        "num_labels": 10,
    }


def train(arm: Arm, args: argparse.Namespace) -> dict[str, Any]:
    """Train one arm and judge it; AdamW, a tenth of the steps warm-up, then cosine to zero."""
    torch.manual_seed(args.seed)
    model = build(arm, shape(args))
    images, labels = data()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=args.lr, weight_decay=args.weight_decay)
    per_epoch = TRAIN // args.batch_size
    steps, warm_up = args.epochs * per_epoch, max(1, args.epochs * per_epoch // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min((s + 1) / warm_up, 0.5 + 0.5 * math.cos(math.pi * max(0, s - warm_up) / steps))
    )
    shuffled, losses = torch.Generator().manual_seed(args.seed), []
    model.train()
    for _ in range(args.epochs):
        order = torch.randperm(TRAIN, generator=shuffled)[: per_epoch * args.batch_size]
        for batch in order.split(args.batch_size):
            loss = torch.nn.functional.cross_entropy(model(pixel_values=images[batch]).logits, labels[batch])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        guess = model(pixel_values=images[TRAIN:]).logits.argmax(-1)
    accuracy = 100.0 * (guess == labels[TRAIN:]).double().mean().item()
    variance = block_variance(model, images[TRAIN:])
    return {"accuracy": accuracy, "loss": sum(losses[-per_epoch:]) / per_epoch, "variance": variance}


@torch.no_grad()
def block_variance(model: Any, images: torch.Tensor) -> list[float]:
    """Variance over the channels of every block's output, averaged over tokens and images."""
    from olmo_lns.integrations.transformers.sites import blocks_of, known_family

    found: list[float] = []

    def hook(module: Any, args: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        found.append(hidden.double().var(-1, unbiased=False).mean().item())

    handles = [block.register_forward_hook(hook) for block in blocks_of(model, known_family(model))]
    try:
        model(pixel_values=images)
    finally:
        for handle in handles:
            handle.remove()
    return found


def report(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The table, with what it is not."""
    lines = ["| arm | accuracy | training loss | variance, first block | last block | paper |", "|---" * 6 + "|"]
    for name, result in results.items():
        first, last, arm = result["variance"][0], result["variance"][-1], ARMS[name]
        numbers = f"{result['accuracy']:.1f} | {result['loss']:.3f} | {first:.3g} | {last:.3g} | {arm.published:.2f}"
        lines.append(f"| {arm.label} | {numbers} |")
    return "\n".join([*lines, "", NOTE])


def _figure(results: Mapping[str, Mapping[str, Any]], path: Path) -> Path:
    from olmo_lns.diagnostics.plots import STYLES, _pyplot, save

    figure, (left, right) = _pyplot().subplots(1, 2, figsize=(9, 3.4))
    for index, (name, result) in enumerate(results.items()):
        style, label = STYLES[index], ARMS[name].label
        left.bar(index, result["accuracy"], color=style["color"], label=label)
        right.plot(range(1, len(result["variance"]) + 1), result["variance"], label=label, **style)
    left.set(ylabel="test accuracy, %", xlabel="arm (digits: no evidence)", ylim=(0, 100), xticks=[])
    right.set(xlabel="block", ylabel="variance of its output", yscale="log")
    right.legend()
    return save(figure, path)


def run(args: argparse.Namespace) -> int:
    """Train the arms and write the table, the figure and the numbers."""
    if unknown := [name for name in args.arms if name not in ARMS]:
        raise LNSConfigError(f"--arms: unknown {unknown[0]!r}: expected some of {', '.join(ARMS)}")
    if args.batch_size > TRAIN:
        raise LNSConfigError(f"--batch-size {args.batch_size}: there are {TRAIN} images to train on")
    if args.width % (heads := shape(args)["num_attention_heads"]):
        raise LNSConfigError(f"--width {args.width}: {heads} heads of 16 channels each: expected a multiple of 16")
    settings = {key: value for key, value in vars(args).items() if key not in ("output", "what", "run")}
    _same_settings(args.output / "results.json", settings)
    args.output.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    for name in _progress(args.arms):
        results[name] = train(ARMS[name], args)
    content = json.dumps({"note": NOTE, "settings": settings, "results": results}, indent=2)
    (args.output / "results.json").write_text(content + "\n", encoding="utf-8")
    (args.output / "table.md").write_text(report(results) + "\n", encoding="utf-8")
    _figure(results, args.output / "figure.png")
    print(report(results))
    return 0


def _same_settings(path: Path, settings: Mapping[str, Any]) -> None:
    """:raises LNSConfigError: the folder has the results of other settings."""
    if not path.is_file():
        return
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["settings"]
    except (ValueError, KeyError, TypeError):
        found = None
    if found != json.loads(json.dumps(settings)):
        raise LNSConfigError(f"{path}: has a run of other settings: give another folder with -o, or remove it")


def _progress(names: Iterable[str]) -> Iterable[str]:
    from rich.progress import track

    return track(list(names), description="arms")
