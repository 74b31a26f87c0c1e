"""OLMo's blocks and norms under a scheme: :func:`attach` turns a block that OLMo has built into the scheme's.

A scheme that only multiplies the norm in front of a sub-layer leaves the block its class and changes its two norms.
Any other gets another ``forward``, everything else stays OLMo's. The factors cost no pass over the activations: those
of a norm are folded into it, those of the residual addition into the addition.

``attn_norm`` and ``ff_norm`` are the first (or only) norm of their sub-layer, wherever it sits; a second one is
``attn_norm_out``; learned factors are ``attn_gate`` and ``attn_omega``. The norms are subclasses of OLMo's:
``get_param_groups`` recognises norms by class, and a wrapper would rename parameters in the state dict.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from typing import Any, Callable

import torch
import torch.distributed as dist
from olmo.model import LayerNorm, LayerNormBase, OLMoBlock, OLMoLlamaBlock, OLMoSequentialBlock, RMSLayerNorm
from torch import nn

from olmo_lns.errors import LNSConfigError
from olmo_lns.integrations import norm_sites, patching
from olmo_lns.integrations.norm_sites import Scaled, Site, give
from olmo_lns.integrations.olmo import upstream
from olmo_lns.norm.dtypes import compute_dtype, output_dtype, rms_output_dtype, without_autocast
from olmo_lns.record import Record
from olmo_lns.schemes import SUB_LAYERS, Learned, Plan

_Run = Callable[..., Any]


def unsupported(plan: Plan, d_model: int) -> str:
    """The reason why a block of ours cannot compute ``plan``; ``""`` if it can."""
    if plan.norms not in (1, 2) or (plan.post and plan.norms > 1):
        return "expected one norm in a sub-layer, or one in front and one on the branch"
    if _weighs_shortcut(plan) and (plan.gate is not None or plan.branch_scale != 1.0):
        return "expected factors of the shortcut or of the branch, not of both"
    if (plan.norm_scale != 1.0 or plan.pre_scale != 1.0) and not plan.pre:
        return "it has a factor for a norm that is not there"
    if plan.groups > 1 and replace(plan, groups=1) != Plan():
        return "expected grouped statistics in a plain Pre-LN block only"
    if d_model % plan.groups:
        return f"{plan.groups} groups do not divide model.d_model={d_model}"
    return ""


def _weighs_shortcut(plan: Plan) -> bool:
    return plan.alpha != 1.0 or plan.omega is not None


class LearnedFactor(LayerNormBase):
    """A learned vector (d_model,) or number (1,), fp32. The block takes ``weight`` into its residual addition.

    A norm by class because OLMo's optimizer groups know norms and refuse a bare parameter; never
    0-d, which FSDP refuses.
    """

    def __init__(self, config: Any, learned: Learned) -> None:
        nn.Module.__init__(self)
        self.learned = learned
        size = learned.elements(config.d_model)
        self.weight = nn.Parameter(torch.full((size,), learned.start, device=config.init_device))
        self.register_parameter("bias", None)

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, self.learned.start)


class _Residual:
    """Where the norms of a sub-layer sit, and the constants that are not folded into a norm.

    ``factor`` is the shortcut's if it ``weighs_shortcut``, else the branch's. Whether the norm's input and the sum are
    multiplied is a flag, because a branch on the number itself would make torch.compile build one graph per layer.
    """

    def __init__(self, plan: Plan) -> None:
        self.pre, self.branch, self.post = plan.pre, plan.branch, plan.post
        self.weighs_shortcut = _weighs_shortcut(plan)
        self.factor = _Constant(plan.alpha if self.weighs_shortcut else 1.0 if plan.branch else plan.branch_scale)
        self.input, self.multiplies_input = _Constant(plan.pre_scale), plan.pre_scale != 1.0
        self.stream = _Constant(1.0 if plan.post else plan.stream_scale)
        self.multiplies_sum = self.stream.value != 1.0


class _Constant:
    """A number; for torch.compile an equal 0-d CPU tensor, as :attr:`Scaled.lns_factor`."""

    def __init__(self, value: float) -> None:
        self.value, self.tensor = value, torch.tensor(value, dtype=torch.float64, device="cpu")

    def times(self, x: torch.Tensor) -> torch.Tensor:
        return x * (self.tensor if torch.compiler.is_compiling() else self.value)


class _SchemeBlock(OLMoBlock):
    """Mixin in front of OLMo's block classes. A block that OLMo has built gets such a class as its ``__class__``."""

    lns_residual_attn: _Residual
    lns_residual_ff: _Residual
    lns_gains: dict[str, tuple[tuple[str, float], ...]]

    def forward(
        self,
        x: torch.Tensor,
        attention_bias: torch.Tensor | None = None,
        layer_past: tuple[torch.Tensor, torch.Tensor] | None = None,
        use_cache: bool = False,
        max_doc_len: int | None = None,
        cu_doc_lens: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
        """As OLMo's blocks: x of shape (batch, length, d_model), and the keys and values if ``use_cache``."""
        run: _Run = self._activation_checkpoint_fn or _call
        q, k, v = self._queries_keys_values(self._enter("attn", x, run))
        documents = {"max_doc_len": max_doc_len, "cu_doc_lens": cu_doc_lens}
        h, cache = run(self.attention, q, k, v, attention_bias, layer_past=layer_past, use_cache=use_cache, **documents)
        x = self._leave("attn", x, h, run)
        h = self.ff_out(run(self.act, self.ff_proj(self._enter("ff", x, run))))
        return self._leave("ff", x, h, run), cache

    def _queries_keys_values(self, h: torch.Tensor) -> tuple[torch.Tensor, ...]:
        fused = isinstance(self, OLMoSequentialBlock)
        projections = (self.att_proj,) if fused else (self.q_proj, self.k_proj, self.v_proj)
        found = tuple(projection(h) for projection in projections)
        if (limit := self.config.clip_qkv) is not None:
            found = tuple(projected.clamp_(min=-limit, max=limit) for projected in found)
        return found[0].split(self.fused_dims, dim=-1) if fused else found

    def _enter(self, sub_layer: str, x: torch.Tensor, run: _Run) -> torch.Tensor:
        residual: _Residual = getattr(self, f"lns_residual_{sub_layer}")
        if residual.multiplies_input:
            x = residual.input.times(x)
        return run(getattr(self, f"{sub_layer}_norm"), x) if residual.pre else x

    def _leave(self, sub_layer: str, x: torch.Tensor, h: torch.Tensor, run: _Run) -> torch.Tensor:
        """The stream after a sub-layer. :param x: the stream before it. :param h: what the sub-layer gave."""
        residual: _Residual = getattr(self, f"lns_residual_{sub_layer}")
        if residual.branch:
            h = run(self._last_norm(sub_layer), h)
        h = self.dropout(h)
        if residual.weighs_shortcut:
            x = _weighted_sum(h, x, getattr(self, f"{sub_layer}_omega", None), residual)
        else:
            x = _weighted_sum(x, h, getattr(self, f"{sub_layer}_gate", None), residual)
        if residual.multiplies_sum:
            x = residual.stream.times(x)
        return run(self._last_norm(sub_layer), x) if residual.post else x

    def _last_norm(self, sub_layer: str) -> Any:
        return getattr(self, f"{sub_layer}_norm_out", None) or getattr(self, f"{sub_layer}_norm")

    def lns_plan(self, sub_layer: str) -> Plan:
        """The plan that ``forward`` computes, from the modules and numbers that it uses."""
        residual: _Residual = getattr(self, f"lns_residual_{sub_layer}")
        first, last = getattr(self, f"{sub_layer}_norm"), self._last_norm(sub_layer)
        gate, omega = (getattr(self, f"{sub_layer}_{name}", None) for name in ("gate", "omega"))
        own = 1.0 if residual.weighs_shortcut else residual.factor.value
        scale, behind = (getattr(norm, "lns_scale", 1.0) for norm in (first, last))
        return Plan(
            pre=residual.pre,
            branch=residual.branch,
            post=residual.post,
            pre_scale=residual.input.value,
            norm_scale=scale if residual.pre else 1.0,
            branch_scale=own * (behind if residual.branch else 1.0),
            stream_scale=residual.stream.value * (behind if residual.post else 1.0),
            alpha=residual.factor.value if residual.weighs_shortcut else 1.0,
            gate=None if gate is None else gate.learned,
            omega=None if omega is None else omega.learned,
            gains=self.lns_gains[sub_layer],
            groups=getattr(first, "lns_groups", 1),
        )

    def reset_parameters(self) -> None:
        """OLMo's own draw, then what a scheme adds: its modules' start and its gains on the fresh weights."""
        super().reset_parameters()
        for sub_layer in SUB_LAYERS:
            for name in ("norm_out", "gate", "omega"):
                if (module := getattr(self, f"{sub_layer}_{name}", None)) is not None:
                    module.reset_parameters()
        _apply_gains(self)


class SchemeSequentialBlock(_SchemeBlock, OLMoSequentialBlock):
    """OLMo's sequential block under a scheme with a residual form of its own."""


class SchemeLlamaBlock(_SchemeBlock, OLMoLlamaBlock):
    """OLMo's llama block under a scheme with a residual form of its own."""


def _call(function: _Run, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _weighted_sum(plain: torch.Tensor, weighted: torch.Tensor, learned: Any, residual: _Residual) -> torch.Tensor:
    """``plain + factor * (learned * weighted)`` in one pass."""
    if torch.compiler.is_compiling():
        return plain + residual.factor.times(weighted if learned is None else learned.weight * weighted)
    if learned is None:
        return torch.add(plain, weighted, alpha=residual.factor.value)
    return torch.addcmul(plain, learned.weight, weighted, value=residual.factor.value)


#: Role -> sub-layer and modules, of which a block has some; ``v`` is a part of ``att_proj`` in a sequential block.
_ROLES = {
    "qkv": ("attn", ("att_proj", "q_proj", "k_proj", "v_proj")),
    "v": ("attn", ("v_proj",)),
    "o": ("attn", ("attn_out",)),
    "ff_in": ("ff", ("ff_proj",)),
    "ff_out": ("ff", ("ff_out",)),
}


@torch.no_grad()
def _apply_gains(block: Any) -> None:
    """Multiply the freshly drawn weights of ``block`` by its ``lns_gains``; once after each draw.

    :raises LNSConfigError: the rows of ``v`` cannot be found in this process's shard.
    """
    for sub_layer, gains in block.lns_gains.items():
        for role, gain in gains:
            owner, modules = _ROLES[role]
            if owner != sub_layer:
                continue
            if role == "v" and not hasattr(block, "v_proj"):
                _rows_of_v(block).mul_(gain)
            for name in modules:
                if hasattr(block, name):
                    getattr(block, name).weight.mul_(gain)


def _rows_of_v(block: Any) -> torch.Tensor:
    """The last rows of the fused projection ``att_proj``; of a shard of FSDP, the elements that lie in them.

    FSDP (meta device: OLMo draws after it has sharded) leaves a 1-D piece of each parameter, and the pieces lie in the
    order of the ranks. With hybrid sharding each group of consecutive ranks has the whole.

    :raises LNSConfigError: the pieces of all ranks do not make whole parameters.
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
            f"the gain on the v rows of att_proj cannot be placed: this process has {weight.numel()} of {total} "
            f"elements, all ranks {sizes}, which are not consecutive parts. Use model.block_type: llama, whose v_proj "
            "is a matrix of its own, or initialize without meta device (model.init_device: cpu)."
        )
    return weight[max(0, total - rows * width - first) :]


class LNSRMSLayerNorm(Scaled, RMSLayerNorm):
    """``lns_scale * RMSNorm(x)`` for x of shape (..., d_model); dtypes as OLMo's ``RMSLayerNorm``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.lns_backend.rms_norm(x, self.weight, self.eps, self.lns_factor, bias=self.bias)
        return y


class LNSOLMoLayerNorm(Scaled, LayerNorm):
    """``lns_scale * LayerNorm(x)`` for x of shape (..., d_model); dtypes as OLMo's ``LayerNorm``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weight, self.bias
        if self.low_precision:
            x = self._cast_if_autocast_enabled(x)
            weight, bias = (None if t is None else self._cast_if_autocast_enabled(t) for t in (weight, bias))
        with torch.autocast(enabled=False, device_type=x.device.type) if self.low_precision else nullcontext():
            y: torch.Tensor = self.lns_backend.layer_norm(x, weight, bias, self.eps, self.lns_factor)
        return y


class _Grouped(Scaled):
    """Statistics over groups of channels, x of shape (..., d_model); rounded once, at the end, as OLMo's norm is."""

    lns_groups: int

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        rms = isinstance(self, RMSLayerNorm)
        x = x if rms or not self.low_precision else self._cast_if_autocast_enabled(x)
        with without_autocast(x.device.type):
            parts = x.to(compute_dtype(x.dtype)).unflatten(-1, (self.lns_groups, -1))
            arguments = (None, self.eps, 1.0) if rms else (None, None, self.eps, 1.0)
            y = (self.lns_backend.rms_norm if rms else self.lns_backend.layer_norm)(parts, *arguments).flatten(-2)
            y = y if self.weight is None else self.weight * y
            y = y if self.bias is None else y + self.bias
        return y.to(rms_output_dtype(x, self.weight, self.bias) if rms else output_dtype(x.dtype, x.device.type))


class GroupedRMSLayerNorm(_Grouped, RMSLayerNorm):
    """RMSNorm over groups of channels."""


class GroupedLayerNorm(_Grouped, LayerNorm):
    """LayerNorm over groups of channels."""


#: OLMo's class -> ours, without and with groups of channels.
_SCALED: dict[type, tuple[type, type]] = {
    RMSLayerNorm: (LNSRMSLayerNorm, GroupedRMSLayerNorm),
    LayerNorm: (LNSOLMoLayerNorm, GroupedLayerNorm),
}


def scale_norm(norm: LayerNormBase, scale: float, *, groups: int = 1) -> None:
    """Let ``norm`` compute ``scale * Norm(x)``, in place.

    :param groups: statistics over d_model / groups channels; then without a factor.
    :raises TypeError: ``norm`` is not one of OLMo's norms.
    """
    if type(norm) not in _SCALED:
        raise TypeError(f"cannot scale a {type(norm).__name__}; expected OLMo's RMSLayerNorm or LayerNorm")
    give(norm, _SCALED[type(norm)][groups > 1], scale)
    if groups > 1:
        norm.lns_groups = groups


_CLASSES: dict[type, type] = {OLMoSequentialBlock: SchemeSequentialBlock, OLMoLlamaBlock: SchemeLlamaBlock}


def attach(block: OLMoBlock, asked: Record) -> None:
    """Turn a block that OLMo has built into the block of the scheme and initialization ``asked``, in place.

    A scheme that only multiplies the norm in front of a sub-layer leaves the block its class and attaches to its norms.

    :raises UpstreamChangedError: OLMo's own forward is not one that ours was read against.
    :raises TypeError: ``block`` is not one of OLMo's.
    """
    if asked.scaled_init != "upstream":
        block.lns_initialization = asked.scaled_init
    scheme, config = asked.scheme, block.config
    sites = [Site(scheme, block.layer_id + 1, config.n_layers, sub_layer) for sub_layer in SUB_LAYERS]
    if scheme.keeps_forward(config.n_layers):
        for site in () if scheme.is_pre_ln else sites:
            norm_sites.attach(norm := getattr(block, f"{site.sub_layer}_norm"), site)
            scale_norm(norm, site.plan.norm_scale)
        return
    _check_upstream()
    if type(block) not in _CLASSES:
        raise TypeError(f"no scheme for a {type(block).__name__}; expected OLMoSequentialBlock or OLMoLlamaBlock")
    norm_sites.attach(block, *sites)
    for site in sites:
        plan, sub_layer = site.plan, site.sub_layer
        if plan.norms == 2:
            setattr(block, f"{sub_layer}_norm_out", LayerNormBase.build(config, size=config.d_model))
        for name in ("gate", "omega"):
            if (learned := getattr(plan, name)) is not None:
                setattr(block, f"{sub_layer}_{name}", LearnedFactor(config, learned))
        # The constants beside a norm are folded into it; without one it stays OLMo's own.
        first = getattr(block, f"{sub_layer}_norm")
        if plan.pre and (plan.norm_scale, plan.groups) != (1.0, 1):
            scale_norm(first, plan.norm_scale, groups=plan.groups)
        behind = plan.branch_scale if plan.branch else plan.stream_scale if plan.post else 1.0
        if behind != 1.0:
            scale_norm(getattr(block, f"{sub_layer}_norm_out", first), behind)
        setattr(block, f"lns_residual_{sub_layer}", _Residual(plan))
    block.lns_gains = {site.sub_layer: site.plan.gains for site in sites}
    block.__class__ = _CLASSES[type(block)]


@cache
def _check_upstream() -> None:
    for target in (upstream.SEQUENTIAL_FORWARD, upstream.LLAMA_FORWARD, upstream.ATTENTION):
        patching.verify(target, target.locate()[2])
