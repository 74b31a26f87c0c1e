"""Wrappers of ``OLMo.__init__`` and ``OLMo.reset_parameters``: attach a scheme, draw the weights, measure, log a line.

OLMo draws ``attn_out`` and ``ff_out`` of block l (1-based) of L blocks with the standard deviation of the other
matrices times a depth factor. The factor is 1/sqrt(2·l) for ``init_fn: mitchell``, 1/sqrt(2·L) for ``full_megatron``,
and 1 for ``normal``. A scheme removes it, because the paper finds the two together worse than LNS alone (arXiv
2502.05795, footnote 1 and section 6). ``normal_scaled`` and ``normal_depth_scaled`` of this package are ``normal`` with
the two projections times one of those factors. ``full_megatron`` also draws the head at 1/sqrt(d).
"""

from __future__ import annotations

import math
import weakref
from typing import Any, Callable

import torch

from olmo_lns import hook, sites, start_up_line
from olmo_lns.errors import LNSConfigError, MeasurementError
from olmo_lns.initialization import check_drawn
from olmo_lns.integrations.olmo import block as blocks
from olmo_lns.integrations.olmo import norm_types
from olmo_lns.measured import Measured, describe
from olmo_lns.processes import raise_on_every_rank
from olmo_lns.schemes import SUB_LAYERS, Scheme
from olmo_lns.schemes.depth_factor import depth_factor

#: The residual output projections, and their roles in the init_factors of a plan.
_OUTPUTS = {"attn_out": "o", "ff_out": "ff_out"}
#: Elements of a weight that are measured; they tell its standard deviation to 0.3 %.
_SAMPLE = 2**16
#: id of a config that has built a model -> a reference to it. A mark on the config would be part of a stock object.
_built: dict[int, weakref.ref[Any]] = {}


def wrap_model_init(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``OLMo.__init__``: after OLMo has built and drawn its own model, the wrapper attaches the scheme."""

    def wrapped(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        scheme, initialization = norm_types.requested(config)
        selected = not scheme.is_pre_ln or initialization != "upstream"
        if selected:
            norm_types.require_supported(config)
        weights_drawn = bool(kwargs.get("init_params", args[0] if args else True)) and str(config.init_device) != "meta"
        with norm_types.stock_names(config):
            init(self, config, *args, **kwargs)
            measured = _attach_to_model(self, scheme, initialization, weights_drawn) if selected else set()
        number = id(config)
        _built[number] = weakref.ref(config, lambda _: _built.pop(number, None))
        if measured or not scheme.is_pre_ln:  # not for a baseline whose checkpoint is opened, as nothing was drawn
            start_up_line.write(_compose_start_up_line(self, scheme, initialization, measured))

    return wrapped


def _attach_to_model(model: Any, scheme: Scheme, initialization: str, weights_drawn: bool) -> set[Measured]:
    """Attach the requested scheme to a model that OLMo has just built.

    :param weights_drawn: true if OLMo has drawn the weights.
    :returns: what was measured.
    :raises UpstreamChangedError: if a block lacks an expected part.
    """
    measured: set[Measured] = set()
    numbered = blocks_of(model)
    only_scales_norms = scheme.only_scales_norms(len(numbered))
    for block in numbered:
        blocks.require_parts(block, only_scales_norms=only_scales_norms)
    if not scheme.is_pre_ln:
        found = None
        for number, block in enumerate(numbered, start=1):
            where = f"block {number}"
            found = blocks.check_forward(block, where, only_scales_norms=only_scales_norms, earlier=found)
            measured.add(Measured.BLOCK if found is None else Measured.SITES)
            measured |= blocks.attach_to_block(block, scheme, number)
        sites.require_complete(model, scheme, model.config.n_layers)
    model.lns_initialization = initialization
    if weights_drawn and _finish_draw(model):
        measured.add(Measured.INITIALIZATION)
    return measured


def _compose_start_up_line(model: Any, scheme: Scheme, initialization: str, measured: set[Measured]) -> str:
    config, state = model.config, {"plain": "off", "upstream": "as upstream"}
    text = f"scaled initialization {state.get(initialization, f'on, {initialization}')} (init_fn {config.init_fn})"
    if scheme.is_pre_ln:
        return f"Pre-LN; initialization {initialization} (init_fn {config.init_fn}); {describe(measured)}"
    norm = str(config.layer_norm_type)
    return start_up_line.compose(model, config.n_layers, measured=measured, norm=norm, initialization=text)


def blocks_of(model: Any) -> list[Any]:
    """Return the blocks of an OLMo model in order, also of a model with block groups.

    :raises MeasurementError: if the blocks are not numbered by their positions.
    """
    from olmo.model import OLMoBlock

    blocks_in_order = [module for module in model.modules() if isinstance(module, OLMoBlock)]
    numbers = [block.layer_id + 1 for block in blocks_in_order]
    if numbers != list(range(1, model.config.n_layers + 1)):
        raise MeasurementError(
            f"The blocks of this model have the numbers {numbers}, but the factor of a block depends on its number. "
            f"Expected 1 to {model.config.n_layers}, each once and in order."
        )
    return blocks_in_order


def request_plain_initialization(config: Any) -> None:
    """See :func:`olmo_lns.plain_initialization`."""
    hook.require_wrapped("olmo")
    if id(config) in _built:
        raise LNSConfigError(
            "this ModelConfig has built a model already. Call plain_initialization before OLMo(config)."
        )
    config.lns_plain_initialization = True
    norm_types.requested(config)


# --- initialization -------------------------------------------------------------------------------------------------


#: OLMo's ``init_fn`` -> the initialization with its depth factor. The values that this package adds,
#: such as ``normal_scaled``, are passed to OLMo as ``normal``, which has no depth factor.
_STOCK_INITIALIZATION = {
    "mitchell": "depth_scaled",
    "full_megatron": "scaled",
    **dict.fromkeys(("normal", *norm_types.INIT_FNS), "plain"),
}


def _stock_depth_factor(init_fn: Any, layer_number: int, n_layers: int) -> float:
    """Return the factor with which OLMo draws the residual projections of a block under ``init_fn``."""
    if (name := str(init_fn)) not in _STOCK_INITIALIZATION:
        raise LNSConfigError(
            f"init_fn is {name!r}, whose depth factor is unknown. Use normal, mitchell or full_megatron, or set "
            "OLMO_LNS_INITIALIZATION=upstream."
        )
    return depth_factor(_STOCK_INITIALIZATION[name], layer_number, n_layers)


def wrap_reset(reset: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``OLMo.reset_parameters``, which draws every weight by the name of ``init_fn``."""

    def wrapped(self: Any) -> None:
        with norm_types.stock_names(self.config):
            reset(self)
        if "lns_initialization" in vars(self):  # not while the model's constructor draws
            _finish_draw(self)

    return wrapped


@torch.no_grad()
def _finish_draw(model: Any) -> bool:
    """Change freshly drawn weights to the requested initialization, and measure them.

    OLMo's depth factor of the residual projections is replaced by the requested factor. A multiplication of the stock
    draw keeps the random stream. OLMo truncates its normal distributions at a multiple of their standard
    deviation, so the result has exactly the requested distribution. This also works for FSDP shards.

    :returns: true if a weight was measured.
    """
    initialization, config = model.lns_initialization, model.config
    for number, block in enumerate(blocks_of(model), start=1):
        if initialization != "upstream":
            ratio = depth_factor(initialization, number, config.n_layers)
            ratio /= _stock_depth_factor(config.init_fn, number, config.n_layers)
            for weight in (getattr(block, name).weight for name in _OUTPUTS if ratio != 1.0):
                weight.mul_(ratio)
        for name in ("norm_out", "gate", "omega"):
            for sub_layer in SUB_LAYERS:
                if (module := getattr(block, f"{sub_layer}_{name}", None)) is not None:
                    module.reset_parameters()
        blocks.apply_init_factors(block)
    if "emb_norm" in model.transformer:
        # OLMo never resets this norm, which would hold random memory after the meta device.
        model.transformer.emb_norm.reset_parameters()
    return initialization != "upstream" and _measure_draw(model, initialization)


def _measure_draw(model: Any, initialization: str) -> bool:
    """Measure the standard deviation of the residual output projections, which have just been drawn.

    :returns: true if a weight was measured.
    :raises MeasurementError: if weights have another standard deviation than requested. It is raised on every rank if
        the weights are shards.
    """
    measured, problem, numbered = False, "", blocks_of(model)
    try:
        for number, block in enumerate(numbered, start=1):
            plans = getattr(block, "lns_plans", {}).values()
            factors = {role: factor for plan in plans for role, factor in plan.init_factors}
            for name, role in _OUTPUTS.items():
                projection = getattr(block, name)
                std = _std(model.config, projection.in_features) * factors.get(role, 1.0)
                std *= depth_factor(initialization, number, model.config.n_layers)
                sample = {name: projection.weight.flatten()[:_SAMPLE]}
                measured |= check_drawn(sample, std, where=f"block {number}")
    except MeasurementError as error:
        problem = str(error)
    if numbered[0].attn_out.weight.dim() == 1:  # a shard of FSDP
        raise_on_every_rank(problem)
    if problem:
        raise MeasurementError(problem)
    return measured


def _std(config: Any, fan_in: int) -> float:
    """Return the standard deviation of OLMo's draw of a matrix, without a depth factor."""
    std = 1.0 / math.sqrt(fan_in) if str(config.init_fn) == "mitchell" else config.init_std
    normal = str(config.init_fn) in ("normal", *norm_types.INIT_FNS)
    if cut := config.init_cutoff_factor or (None if normal else 3.0):  # a normal truncated at so many deviations
        density = math.exp(-(cut**2) / 2) / math.sqrt(2 * math.pi)
        std *= math.sqrt(1 - 2 * cut * density / math.erf(cut / math.sqrt(2)))
    return float(std)
