"""The blocks of one model, counted while OLMo-core builds them one by one.

OLMo-core hands one ``BufferCache`` to all blocks of a model: it is what tells one model's blocks from another's.
"""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

from olmo_lns.errors import LNSConfigError
from olmo_lns.integrations import norm_sites
from olmo_lns.integrations.olmo_core import initialization
from olmo_lns.schemes import Scheme

__all__ = ["Census", "take"]

log = logging.getLogger("olmo_lns")

_ATTRIBUTE = "olmo_lns_census"


class Census:
    """Which blocks of a model have a scheme, and which one. :param n_layers: of the whole model."""

    def __init__(self, n_layers: int) -> None:
        self.n_layers = n_layers
        self.schemes: dict[int, tuple[Scheme, str]] = {}

    def add(self, block_idx: int, scheme: Scheme, initialization_: str) -> None:
        """:raises LNSConfigError: the block is there already, or has another scheme than those before it."""
        if block_idx in self.schemes:
            raise LNSConfigError(f"block {block_idx} of {self.n_layers} was built twice for one model")
        self.schemes[block_idx] = (scheme, initialization_)
        if len(set(self.schemes.values())) > 1:
            found = {index: f"{s}, initialization {i}" for index, (s, i) in self.schemes.items()}
            raise LNSConfigError(f"one model with two schemes (block: scheme): {found}. Give all blocks the same.")

    def require_complete(self) -> None:
        """:raises LNSConfigError: some blocks of the model have no scheme."""
        if missing := sorted(set(range(self.n_layers)) - set(self.schemes)):
            scheme = next(iter(self.schemes.values()))[0]
            raise LNSConfigError(
                f"{scheme} was asked for, but blocks {missing} of {self.n_layers} (counted from 0) are OLMo-core's "
                "own: block_overrides and named blocks are configs of their own, and each needs the class "
                "(olmo_lns.olmo_core.apply(config) gives it to all of them)."
            )


def take(cache: Any, block: Any, *, block_idx: int, n_layers: int, scheme: Scheme, norm: str) -> None:
    """Count ``block``; with the last one the whole model is checked and the start-up line written.

    :param cache: the model's ``BufferCache``; None for a block that is built alone, which is not counted.
    """
    if cache is None:
        return
    census = getattr(cache, _ATTRIBUTE, None) or Census(n_layers)
    setattr(cache, _ATTRIBUTE, census)
    drawn = initialization.initialization_of(block)
    census.add(block_idx, scheme, drawn)
    block.attention.init_weights.census = census
    norm_sites.check(nn.ModuleList([block]), scheme, n_layers, layer_numbers=[block_idx + 1])
    if block_idx != n_layers - 1:
        return
    census.require_complete()
    backend = next(module for _, module, _ in norm_sites.sites(block)).lns_backend
    line = norm_sites.start_up_line(
        scheme,
        n_layers,
        norm=norm,
        how=f"backend {backend.name} ({backend.reason})",
        initialization="scaled initialization " + {"plain": "off", "upstream": "as upstream"}[drawn],
    )
    log.info("%s", line)
