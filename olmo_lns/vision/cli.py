"""``olmo-lns vision``: the four vision arms, on small images that a package ships and on a folder of images."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Sequence

from olmo_lns.arguments import above_zero, at_least

__all__ = ["main"]

#: As ``olmo_lns.vision.arms.ARMS``; ``--help`` loads no framework.
ARMS = ("none", "layerscale", "lns", "lnsafterbranch")


def main(argv: Sequence[str]) -> int:
    """Run ``olmo-lns vision <what>``."""
    parser = argparse.ArgumentParser(prog="olmo-lns vision", description=__doc__)
    commands = parser.add_subparsers(dest="what", required=True, metavar="what")
    _add_digits(commands)
    _add_train(commands)
    args = parser.parse_args(argv)
    from olmo_lns.vision import digits, train

    return {"digits": digits.run, "train": train.run}[args.what](args)


def _add_digits(commands: Any) -> None:
    command = commands.add_parser("digits", help="train the four arms on scikit-learn's digits; a table and a figure")
    add = command.add_argument
    add("-o", "--output", type=Path, required=True, help="folder for results.json, table.md and figure.png")
    add("--arms", type=lambda text: text.split(","), default=list(ARMS), help=f"of {','.join(ARMS)}")
    add("--depth", type=at_least(1), default=36, help="blocks (default 36, as the papers' figure shows)")
    add("--width", type=at_least(1), default=48, help="channels (default %(default)s; ViT-S has 384)")
    add("--epochs", type=at_least(1), default=30, help="default %(default)s")
    add("--batch-size", type=at_least(1), default=128, help="default %(default)s")
    add("--lr", type=above_zero, default=1e-3, help="default %(default)s")
    add("--weight-decay", type=float, default=0.05, help="default %(default)s")
    add("--seed", type=int, default=0, help="default %(default)s")


def _add_train(commands: Any) -> None:
    command = commands.add_parser("train", help="train one arm on a folder of images, such as ImageNet")
    add = command.add_argument
    add("config", type=Path, help="such as configs/vision/imagenet.yaml")
    add("--data", type=Path, required=True, help="folder with train/<class>/… and val/<class>/…")
    add("--arm", required=True, help=f"one of {', '.join(ARMS)}")
    add("-o", "--output", type=Path, required=True, help="folder for the model, its checkpoints and results.json")
    add("--resume", action="store_true", help="go on from the last checkpoint in the output folder")
