"""What is known of a model when its weights are drawn: that each block has its scheme, and how OLMo-core draws it.

OLMo-core builds its blocks one by one, with one ``BufferCache`` for all blocks of a model, which tells one model's
blocks from another's. ``init_method`` is a setting of the model, the scheme one of its blocks: a block learns the
method only when its weights are drawn. There it is refused where it brings a depth factor, which a scheme replaces
(arXiv 2502.05795, footnote 1 and section 6).
"""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

from olmo_lns.errors import LNSConfigError, did_you_mean
from olmo_lns.integrations import norm_sites
from olmo_lns.schemes import Scheme

__all__ = ["INITIALIZATIONS", "Draw", "draw_of", "require_complete", "resolve", "take"]

log = logging.getLogger("olmo_lns")

#: What a block config may say.
INITIALIZATIONS = ("plain", "upstream")
#: ``init_method`` -> whether its residual projections are drawn without a depth factor.
_PLAIN = {"normal": True, "fan_in": True, "llama": False, "llama_depth": False, "normalized": False}
_ATTRIBUTE = "olmo_lns_census"


def resolve(asked: str | None) -> str:
    """:raises LNSConfigError: a name that is not one of :data:`INITIALIZATIONS`."""
    name = asked or "plain"
    if name not in INITIALIZATIONS:
        raise LNSConfigError(
            f"block.initialization={name!r}{did_you_mean(name, INITIALIZATIONS)}: expected one of "
            f"{', '.join(INITIALIZATIONS)} (OLMo-core's model draws the weights, by init_method)"
        )
    return name


class Census(dict[int, tuple[Scheme, str]]):
    """Block, counted from 0 -> its scheme and initialization. :param n_layers: of the whole model."""

    def __init__(self, n_layers: int) -> None:
        super().__init__()
        self.n_layers = n_layers

    def add(self, block_idx: int, scheme: Scheme, initialization: str) -> None:
        """:raises LNSConfigError: the block is there already, or has another scheme than those before it."""
        if block_idx in self:
            raise LNSConfigError(f"block {block_idx} of {self.n_layers} was built twice for one model")
        self[block_idx] = (scheme, initialization)
        if len(set(self.values())) > 1:
            found = {index: f"{s}, initialization {i}" for index, (s, i) in self.items()}
            raise LNSConfigError(f"one model with two schemes (block: scheme): {found}. Give all blocks the same.")

    def require_complete(self) -> None:
        """:raises LNSConfigError: some blocks of the model have no scheme."""
        if missing := sorted(set(range(self.n_layers)) - set(self)):
            raise LNSConfigError(
                f"{next(iter(self.values()))[0]} was asked for, but blocks {missing} of {self.n_layers} (counted from "
                "0) are OLMo-core's own: block_overrides and named blocks are configs of their own, and each needs "
                "the class (olmo_lns.olmo_core.apply(config) gives it to all of them)."
            )


class Draw:
    """In place of ``init_weights`` of a block's sequence mixer, which OLMo-core calls before it draws a block."""

    def __init__(self, mixer: Any, initialization: str) -> None:
        self.mixer = mixer
        self.initialization = initialization
        self.census: Census | None = None

    def __call__(self, *, init_method: Any, **kwargs: Any) -> None:
        if self.census is not None:
            self.census.require_complete()
        plain = _PLAIN.get(str(init_method))
        if self.initialization == "plain" and not plain:
            why = "draws the residual projections with a depth factor" if plain is False else "was never verified"
            raise LNSConfigError(
                f"init_method={init_method} {why}, which a scheme replaces. Set init_method=normal or fan_in, or keep "
                "both knowingly with block.initialization=upstream."
            )
        type(self.mixer).init_weights(self.mixer, init_method=init_method, **kwargs)


def draw_of(block: Any) -> Draw | None:
    """What was decided when ``block`` was built; None for a block of OLMo-core's own."""
    draw = getattr(getattr(block, "attention", None), "init_weights", None)
    return draw if isinstance(draw, Draw) else None


def require_complete(blocks: list[Any]) -> None:
    """Of the blocks of a built model, or of a stage of it, whose weights need not have been drawn here.

    :raises LNSConfigError: some blocks have a scheme and others have none.
    """
    for draw in map(draw_of, blocks):
        if draw is not None and draw.census is not None:
            draw.census.require_complete()
    if stock := [block.block_idx for block in blocks if not any(norm_sites.sites(block))]:
        raise LNSConfigError(f"blocks {stock} (counted from 0) are OLMo-core's own, the others have a scheme")


def take(cache: Any, block: Any, scheme: Scheme, *, block_idx: int, n_layers: int) -> None:
    """Count ``block``; with the last one the whole model is checked and the start-up line written.

    :param cache: the model's ``BufferCache``; None for a block that is built alone, which is not counted.
    """
    if cache is None:
        return
    census = getattr(cache, _ATTRIBUTE, None) or Census(n_layers)
    setattr(cache, _ATTRIBUTE, census)
    draw: Draw = block.attention.init_weights
    census.add(block_idx, scheme, draw.initialization)
    draw.census = census
    norm_sites.check(nn.ModuleList([block]), scheme, n_layers, layer_numbers=[block_idx + 1])
    if block_idx != n_layers - 1:
        return
    census.require_complete()
    backend = next(module for _, module, _ in norm_sites.sites(block)).lns_backend
    line = norm_sites.start_up_line(
        scheme,
        n_layers,
        norm=block.lns_base,
        how=f"backend {backend.name} ({backend.reason})",
        initialization="scaled initialization " + {"plain": "off", "upstream": "as upstream"}[draw.initialization],
    )
    log.info("%s", line)
