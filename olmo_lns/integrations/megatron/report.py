"""What is said on standard output, once per process and only by rank 0."""

from __future__ import annotations

import os
from typing import Any, Sequence

from torch import nn

from olmo_lns.integrations.megatron.initialization import describe
from olmo_lns.integrations.megatron.settings import Settings
from olmo_lns.scale import lns_scale

__all__ = ["forget", "say", "start_up_line"]

_said: set[str] = set()


def say(text: str, *, once: bool = True) -> None:
    """Print one line, as Megatron's ``print_rank_0`` does (its loggers are silent by default)."""
    if int(os.environ.get("RANK", "0")) != 0 or (once and text in _said):
        return
    _said.add(text)
    print(f"olmo-lns: {text}", flush=True)


def forget() -> None:
    """Let every line be said again."""
    _said.clear()


def start_up_line(
    config: Any,
    settings: Settings,
    norms: Sequence[nn.Module],
    *,
    hybrid: bool = False,
    initialization: str | None = None,
) -> str:
    """The proof that the model has its factors: sites, first and last s, way, initialization.

    :param norms: the scaled modules that this process holds.
    :param hybrid: attention and MLP are layers of their own, so two layers make a block.
    """
    blocks = config.num_layers // (2 if hybrid else 1)
    depths = sorted({module.lns_depth for module in norms})  # type: ignore[type-var]
    here = f"{len(norms)} in this process (blocks {depths[0]}-{depths[-1]})" if depths else "none in this process"
    ways = ", ".join(dict.fromkeys(str(module.lns_method) for module in norms)) or "-"
    first, last = (lns_scale(block, exponent=settings.exponent) for block in (1, blocks))
    return (
        f"LayerNorm Scaling on: {2 * blocks} sites, {here}; s = {first:.4f} in block 1, {last:.4f} in block {blocks} "
        f"(exponent {settings.exponent:g}); {ways}; {initialization or describe(config, settings.scaled_init_off)}"
    )
