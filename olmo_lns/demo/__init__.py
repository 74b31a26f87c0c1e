"""``olmo-lns demo``: a deep small OLMo model trained with Pre-LN, scaled initialization and LNS."""

from __future__ import annotations

from typing import Sequence

__all__ = ["main"]


def main(argv: Sequence[str]) -> int:
    from olmo_lns.demo.cli import main

    return main(argv)
