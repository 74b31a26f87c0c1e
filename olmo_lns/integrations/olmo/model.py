"""Wraps the construction of an OLMo model: attach at the end of its constructor, measure, say so.

``attn_out`` and ``ff_out`` of block l (1-based) of L blocks are drawn by OLMo with the standard deviation of the other
matrices times a depth factor: 1/sqrt(2·l) for ``init_fn: mitchell``, 1/sqrt(2·L) for ``full_megatron``, 1 for
``normal``. A scheme replaces that factor, and the paper finds the two together worse than LNS alone (arXiv 2502.05795,
footnote 1 and section 6). ``normal_scaled`` and ``normal_depth_scaled`` are ours: ``normal``, and the two projections
times one of those factors. ``full_megatron`` is no such thing: it also draws the head at 1/sqrt(d).
"""

from __future__ import annotations

import logging
import math
from typing import Any, Callable

import torch

from olmo_lns import hook, probe, sites
from olmo_lns.errors import LNSConfigError, MeasurementError, UpstreamChangedError, one_line
from olmo_lns.integrations.olmo import block as blocks
from olmo_lns.integrations.olmo import types
from olmo_lns.schemes.initialization import factor

log = logging.getLogger("olmo_lns")

#: The residual output projections: sub-layer, and role in the gains of its plan.
_OUTPUTS = {"attn_out": ("attn", "o"), "ff_out": ("ff", "ff_out")}
#: So many elements of a weight tell its standard deviation to 0.3 %.
_SAMPLE = 2**16


def wrap_model_init(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``OLMo.__init__``: OLMo builds and draws its own model, which then gets its scheme."""

    def wrapped(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        asked = types.asked(config)
        if not asked.nothing:
            hook.require("olmo")
            types.require_supported(config)
        drawn = bool(kwargs.get("init_params", args[0] if args else True)) and str(config.init_device) != "meta"
        with types.stock(config):
            init(self, config, *args, **kwargs)
            measured = [] if asked.nothing else _apply(self, asked, drawn)
        config.lns_built = True
        if not asked.nothing:
            log.info("%s", _line(self, asked, measured))

    return wrapped


def _apply(model: Any, asked: types.Asked, drawn: bool) -> list[str]:
    """Give a model that OLMo has just built what was asked for.

    :param drawn: its weights are, too. :returns: what was measured, in words.
    :raises UpstreamChangedError: its blocks have other parts than an OLMo that is known.
    """
    measured: list[str] = []
    try:
        numbered = _numbered(model)
        if not asked.scheme.is_pre_ln:
            measured += _measure_blocks(numbered, asked)
            for number, block in numbered.items():
                blocks.attach(block, asked.scheme, number)
            sites.check(model, asked.scheme, model.config.n_layers)
            if any(isinstance(module, sites.Scaled) for module in model.modules()):
                measured = ["output", "gradient", *measured]
        model.lns_asked = asked
        for block in numbered.values():
            block.lns_initialization = asked.initialization
            if drawn:
                _draw_as_asked(block)
                blocks.apply_gains(block)
    except (AttributeError, TypeError) as error:
        raise UpstreamChangedError(
            f"{asked.scheme} was asked for, but the parts of this OLMo's blocks are not where they were "
            f"({one_line(error)}). Install another version of ai2-olmo or a newer olmo-lns, or take a stock type."
        ) from error
    return [*measured, "initialization"] if drawn and _measure_draw(model) else measured


def _numbered(model: Any) -> dict[int, Any]:
    """The blocks by their 1-based number.

    :raises MeasurementError: OLMo numbers them in another way than by their places.
    """
    found = blocks_of(model)
    numbers = [block.layer_id + 1 for block in found]
    if numbers != list(range(1, model.config.n_layers + 1)):
        raise MeasurementError(
            f"found blocks that this OLMo numbers {numbers}, expected 1 to {model.config.n_layers}, each once and in "
            "order: the factor of a block depends on its number."
        )
    return dict(enumerate(found, start=1))


def _measure_blocks(numbered: dict[int, Any], asked: types.Asked) -> list[str]:
    """Measure each block, before it is changed."""
    keeps, kinds = asked.scheme.keeps_forward(len(numbered)), set[Any]()
    for number, block in numbered.items():
        kind, where = probe.structure(block), f"block {number}"
        if keeps:
            blocks.check_pre_ln(block, where, known=kind in kinds)
        else:
            blocks.check_forward(block, where)
        kinds.add(kind)
    return ["block"]


def _line(model: Any, asked: types.Asked, measured: list[str]) -> str:
    config, state = model.config, {"plain": "off", "upstream": "as upstream"}
    state_now = state.get(asked.initialization, f"on, {asked.initialization}")
    drawn = f"scaled initialization {state_now} (init_fn {config.init_fn})"
    if asked.scheme.is_pre_ln:
        return f"Pre-LN; {drawn}; measured: {', '.join(measured) or 'nothing yet'}"
    line = sites.start_up_line
    return line(model, config.n_layers, measured=measured, norm=str(config.layer_norm_type), initialization=drawn)


def wrap_norm_build(build: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``LayerNormBase.build``: while a model is built it sees OLMo's own types; another caller has no number."""

    def wrapped(cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        if types.has_scheme(config.layer_norm_type):
            raise LNSConfigError(
                f"layer_norm_type={config.layer_norm_type!s} is for whole models: found a norm or a block that is "
                "built by itself, expected OLMo(config). Take a stock type, and olmo_lns.apply on the finished model."
            )
        return build(cls, config, *args, **kwargs)

    return wrapped


def blocks_of(model: Any) -> list[Any]:
    """The blocks of an OLMo model in order, whatever its ``block_group_size``."""
    from olmo.model import OLMoBlock

    return [module for module in model.modules() if isinstance(module, OLMoBlock)]


def ask_for_plain_initialization(config: Any) -> None:
    """See :func:`olmo_lns.plain_initialization`."""
    hook.require("olmo")
    if getattr(config, "lns_built", False):
        raise LNSConfigError("a model was built from this ModelConfig before: its weights are drawn already")
    config.lns_plain_initialization = True
    types.asked(config)


# --- initialization -------------------------------------------------------------------------------------------------


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


@torch.no_grad()
def _draw_as_asked(block: Any) -> None:
    """Take OLMo's depth factor off the residual projections that it has just drawn, and put the one asked for on.

    Multiplying the stock draw keeps the random stream, and is exact for OLMo's normals truncated at a multiple of
    their standard deviation. It works on meta tensors and on FSDP shards.
    """
    if (wanted := block.lns_initialization) == "upstream":
        return
    number, count = block.layer_id + 1, block.config.n_layers
    present, scale = depth_factor(block.config.init_fn, number, count), factor(wanted, number, count)
    for weight in (getattr(block, name).weight for name in _OUTPUTS):
        if present != 1.0:
            weight.div_(present)
        if scale != 1.0:
            weight.mul_(scale)


def wrap_block_reset(reset: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``OLMoBlock.reset_parameters``, which draws ``attn_out`` and ``ff_out``."""

    def wrapped(self: Any) -> None:
        reset(self)
        if "lns_initialization" in vars(self):
            _draw_as_asked(self)

    return wrapped


def wrap_reset(reset: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``reset_parameters`` of the model or of a block class, which ask for ``init_fn`` by name."""

    def wrapped(self: Any) -> None:
        with types.stock(self.config):
            reset(self)
        asked = vars(self).get("lns_asked")  # the model's, once it is built: not while its constructor draws
        if asked is None:
            return
        if "emb_norm" in self.transformer and not asked.scheme.is_pre_ln:
            # OLMo never resets it: after meta device it would be what the memory held.
            self.transformer.emb_norm.reset_parameters()
        _measure_draw(self)

    return wrapped


def _measure_draw(model: Any) -> bool:
    """Measure the standard deviation of the residual output projections, which have just been drawn.

    :returns: whether there was anything to measure.
    :raises MeasurementError: OLMo drew them in another way; on every rank, where they are shards.
    """
    measured, sharded, problem = False, False, ""
    for number, block in enumerate(blocks_of(model), start=1):
        for name in _OUTPUTS:
            weight = getattr(block, name).weight
            std, sharded = _std(block, name), sharded or weight.dim() == 1
            try:
                if std is not None:
                    measured |= probe.check_drawn({name: weight.flatten()[:_SAMPLE]}, std, where=f"block {number}")
            except MeasurementError as error:
                problem = problem or str(error)
    if sharded:
        probe.agree(problem)
    if problem:
        raise MeasurementError(problem)
    return measured


def _std(block: Any, name: str) -> float | None:
    """The standard deviation that a projection was asked to have; None where it is OLMo's own affair."""
    config = block.config
    if block.lns_initialization == "upstream":
        return None
    fan_in = config.d_model if name == "attn_out" else getattr(block, name).in_features
    mitchell, normal = str(config.init_fn) == "mitchell", str(config.init_fn) in ("normal", *types.INIT_FNS)
    std = 1.0 / math.sqrt(fan_in) if mitchell else config.init_std
    if cut := config.init_cutoff_factor or (None if normal else 3.0):  # a normal truncated at so many deviations
        density = math.exp(-(cut**2) / 2) / math.sqrt(2 * math.pi)
        std *= math.sqrt(1 - 2 * cut * density / math.erf(cut / math.sqrt(2)))
    std *= factor(block.lns_initialization, block.layer_id + 1, config.n_layers)
    sub_layer, role = _OUTPUTS[name]
    return std * math.prod(gain for of, gain in getattr(block, "lns_gains", {}).get(sub_layer, ()) if of == role)
