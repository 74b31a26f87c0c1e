"""Depth, bound where OLMo builds a block; and the two promises checked when a model is complete."""

from __future__ import annotations

import logging
from typing import Any, Callable

from olmo_lns.errors import UpstreamChangedError
from olmo_lns.integrations.olmo import norms
from olmo_lns.integrations.olmo.config import require_pre_ln
from olmo_lns.integrations.olmo.initialization import remove_depth_factor
from olmo_lns.integrations.olmo.types import base_type, is_lns
from olmo_lns.settings import Settings

__all__ = ["BLOCK_NORMS", "blocks_of", "wrap_block_init", "wrap_model_init", "wrap_norm_build", "wrap_reset"]

log = logging.getLogger("olmo_lns")

#: The sites of a block: exactly these two norms carry the factor.
BLOCK_NORMS = ("attn_norm", "ff_norm")


def wrap_norm_build(build: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``LayerNormBase.build``: an lns type gives the plain base norm.

    Final, embedding and q/k norms stay that way; a block binds its own two afterwards.
    """

    def wrapped(cls: Any, config: Any, size: int | None = None, **kwargs: Any) -> Any:
        if not is_lns(config.layer_norm_type):
            return build(cls, config, size, **kwargs)
        return norms.base_norm(base_type(config.layer_norm_type), config, size, **kwargs)

    return wrapped


def wrap_block_init(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``__init__`` of a block class: bind its norms to ``layer_id + 1``.

    The constructor rather than the factory, so that a block built without ``OLMoBlock.build``
    is scaled too. ``layer_id`` is global, also with ``block_group_size > 1``.
    """

    def wrapped(self: Any, layer_id: int, config: Any, cache: Any) -> None:
        require_pre_ln(config)
        init(self, layer_id, config, cache)
        if is_lns(config.layer_norm_type):
            exponent = Settings.current().exponent
            for name in BLOCK_NORMS:
                norms.bind(getattr(self, name), layer_id + 1, exponent)

    return wrapped


def wrap_reset(reset: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``OLMoBlock.reset_parameters``: scaled initialization off, as the setting says."""

    def wrapped(self: Any) -> None:
        reset(self)
        if Settings.current().scaled_init_off(lns=is_lns(self.config.layer_norm_type)):
            remove_depth_factor(self)

    return wrapped


def wrap_model_init(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``OLMo.__init__``: refuse post-norm before building, check and report afterwards."""

    def wrapped(self: Any, config: Any, init_params: bool = True) -> None:
        require_pre_ln(config)
        init(self, config, init_params)
        if is_lns(config.layer_norm_type):
            _check_sites(self)
            _report(self)
        elif Settings.current().scaled_init == "off":
            log.info("Scaled initialization off (no LNS): init_fn %s without its depth factor", config.init_fn)

    return wrapped


def blocks_of(model: Any) -> list[Any]:
    """The blocks of an OLMo model in order, whatever its ``block_group_size``."""
    if model.config.block_group_size == 1:
        return list(model.transformer.blocks)
    return [block for group in model.transformer.block_groups for block in group]


def _check_sites(model: Any) -> None:
    """Exactly the two norms of every block are bound, to the block's own number, and nothing else is."""
    found = {name: m.layer_number for name, m in model.named_modules() if norms.is_bound(m)}
    numbers = [[getattr(getattr(b, name), "layer_number", None) for name in BLOCK_NORMS] for b in blocks_of(model)]
    expected = [[number, number] for number in range(1, model.config.n_layers + 1)]
    if numbers != expected or len(found) != 2 * model.config.n_layers:
        raise UpstreamChangedError(
            f"LayerNorm Scaling is on {len(found)} norms {found}, expected the two norms of each of "
            f"{model.config.n_layers} blocks: this OLMo builds its blocks in a way that was not verified."
        )


def _report(model: Any) -> None:
    first, last = blocks_of(model)[0].attn_norm, blocks_of(model)[-1].attn_norm
    off = Settings.current().scaled_init_off(lns=True)
    log.info(
        "LayerNorm Scaling on: %d norms (%s), s = %.4g (block 1) to %.4g (block %d), backend %s (%s), "
        "scaled initialization %s (init_fn %s)",
        2 * model.config.n_layers,
        model.config.layer_norm_type,
        first.lns_scale,
        last.lns_scale,
        model.config.n_layers,
        first.lns_backend.name,
        first.lns_backend.reason,
        "off" if off else "kept",
        model.config.init_fn,
    )
