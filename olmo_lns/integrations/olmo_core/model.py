"""Check that every block of a complete OLMo-core model has its scheme, and measure the fresh weights.

A scheme takes the place of an initialization with a depth factor (arXiv 2502.05795, footnote 1 and section 6), so such
an initialization is refused. This module does not import OLMo-core.
"""

from __future__ import annotations

from typing import Any, Callable

from olmo_lns import environment, initialization, sites, start_up_line
from olmo_lns.errors import LNSConfigError, MeasurementError
from olmo_lns.integrations.olmo_core.layouts import EXPERTS_NORM
from olmo_lns.measured import Measured
from olmo_lns.schemes import Scheme


def wrap_build(build: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``TransformerConfig.build``: check that a model whose config names a scheme has it in every block."""

    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        model = build(self, *args, **kwargs)
        named = list(self.block.values()) if isinstance(self.block, dict) else [self.block]
        if any(hasattr(each, "resolved_scheme") for each in (*named, *(self.block_overrides or {}).values())):
            check_and_announce(model, self.n_layers)
        return model

    return wrapped


def check_and_announce(model: Any, n_layers: int) -> None:
    """Check a complete model under a scheme, and write the start-up line.

    :raises LNSConfigError: if a block has no scheme or another one.
    :raises MeasurementError: if a norm has another factor than its block.
    """
    schemes = {each.site.layer_number: each.site.scheme for each in sites.in_model(model)}
    if missing := sorted(set(range(1, n_layers + 1)) - set(schemes)):
        raise LNSConfigError(
            f"A scheme was selected, but the blocks {[number - 1 for number in missing]} of {n_layers} (counted from "
            "0) are OLMo-core's own. Each config in block_overrides and each named block is separate, and needs "
            "olmo-lns's class as well. Call olmo_lns.olmo_core.apply(config), which sets the class in all of them."
        )
    if len(set(schemes.values())) > 1:
        raise LNSConfigError(
            f"The model has the schemes {sorted(set(map(str, schemes.values())))}. Use one scheme for all blocks."
        )
    environment.check()
    sites.require_complete(model, schemes[1], n_layers)
    blocks = built_blocks(model).values()
    initializations = " and ".join(sorted({block.lns_initialization for block in blocks}))
    measured = frozenset[Measured]().union(*(block.lns_measured for block in blocks))
    not_run = [block.lns_not_run for block in blocks if block.lns_not_run]
    line = start_up_line.compose(
        model,
        n_layers,
        measured=measured if not_run else measured | {Measured.SITES},
        sites_not_run=not_run[0] if not_run else "",
        norm=next(type(each.module).__name__ for each in sites.in_model(model)),
        initialization="scaled initialization "
        + {"plain": "off", "upstream": "as upstream"}.get(initializations, initializations),
    )
    start_up_line.write(line)


def wrap_init_weights(init_weights: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``Transformer.init_weights``: measure the residual projections that it draws."""

    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = init_weights(self, *args, **kwargs)
        for number, block in built_blocks(self).items():
            if getattr(block, "lns_initialization", "upstream") == "plain":
                check_initialization(block, number, str(self.init_method))
        return result

    return wrapped


#: The first and the last projection of each part of a block.
_PROJECTIONS = (("attention.w_q", "attention.w_out"), ("feed_forward.w1", "feed_forward.w2"))


def check_initialization(block: Any, number: int, init_method: str) -> None:
    """Check that the first and the last projection of each branch were drawn with the same standard deviation.

    Under ``init_method=fan_in``, the standard deviations are compared relative to the fan-in of each matrix.

    :raises LNSConfigError: if they differ, as with a depth factor.
    """
    for first, last in _PROJECTIONS:
        try:
            one, two = block.get_submodule(first), block.get_submodule(last)
        except AttributeError:
            continue
        if (std := initialization.drawn_std(one.weight)) is None:
            continue
        if init_method == "fan_in":  # by each matrix's number of inputs
            std *= (one.in_features / two.in_features) ** 0.5
        try:
            initialization.check_drawn({last: two.weight}, std, where=f"block {number}")
        except MeasurementError as error:
            raise LNSConfigError(
                f"init_method={init_method} draws the residual output projections with a depth factor ({error}). A "
                "scheme replaces this factor. Set init_method=normal or fan_in. If you want both, set "
                "block.initialization=upstream."
            ) from None


def scheme_of_model(model: Any) -> Scheme:
    """Return the scheme of a built model or of a pipeline stage, whose weights need not be drawn yet.

    :raises MeasurementError: if a site is missing, a block is in the wrong place, or a norm has another factor.
    """
    scheme = sites.read_back(model)
    for number, block in () if scheme.is_pre_ln else built_blocks(model).items():
        sites.require_complete(block, scheme, number, layer_numbers=[number])
        experts = getattr(block, EXPERTS_NORM, None)
        if experts is not None and not any(sites.in_model(experts)):
            raise MeasurementError(
                f"block {number}: {EXPERTS_NORM} has no factor. Expected the factor of feed_forward_norm. The module "
                "was replaced after the block was built. Apply the scheme after the replacement."
            )
    return scheme


def built_blocks(model: Any) -> dict[int, Any]:
    """Return the blocks in a model or a pipeline stage: number from 1 -> block."""
    names = ((name.split("."), each) for name, each in model.named_modules())
    return {int(name[-1]) + 1: each for name, each in names if name[-2:-1] == ["blocks"]}
