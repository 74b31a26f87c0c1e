"""OLMo's blocks and norms under a scheme: :func:`attach_to_block` turns a block that OLMo has built into the scheme's.

A scheme that only multiplies the norm before a sub-layer changes the two norms, and the block keeps its class. Any
other scheme replaces the block's ``forward`` by the equation of its plan (:mod:`olmo_lns.schemes.plan`). With the plan
of Pre-LN this forward must compute what OLMo's own computes (:func:`check_forward`).

``attn_norm`` and ``ff_norm`` are the first, or only, norm of their sub-layer. A second norm is ``attn_norm_out``, and
learned factors are ``attn_gate`` and ``attn_omega``. The classes here are mixins. A module becomes an instance of a
subclass of its own class, so ``get_param_groups`` recognizes norms, and no parameter is renamed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Callable

import torch
import torch.distributed as dist
from torch import nn

from olmo_lns import probe, sites
from olmo_lns.errors import LNSConfigError, MeasurementError, UpstreamChangedError
from olmo_lns.measured import Measured
from olmo_lns.norm import DtypeRule, NormArithmetic
from olmo_lns.scaled import PicklableSubclass, picklable_subclass, scale
from olmo_lns.schemes import SUB_LAYERS, Learned, Plan, Scheme
from olmo_lns.sites import Site, SubLayer

#: Sub-layer -> its first, or only, norm in OLMo's blocks; a second norm has ``_out`` at the end.
NORMS = {"attn": "attn_norm", "ff": "ff_norm"}
#: Attributes of OLMo's blocks that every scheme needs, and those that the forward of a :class:`SchemeBlock` reads.
_PARTS = (*NORMS.values(), "attn_out", "ff_out")
_PARTS_OF_FORWARD = ("attention", "act", "ff_proj", "dropout", "_activation_checkpoint_fn")

_Run = Callable[..., Any]
_CONSTANTS = ("input_scale", "norm_scale", "output_scale", "stream_scale", "alpha")


class LearnedFactor(PicklableSubclass):
    """A learned factor in the residual addition: a vector (d_model,) or one number (1,), in fp32.

    This class is a mixin. The module is an instance of a subclass of it and of OLMo's ``LayerNormBase``. OLMo puts the
    parameters of norms into an optimizer group, and would refuse parameters of a module of another class. One number
    has the shape (1,), because FSDP refuses parameters without a dimension.
    """

    def __init__(self: Any, config: Any, learned: Learned) -> None:
        nn.Module.__init__(self)
        self.learned = learned
        size = learned.elements(config.d_model)
        self.weight = nn.Parameter(torch.full((size,), learned.start, device=config.init_device))
        self.register_parameter("bias", None)

    def reset_parameters(self: Any) -> None:
        nn.init.constant_(self.weight, self.learned.start)


class SchemeBlock(PicklableSubclass):
    """Mixin for OLMo's block classes: a block that computes its two plans."""

    lns_plans: dict[str, Plan]
    #: Constants that are not 1, as 0-d CPU tensors: for a float torch.compile would build a graph per layer.
    lns_constants: dict[str, dict[str, torch.Tensor | None]]

    def forward(
        self: Any,
        x: torch.Tensor,
        attention_bias: torch.Tensor | None = None,
        layer_past: tuple[torch.Tensor, torch.Tensor] | None = None,
        use_cache: bool = False,
        max_doc_len: int | None = None,
        cu_doc_lens: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
        """Return the stream (batch, length, d_model) after the block, and keys and values if ``use_cache``."""
        run: _Run = self._activation_checkpoint_fn or _call
        q, k, v = self._queries_keys_values(self._enter("attn", x, run))
        documents = {"max_doc_len": max_doc_len, "cu_doc_lens": cu_doc_lens}
        h, cache = run(self.attention, q, k, v, attention_bias, layer_past=layer_past, use_cache=use_cache, **documents)
        x = self._leave("attn", x, h, run)
        h = self.ff_out(run(self.act, self.ff_proj(self._enter("ff", x, run))))
        return self._leave("ff", x, h, run), cache

    def _queries_keys_values(self: Any, h: torch.Tensor) -> tuple[torch.Tensor, ...]:
        fused = hasattr(self, "att_proj")
        projections = (self.att_proj,) if fused else (self.q_proj, self.k_proj, self.v_proj)
        projections_of_h: tuple[torch.Tensor, ...] = tuple(projection(h) for projection in projections)
        if (limit := self.config.clip_qkv) is not None:
            projections_of_h = tuple(projected.clamp_(min=-limit, max=limit) for projected in projections_of_h)
        return projections_of_h[0].split(self.fused_dims, dim=-1) if fused else projections_of_h

    def _enter(self, sub_layer: str, x: torch.Tensor, run: _Run) -> torch.Tensor:
        """Return the input of a sub-layer. :param x: the stream."""
        plan, constants = self.lns_plans[sub_layer], self.lns_constants[sub_layer]
        h = _times(x, constants["input_scale"])
        if plan.norm_before:
            h = run(getattr(self, NORMS[sub_layer]), h)
        return _times(h, constants["norm_scale"])

    def _leave(self: Any, sub_layer: str, x: torch.Tensor, h: torch.Tensor, run: _Run) -> torch.Tensor:
        """Return the stream after a sub-layer. :param x: the stream before it. :param h: the sub-layer's output."""
        plan, constants = self.lns_plans[sub_layer], self.lns_constants[sub_layer]
        if plan.norm_on_output:
            h = run(getattr(self, f"{NORMS[sub_layer]}_out" if plan.norm_before else NORMS[sub_layer]), h)
        h = self.dropout(h)
        if plan.gate is not None:
            h = getattr(self, f"{sub_layer}_gate").weight * h
        if plan.omega is not None:
            x = getattr(self, f"{sub_layer}_omega").weight * x
        x = _times(x, constants["alpha"]) + _times(h, constants["output_scale"])
        if plan.norm_on_sum:
            x = run(getattr(self, f"{NORMS[sub_layer]}_out" if plan.norm_count == 2 else NORMS[sub_layer]), x)
        return _times(x, constants["stream_scale"])

    def lns_plan(self, sub_layer: str) -> Plan:
        """Return the plan that ``forward`` computes."""
        groups = getattr(getattr(self, NORMS[sub_layer]), "lns_groups", 1)
        return replace(self.lns_plans[sub_layer], groups=groups)


def _call(function: _Run, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _times(x: torch.Tensor, constant: torch.Tensor | None) -> torch.Tensor:
    return x if constant is None else x * constant


#: Role -> sub-layer and its modules; ``v`` is a part of ``att_proj`` in a sequential block.
_ROLES = {
    "qkv": ("attn", ("att_proj", "q_proj", "k_proj", "v_proj")),
    "v": ("attn", ("v_proj",)),
    "o": ("attn", ("attn_out",)),
    "ff_in": ("ff", ("ff_proj",)),
    "ff_out": ("ff", ("ff_out",)),
}


@torch.no_grad()
def apply_init_factors(block: Any) -> None:
    """Multiply the weights of ``block`` by the ``init_factors`` of its plans. Call it once after each draw.

    :raises LNSConfigError: if the rows of ``v`` cannot be found in this process's shard.
    """
    for sub_layer, plan in getattr(block, "lns_plans", {}).items():
        for role, factor in plan.init_factors:
            owner, modules = _ROLES[role]
            if owner != sub_layer:
                continue
            if role == "v" and not hasattr(block, "v_proj"):
                _rows_of_v(block).mul_(factor)
            for name in modules:
                if hasattr(block, name):
                    getattr(block, name).weight.mul_(factor)


def _rows_of_v(block: Any) -> torch.Tensor:
    """Return the part of ``att_proj`` that computes v. These are its last rows.

    If the model was built on the meta device, OLMo draws the weights after FSDP has sharded them. The weight in this
    process is then a 1-D piece, and the result is the part of the piece that belongs to these rows. The pieces are in
    the order of the ranks. Under hybrid sharding each group of consecutive ranks has the whole parameter.

    :raises LNSConfigError: if the pieces of all ranks together are not whole parameters.
    """
    weight: torch.Tensor = block.att_proj.weight
    width, rows = block.config.d_model, block.fused_dims[2]
    if weight.dim() == 2:
        return weight[-rows:]
    total, sizes, rank = sum(block.fused_dims) * width, [weight.numel()], 0
    if dist.is_available() and dist.is_initialized():
        sizes, rank = [0] * dist.get_world_size(), dist.get_rank()
        dist.all_gather_object(sizes, weight.numel())
    first = sum(sizes[:rank]) % total
    if sum(sizes) % total or first + weight.numel() > total:
        raise LNSConfigError(
            "The gain on the v rows of att_proj cannot be initialized, because the ranks do not have consecutive "
            f"parts of this matrix. This process has {weight.numel()} of {total} elements, and all ranks have {sizes}. "
            "Use model.block_type: llama, in which v_proj is a separate matrix, or initialize without the meta device "
            "(model.init_device: cpu)."
        )
    return weight[max(0, total - rows * width - first) :]


def arithmetic_of(norm: Any) -> NormArithmetic:
    """Return the arithmetic of OLMo's ``RMSLayerNorm``, or that of its ``LayerNorm``."""
    if not hasattr(norm, "low_precision"):
        return NormArithmetic()
    return NormArithmetic(subtracts_mean=True, dtypes=DtypeRule.AUTOCAST if norm.low_precision else DtypeRule.TORCH)


class Grouped(PicklableSubclass):
    """Mixin for OLMo's norms: they normalize each group of channels as OLMo does, and then apply gain and bias."""

    lns_groups: int
    lns_norm_of_group: Any

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        normalized: torch.Tensor = self.lns_norm_of_group(x.unflatten(-1, (self.lns_groups, -1))).flatten(-2)
        y = normalized if self.weight is None else self.weight * normalized
        y = y if self.bias is None else y + self.bias
        return y.to(normalized.dtype) if hasattr(self, "low_precision") else y  # a LayerNorm does not promote


#: Class, settings and parameters of a narrow block -> what the probe found. A process that builds several models, such
#: as ``olmo-lns verify``, probes one block. It compares the other blocks, of later models too, with the result.
_probed: dict[tuple[Any, ...], probe.BlockSites] = {}


def check_forward(
    block: Any, where: str, *, only_scales_norms: bool, earlier: probe.BlockSites | None = None
) -> probe.BlockSites | None:
    """Run a narrow copy of OLMo's own block before it is changed.

    Some schemes keep OLMo's forward. The block must then read its stream through its two norms and nothing else. Any
    other scheme replaces the forward. A :class:`SchemeBlock` with the plan of Pre-LN must then compute what OLMo's
    forward computes.

    :param earlier: the result for an earlier block of the model. A block that computes the same is not probed again.
    :returns: what the probe found, or None under a scheme that replaces OLMo's forward.
    :raises LNSConfigError: if the block does not read its stream through its two norms.
    :raises MeasurementError: if the block cannot be run, or OLMo's forward computes something else than this package's.
    """
    narrow_block = _narrow(block)
    x = torch.randn(1, 4, narrow_block.config.d_model, generator=torch.Generator().manual_seed(0), device="cpu")
    if only_scales_norms:
        call = probe.Call((x,), {"attention_bias": None}, 0)
        shapes = tuple((name, parameter.shape) for name, parameter in narrow_block.named_parameters())
        key = type(block), repr(narrow_block.config), shapes
        earlier = earlier or _probed.get(key)
        expected = tuple(NORMS.values())
        found = probe.pre_ln_sites(narrow_block, call, where=where, expected_names=expected, earlier=earlier)
        if found is not earlier:
            with torch.random.fork_rng(devices=[]):
                for trains in (False, True):  # now, before anything changes the class of the block
                    found.replay.result(trains=trains)
            _probed[key] = found
        return found
    copied = probe.random_copy(narrow_block)
    with torch.no_grad():
        stock = copied(x, attention_bias=None)[0]
        replace_forward(copied, dict.fromkeys(SUB_LAYERS, Plan()))
        error = float((copied(x, attention_bias=None)[0] - stock).norm() / stock.norm())
    if not error < probe.SAME:
        raise MeasurementError(
            f"{where} ({type(block).__name__}): with the plan of Pre-LN, this package's forward differs from OLMo's "
            f"own by {error:.2g} of its size. Expected no difference. In this version of OLMo, use a scheme that only "
            "multiplies norms, such as lns."
        )
    return None


def require_parts(block: Any, *, only_scales_norms: bool) -> None:
    """Check that a block of OLMo has the attributes that a scheme needs.

    :param only_scales_norms: the scheme keeps OLMo's forward.
    :raises UpstreamChangedError: if one is missing. The message has its name.
    """
    needed = _PARTS if only_scales_norms else (*_PARTS, *_PARTS_OF_FORWARD)
    if missing := [name for name in needed if not hasattr(block, name)]:
        raise UpstreamChangedError(
            f"A scheme was selected, but {type(block).__name__} of this OLMo has no {', '.join(missing)}. Install "
            "another version of ai2-olmo or a newer olmo-lns, or use a stock layer_norm_type."
        )


def _narrow(block: Any) -> Any:
    """Build a block of the same class, number and settings, 8 channels a head wide, on the CPU.

    Flash attention is off: it needs a GPU and refuses fp32.
    """
    from olmo.model import BufferCache

    width = 8 * block.config.n_heads
    hidden = None if block.config.mlp_hidden_size is None else 2 * width
    narrow = {"d_model": width, "mlp_hidden_size": hidden, "init_device": "cpu", "flash_attention": False}
    with torch.random.fork_rng(devices=[]):  # the run's own draws stay what they are
        return type(block)(block.layer_id, replace(block.config, **narrow), BufferCache())


def replace_forward(block: Any, plans: dict[str, Plan]) -> None:
    """Change ``block`` in place to a :class:`SchemeBlock`, whose forward computes ``plans``."""
    block.lns_plans, block.lns_constants = plans, {}
    for sub_layer, plan in plans.items():
        block.lns_constants[sub_layer] = constants = dict[str, Any]()
        for name in _CONSTANTS:
            value = getattr(plan, name)
            constants[name] = None if value == 1.0 else torch.tensor(value, dtype=torch.float64, device="cpu")
    block.__class__ = picklable_subclass(SchemeBlock, block.__class__)


def attach_to_block(block: Any, scheme: Scheme, layer_number: int) -> set[Measured]:
    """Change a block that OLMo has built to the block of ``scheme``, in place.

    :param layer_number: 1-based, global.
    :returns: what was measured of its norms, which is nothing for a block whose forward was replaced.
    :raises MeasurementError: if a norm cannot be scaled.
    """
    from olmo.model import LayerNormBase

    config = block.config
    measured: set[Measured] = set()
    if scheme.only_scales_norms(config.n_layers):
        for sub_layer in SUB_LAYERS:
            site, norm = Site(scheme, layer_number, config.n_layers, sub_layer), getattr(block, NORMS[sub_layer])
            width, arithmetic = config.d_model, arithmetic_of(norm)
            measured |= scale(norm, site.plan.norm_scale, where=site, width=width, arithmetic=arithmetic)
            sites.store(norm, site)
        return measured
    sites.store(block, *(SubLayer(scheme, layer_number, config.n_layers, sub_layer) for sub_layer in SUB_LAYERS))
    plans = {sub_layer: scheme.plan(layer_number, config.n_layers, sub_layer) for sub_layer in SUB_LAYERS}
    for sub_layer, plan in plans.items():
        if plan.norm_count == 2:
            setattr(block, f"{NORMS[sub_layer]}_out", LayerNormBase.build(config, size=config.d_model))
        if plan.groups > 1:
            norm = getattr(block, NORMS[sub_layer])
            width = config.d_model // plan.groups
            norm.lns_groups = plan.groups
            norm.lns_norm_of_group = LayerNormBase.build(config, size=width, elementwise_affine=False)
            norm.__class__ = picklable_subclass(Grouped, norm.__class__)
        for name in ("gate", "omega"):
            if (learned := getattr(plan, name)) is not None:
                setattr(block, f"{sub_layer}_{name}", picklable_subclass(LearnedFactor, LayerNormBase)(config, learned))
    replace_forward(block, plans)
    return measured
