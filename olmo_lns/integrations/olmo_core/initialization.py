"""How the residual output projections are drawn under a scheme.

``init_method`` is a setting of the model, the scheme one of its blocks: a block learns the method only when its
weights are drawn. There it is refused where it brings a depth factor, which a scheme replaces (arXiv 2502.05795,
footnote 1 and section 6).
"""

from __future__ import annotations

from typing import Any

from olmo_lns.errors import LNSConfigError, did_you_mean

__all__ = ["INITIALIZATIONS", "guard", "initialization_of", "resolve"]

#: What a block config may say.
INITIALIZATIONS = ("plain", "upstream")
#: ``init_method`` -> whether its residual projections are drawn without a depth factor.
_PLAIN = {"normal": True, "fan_in": True, "llama": False, "llama_depth": False, "normalized": False}


def resolve(asked: str | None) -> str:
    """:raises LNSConfigError: a name that is not one of :data:`INITIALIZATIONS`."""
    name = asked or "plain"
    if name not in INITIALIZATIONS:
        raise LNSConfigError(
            f"block.initialization={name!r}{did_you_mean(name, INITIALIZATIONS)}: expected one of "
            f"{', '.join(INITIALIZATIONS)} (OLMo-core's model draws the weights, by init_method)"
        )
    return name


class Draw:
    """In place of ``init_weights`` of a block's sequence mixer, which OLMo-core calls before it draws a block."""

    def __init__(self, mixer: Any, initialization: str, census: Any = None) -> None:
        self.mixer = mixer
        self.initialization = initialization
        self.census = census

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


def guard(block: Any, initialization: str) -> None:
    """Have the draw of ``block`` checked."""
    mixer = block.attention
    mixer.init_weights = Draw(mixer, initialization)


def initialization_of(block: Any) -> str:
    """What was decided when ``block`` was built; ``upstream`` for a block of OLMo-core's own."""
    draw = getattr(block.attention, "init_weights", None)
    return draw.initialization if isinstance(draw, Draw) else "upstream"
