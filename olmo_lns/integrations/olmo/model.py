"""Wraps the construction of an OLMo model: block numbers, initial weights, and the check of the complete model.

``attn_out`` and ``ff_out`` of block l (1-based) of L blocks are drawn by OLMo with the standard deviation of the other
matrices times a depth factor: 1/sqrt(2·l) for ``init_fn: mitchell``, 1/sqrt(2·L) for ``full_megatron``, 1 for
``normal``. A scheme replaces that factor, and the paper finds the two together worse than LNS alone (arXiv 2502.05795,
footnote 1 and section 6). ``normal_scaled`` and ``normal_depth_scaled`` are ours: ``normal``, and the two projections
times one of those factors. ``full_megatron`` is no such thing: it also draws the head at 1/sqrt(d).

``register`` runs while OLMo is being imported, whoever imports it, so nothing here needs OLMo at import:
:mod:`.block`, whose classes are made of OLMo's, is imported where it is used.
"""

from __future__ import annotations

import logging
import math
from typing import Any, Callable

import torch

from olmo_lns.errors import LNSConfigError, UpstreamChangedError
from olmo_lns.integrations import norm_sites, patching
from olmo_lns.integrations.olmo import types, upstream
from olmo_lns.record import Record
from olmo_lns.schemes.initialization import factor

log = logging.getLogger("olmo_lns")


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

        types.require_supported(config)
        init(self, layer_id, config, cache)
        block.attach(self, types.asked_record(config))

    return wrapped


def wrap_model_init(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``OLMo.__init__``: refuse what cannot be built, check and report afterwards."""

    def wrapped(self: Any, config: Any, init_params: bool = True) -> None:
        types.require_supported(config)
        asked = types.asked_record(config)
        if asked.active:
            # A parameter from the environment is written down: what is saved with the weights is the config.
            config.layer_norm_type = type(config.layer_norm_type)(types.spell(asked.scheme, asked.norm))
        init(self, config, init_params)
        norm_sites.check(self, asked.scheme, config.n_layers)
        record = record_of(self)
        config.lns_built = True
        state = {"plain": "off", "upstream": "as upstream"}.get(record.scaled_init, f"on, {record.scaled_init}")
        drawn = f"scaled initialization {state} (init_fn {config.init_fn})"
        if record.active:
            kind = str(config.layer_norm_type)
            modules = (module for block in blocks_of(self) for module in block.children())
            backend = next((module.lns_backend for module in modules if hasattr(module, "lns_backend")), None)
            how = "OLMo's own norms" if backend is None else f"backend {backend.name} ({backend.reason})"
            line = norm_sites.start_up_line(record.scheme, config.n_layers, norm=kind, how=how, initialization=drawn)
            log.info("%s", line)
        elif record.scaled_init != "upstream":
            log.info("Pre-LN; %s", drawn)

    return wrapped


def blocks_of(model: Any) -> list[Any]:
    """The blocks of an OLMo model in order, whatever its ``block_group_size``."""
    if model.config.block_group_size == 1:
        return list(model.transformer.blocks)
    return [block for group in model.transformer.block_groups for block in group]


def ask_for_plain_initialization(config: Any) -> None:
    """See :func:`olmo_lns.plain_initialization`."""
    patching.require_verified(upstream.NAME)
    if getattr(config, "lns_built", False):
        raise LNSConfigError("a model was built from this ModelConfig before: its weights are drawn already")
    config.lns_plain_initialization = True
    types.asked_record(config)


def record_of(model: Any) -> Record:
    """What identifies the built model, read from its modules.

    :raises UpstreamChangedError: its blocks do not all have one scheme and one initialization.
    """
    scheme = norm_sites.read_back(model)
    norm_sites.check(model, scheme, model.config.n_layers)
    norm_sites.check_places(enumerate(blocks_of(model), start=1))
    drawn = sorted({getattr(block, "lns_initialization", "upstream") for block in blocks_of(model)})
    if len(drawn) > 1:
        raise UpstreamChangedError(f"one model with the initializations {', '.join(drawn)}: expected one.")
    norm = "" if scheme.is_pre_ln else types.base_type(model.config.layer_norm_type)
    return Record(scheme, norm, drawn[0] if drawn else "upstream")


def depth_factor(init_fn: Any, layer_number: int, n_layers: int) -> float:
    """The factor that OLMo's ``init_fn`` puts on the residual projections of a block.

    :param layer_number: 1-based index of the block.
    :raises LNSConfigError: an ``init_fn`` whose depth factor is not known.
    """
    factors = {"mitchell": 1.0 / math.sqrt(2.0 * layer_number), "full_megatron": 1.0 / math.sqrt(2.0 * n_layers)}
    factors |= dict.fromkeys(("normal", *types.INIT_FNS), 1.0)
    if (name := str(init_fn)) not in factors:
        raise LNSConfigError(
            f"init_fn {name!r}: its depth factor is not known; use normal, mitchell or full_megatron, "
            "or OLMO_LNS_INITIALIZATION=upstream"
        )
    return factors[name]


def wrap_block_reset(reset: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``OLMoBlock.reset_parameters``, which draws ``attn_out`` and ``ff_out`` with OLMo's depth factor.

    Multiplying the stock draw keeps the random stream, and is exact for OLMo's normals truncated at a multiple of
    their standard deviation. It works on meta tensors and on FSDP shards.
    """

    @torch.no_grad()
    def wrapped(self: Any) -> None:
        reset(self)
        wanted = getattr(self, "lns_initialization", "upstream")
        if wanted == "upstream":
            return
        number, count = self.layer_id + 1, self.config.n_layers
        present, scale = depth_factor(self.config.init_fn, number, count), factor(wanted, number, count)
        for weight in (self.attn_out.weight, self.ff_out.weight):
            if present != 1.0:
                weight.div_(present)
            if scale != 1.0:
                weight.mul_(scale)

    return wrapped


def wrap_reset(reset: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``reset_parameters`` of the model or of a block class, which ask for ``init_fn`` by name.

    OLMo draws our initializations as ``normal``; the config keeps the name that defines the run.
    """

    def wrapped(self: Any) -> None:
        from olmo.config import InitFnType

        asked = self.config.init_fn  # hf_olmo passes a plain string
        if str(asked) in types.INIT_FNS:
            self.config.init_fn = InitFnType.normal
        try:
            reset(self)
        finally:
            self.config.init_fn = asked
        embedding_norm = getattr(getattr(self, "transformer", None), "emb_norm", None)
        if embedding_norm is not None and types.has_scheme(self.config.layer_norm_type):
            # OLMo never resets it: after meta device it would be what the memory held.
            embedding_norm.reset_parameters()

    return wrapped
