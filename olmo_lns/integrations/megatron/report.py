"""What is said on standard output, once per process and only by rank 0."""

from __future__ import annotations

import os
from typing import Any

from torch import nn

from olmo_lns.integrations import binding
from olmo_lns.integrations.megatron.layers import blocks_of
from olmo_lns.integrations.megatron.settings import Settings

__all__ = ["forget", "say", "start_up_line"]

_said: set[str] = set()


def say(text: str) -> None:
    """Print one line, once, as Megatron's ``print_rank_0`` does (its loggers are silent by default)."""
    if int(os.environ.get("RANK", "0")) != 0 or text in _said:
        return
    _said.add(text)
    print(f"olmo-lns: {text}", flush=True)


def forget() -> None:
    """Let every line be said again."""
    _said.clear()


def start_up_line(model: nn.Module, config: Any, *, initialization: str, hybrid: bool = False) -> str:
    """The proof that the model has its scheme, read back from its modules.

    :param model: this process's part. :param hybrid: attention and MLP are layers of their own.
    """
    found = list(binding.sites(model))
    numbers = sorted({site.layer_number for _, _, site in found})
    norms = sum(site.plan.norms for _, _, site in found)
    here = f"{norms} in this process (blocks {numbers[0]}-{numbers[-1]})" if found else "none in this process"
    return binding.start_up_line(
        binding.read_back(model) if found else Settings.of(config).scheme,
        blocks_of(config, hybrid=hybrid),
        norm=str(config.normalization),
        here=here,
        how=", ".join(dict.fromkeys(str(module.lns_method) for _, module, _ in found)),
        initialization=initialization,
    )
