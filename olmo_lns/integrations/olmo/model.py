"""Depth, attached where OLMo builds a block; and the promises checked when a model is complete.

``register`` runs while OLMo is being imported, whoever imports it, so nothing here needs OLMo at import: the classes
made of OLMo's (:mod:`norms`, :mod:`block`) are imported where they are used.
"""

from __future__ import annotations

import logging
from typing import Any, Callable

from olmo_lns.errors import LNSConfigError, UpstreamChangedError
from olmo_lns.integrations import norm_sites, patching
from olmo_lns.integrations.olmo import initialization, types, upstream
from olmo_lns.integrations.olmo.config import require_supported
from olmo_lns.record import Record

__all__ = [
    "ask_for_plain_initialization", "blocks_of", "record_of", "wrap_block_init", "wrap_model_init",
    "wrap_norm_build",
]  # fmt: skip

log = logging.getLogger("olmo_lns")

#: On a ``ModelConfig`` from which a model was built.
_BUILT = "_olmo_lns_built"


def wrap_norm_build(build: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``LayerNormBase.build``: a type of ours gives OLMo's own norm, without a factor.

    Final, embedding and q/k norms stay that way; a block attaches its own two afterwards.
    """

    def wrapped(cls: Any, config: Any, size: int | None = None, **kwargs: Any) -> Any:
        if not types.has_scheme(config.layer_norm_type):
            return build(cls, config, size, **kwargs)
        from olmo.model import LayerNorm, RMSLayerNorm

        base = types.base_type(config.layer_norm_type)
        if base == "rms":
            return RMSLayerNorm(config, size=size, **kwargs)
        return LayerNorm(config, size=size, low_precision=base == "low_precision", **kwargs)

    return wrapped


def wrap_block_init(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``__init__`` of a block class: attach number ``layer_id + 1`` to its norms, or to the block itself.

    The constructor rather than the factory, so that a block built without ``OLMoBlock.build``
    is scaled too. ``layer_id`` is global, also with ``block_group_size > 1``.
    """

    def wrapped(self: Any, layer_id: int, config: Any, cache: Any) -> None:
        from olmo_lns.integrations.olmo import block

        require_supported(config)
        init(self, layer_id, config, cache)
        block.attach(self, types.asked_record(config))

    return wrapped


def wrap_model_init(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``OLMo.__init__``: refuse what cannot be built, check and report afterwards."""

    def wrapped(self: Any, config: Any, init_params: bool = True) -> None:
        require_supported(config)
        asked = types.asked_record(config)
        if asked.active:
            # A parameter from the environment is written down: what is saved with the weights is the config.
            config.layer_norm_type = type(config.layer_norm_type)(types.spell(asked.scheme, asked.norm))
        init(self, config, init_params)
        norm_sites.check(self, asked.scheme, config.n_layers)
        record = record_of(self)
        setattr(config, _BUILT, True)
        state = {"plain": "off", "upstream": "as upstream"}.get(record.scaled_init, f"on, {record.scaled_init}")
        drawn = f"scaled initialization {state} (init_fn {config.init_fn})"
        if record.active:
            kind = str(config.layer_norm_type)
            how = _backend_in_words(self)
            line = norm_sites.start_up_line(record.scheme, config.n_layers, norm=kind, how=how, initialization=drawn)
            log.info("%s", line)
        elif record.scaled_init != "upstream":
            log.info("Pre-LN; %s", drawn)

    return wrapped


def _backend_in_words(model: Any) -> str:
    modules = (module for block in blocks_of(model) for module in block.children())
    backend = next((module.lns_backend for module in modules if hasattr(module, "lns_backend")), None)
    return "OLMo's own norms" if backend is None else f"backend {backend.name} ({backend.reason})"


def blocks_of(model: Any) -> list[Any]:
    """The blocks of an OLMo model in order, whatever its ``block_group_size``."""
    if model.config.block_group_size == 1:
        return list(model.transformer.blocks)
    return [block for group in model.transformer.block_groups for block in group]


def ask_for_plain_initialization(config: Any) -> None:
    """See :func:`olmo_lns.plain_initialization`."""
    patching.require_verified(upstream.NAME)
    if getattr(config, _BUILT, False):
        raise LNSConfigError("a model was built from this ModelConfig before: its weights are drawn already")
    setattr(config, types.PLAIN, True)
    types.asked_record(config)


def record_of(model: Any) -> Record:
    """What identifies the built model, read from its modules.

    :raises UpstreamChangedError: its blocks do not all have one scheme and one initialization.
    """
    scheme = norm_sites.read_back(model)
    norm_sites.check(model, scheme, model.config.n_layers)
    norm_sites.check_places(enumerate(blocks_of(model), start=1))
    drawn = sorted({initialization.initialization_of(block) for block in blocks_of(model)})
    if len(drawn) > 1:
        raise UpstreamChangedError(f"one model with the initializations {', '.join(drawn)}: expected one.")
    norm = "" if scheme.is_pre_ln else types.base_type(model.config.layer_norm_type)
    return Record(scheme, norm, drawn[0] if drawn else "upstream")
