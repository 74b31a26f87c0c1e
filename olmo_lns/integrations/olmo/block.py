"""OLMo's blocks and norms under a scheme: :func:`attach` turns a block that OLMo has built into the scheme's.

A scheme that only multiplies the norm in front of a sub-layer leaves the block its class and changes its two norms.
Any other gets another ``forward``, everything else stays OLMo's; with the plan of Pre-LN that forward computes what
OLMo's own does (:func:`check_forward`). The factors cost no pass over the activations: those of a norm are folded into
it, those of the residual addition into the addition.

``attn_norm`` and ``ff_norm`` are the first (or only) norm of their sub-layer, wherever it sits; a second one is
``attn_norm_out``; learned factors are ``attn_gate`` and ``attn_omega``. The classes here are mixins: a module becomes
an instance of a subclass of its own class, so ``get_param_groups`` recognises norms, and no parameter is renamed.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Callable

import torch
import torch.distributed as dist
from torch import nn

from olmo_lns import probe, sites
from olmo_lns.errors import LNSConfigError, MeasurementError
from olmo_lns.integrations.olmo import types
from olmo_lns.norm.dtypes import compute_dtype, output_dtype, rms_output_dtype, without_autocast
from olmo_lns.schemes import SUB_LAYERS, Learned, Plan, Scheme
from olmo_lns.sites import Scaled, Site

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


class LearnedFactor(sites.Derived):
    """Mixin in front of ``LayerNormBase``: a learned vector (d_model,) or number (1,), fp32, which the block takes into
    its residual addition.

    A norm by class because OLMo's optimizer groups know norms and refuse a bare parameter; never
    0-d, which FSDP refuses.
    """

    def __init__(self: Any, config: Any, learned: Learned) -> None:
        nn.Module.__init__(self)
        self.learned = learned
        size = learned.elements(config.d_model)
        self.weight = nn.Parameter(torch.full((size,), learned.start, device=config.init_device))
        self.register_parameter("bias", None)

    def reset_parameters(self: Any) -> None:
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


class SchemeBlock(sites.Derived):
    """Mixin in front of OLMo's block classes: a block under a scheme with a residual form of its own."""

    lns_residual_attn: _Residual
    lns_residual_ff: _Residual
    lns_gains: dict[str, tuple[tuple[str, float], ...]]

    def forward(
        self: Any,
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

    def _queries_keys_values(self: Any, h: torch.Tensor) -> tuple[torch.Tensor, ...]:
        fused = hasattr(self, "att_proj")
        projections = (self.att_proj,) if fused else (self.q_proj, self.k_proj, self.v_proj)
        found: tuple[torch.Tensor, ...] = tuple(projection(h) for projection in projections)
        if (limit := self.config.clip_qkv) is not None:
            found = tuple(projected.clamp_(min=-limit, max=limit) for projected in found)
        return found[0].split(self.fused_dims, dim=-1) if fused else found

    def _enter(self, sub_layer: str, x: torch.Tensor, run: _Run) -> torch.Tensor:
        residual: _Residual = getattr(self, f"lns_residual_{sub_layer}")
        if residual.multiplies_input:
            x = residual.input.times(x)
        return run(getattr(self, f"{sub_layer}_norm"), x) if residual.pre else x

    def _leave(self: Any, sub_layer: str, x: torch.Tensor, h: torch.Tensor, run: _Run) -> torch.Tensor:
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
        super().reset_parameters()  # type: ignore[misc]
        for sub_layer in SUB_LAYERS:
            for name in ("norm_out", "gate", "omega"):
                if (module := getattr(self, f"{sub_layer}_{name}", None)) is not None:
                    module.reset_parameters()
        apply_gains(self)


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
def apply_gains(block: Any) -> None:
    """Multiply the freshly drawn weights of ``block`` by its ``lns_gains``, if it has any; once after each draw.

    :raises LNSConfigError: the rows of ``v`` cannot be found in this process's shard.
    """
    for sub_layer, gains in getattr(block, "lns_gains", {}).items():
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


class FoldedRMSNorm(Scaled):
    """``lns_scale * RMSNorm(x)`` for x of shape (..., d_model); dtypes as OLMo's ``RMSLayerNorm``."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.lns_backend.rms_norm(x, self.weight, self.eps, self.lns_factor, bias=self.bias)
        return y


class FoldedLayerNorm(Scaled):
    """``lns_scale * LayerNorm(x)`` for x of shape (..., d_model); dtypes as OLMo's ``LayerNorm``."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weight, self.bias
        if self.low_precision:
            x = self._cast_if_autocast_enabled(x)
            weight, bias = (None if t is None else self._cast_if_autocast_enabled(t) for t in (weight, bias))
        with torch.autocast(enabled=False, device_type=x.device.type) if self.low_precision else nullcontext():
            y: torch.Tensor = self.lns_backend.layer_norm(x, weight, bias, self.eps, self.lns_factor)
        return y


class Grouped(Scaled):
    """Statistics over groups of channels, x of shape (..., d_model); rounded once, at the end, as OLMo's norm is.

    Without a factor, and with one group OLMo's own norm: that is measured.
    """

    lns_groups = 1

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        rms = not hasattr(self, "low_precision")
        x = x if rms or not self.low_precision else self._cast_if_autocast_enabled(x)
        with without_autocast(x.device.type):
            parts = x.to(compute_dtype(x.dtype)).unflatten(-1, (self.lns_groups, -1))
            arguments = (None, self.eps, 1.0) if rms else (None, None, self.eps, 1.0)
            y = (self.lns_backend.rms_norm if rms else self.lns_backend.layer_norm)(parts, *arguments).flatten(-2)
            y = y if self.weight is None else self.weight * y
            y = y if self.bias is None else y + self.bias
        return y.to(rms_output_dtype(x, self.weight, self.bias) if rms else output_dtype(x.dtype, x.device.type))


def _scale(norm: Any, factor: float, site: Site, *, groups: int = 1) -> None:
    """Let ``norm`` compute ``factor * Norm(x)``, in place, measured against what it computed before."""
    folded = Grouped if groups > 1 else FoldedLayerNorm if hasattr(norm, "low_precision") else FoldedRMSNorm
    sites.scale(norm, factor, where=site, width=norm.config.d_model, folded=folded)
    if groups > 1:
        if not isinstance(norm, Grouped):
            raise MeasurementError(
                f"{site} ({type(norm).__name__}): found another norm than OLMo's own with statistics over one group of "
                "channels; expected the same, or groups of channels cannot be laid over it."
            )
        norm.lns_groups = groups


#: Weights of a block above which a narrow one of its class is run on a CPU: a 7B's blocks would take minutes.
_LARGE = 4_000_000


def _stream(block: Any) -> tuple[Any, torch.Tensor]:
    """A block that can be run, in place of a large one, one on the meta device or one with a kernel for half precision,
    and a stream.
    """
    device, weights = block.attn_out.weight.device, sum(parameter.numel() for parameter in block.parameters())
    if device.type == "meta" or (device.type == "cpu" and weights > _LARGE):
        block, device = _narrow(block), torch.device("cpu")
    elif getattr(block, "flash_attn_func", None) is not None:
        block = copy.deepcopy(block)
    if getattr(block, "flash_attn_func", None) is not None:  # it takes no fp32, and needs a GPU: torch's own instead
        block.flash_attn_func = None
    return block, torch.randn(1, 4, block.config.d_model, generator=torch.Generator().manual_seed(0)).to(device)


def _narrow(block: Any) -> Any:
    """Build a block of the same class, number and settings, 8 channels a head wide, on the CPU."""
    from olmo.model import BufferCache

    width = 8 * block.config.n_heads
    hidden = None if block.config.mlp_hidden_size is None else 2 * width
    config = replace(block.config, d_model=width, mlp_hidden_size=hidden, init_device="cpu")
    with types.stock(config), torch.random.fork_rng(devices=[]):  # the run's own draws stay what they are
        return type(block)(block.layer_id, config, BufferCache())


def check_pre_ln(block: Any, where: str, *, known: bool = False) -> None:
    """Check that OLMo's own block reads its stream through its two norms and nothing else, by running a copy of it.

    :param known: a block that is built alike was found so; a block may ask for its number.

    :raises MeasurementError: it reads it through others. :raises LNSConfigError: it is not Pre-LN.
    """
    real, x = _stream(block)
    expected = tuple(f"{sub_layer}_norm" for sub_layer in SUB_LAYERS)
    call = probe.Call((x,), {"attention_bias": None}, 0)
    found = probe.pre_ln_sites(real, call, where=where, names=expected if known else None).names
    if found != expected:
        raise MeasurementError(
            f"{where} ({type(block).__name__}): found that it reads the stream through {', '.join(found)}, expected "
            f"{' and '.join(expected)}. This OLMo builds its blocks in another way: install another version of it."
        )


def check_forward(block: Any, where: str) -> None:
    """Check that :class:`SchemeBlock` with the plan of Pre-LN computes what OLMo's own block does.

    :raises MeasurementError: OLMo's forward does something that ours does not.
    """
    real, x = _stream(block)
    twin = probe.twin(real)
    with torch.no_grad():
        expected = twin(x, attention_bias=None)[0]
        _become(twin, dict.fromkeys(SUB_LAYERS, Plan()))
        found = twin(x, attention_bias=None)[0]
    error = float((found - expected).norm() / expected.norm())
    if not error < probe.SAME:
        raise MeasurementError(
            f"{where} ({type(block).__name__}): found a relative difference of {error:.2g} between OLMo's own forward "
            "and this package's with the plan of Pre-LN, expected none. Only schemes that multiply a norm, such as "
            "lns, run in this OLMo."
        )


def _become(block: Any, plans: dict[str, Plan]) -> None:
    for sub_layer, plan in plans.items():
        setattr(block, f"lns_residual_{sub_layer}", _Residual(plan))
    block.lns_gains = {sub_layer: plan.gains for sub_layer, plan in plans.items()}
    block.__class__ = sites.derived(SchemeBlock, block.__class__)


def attach(block: Any, scheme: Scheme, layer_number: int) -> None:
    """Turn a block that OLMo has built into the block of ``scheme``, in place.

    A scheme that only multiplies the norm in front of a sub-layer leaves the block its class and attaches to its norms.

    :param layer_number: 1-based, global.
    :raises MeasurementError: a norm cannot be scaled.
    """
    config = block.config
    own = [Site(scheme, layer_number, config.n_layers, sub_layer) for sub_layer in SUB_LAYERS]
    if scheme.keeps_forward(config.n_layers):
        for site in own:
            _scale(norm := getattr(block, f"{site.sub_layer}_norm"), site.plan.norm_scale, site)
            sites.attach(norm, site)
        return
    from olmo.model import LayerNormBase

    sites.attach(block, *own)
    for site in own:
        plan, sub_layer = site.plan, site.sub_layer
        if plan.norms == 2:
            setattr(block, f"{sub_layer}_norm_out", LayerNormBase.build(config, size=config.d_model))
        for name in ("gate", "omega"):
            if (learned := getattr(plan, name)) is not None:
                setattr(block, f"{sub_layer}_{name}", sites.derived(LearnedFactor, LayerNormBase)(config, learned))
        # The constants beside a norm are folded into it; without one it stays OLMo's own.
        first = getattr(block, f"{sub_layer}_norm")
        if plan.pre and (plan.norm_scale, plan.groups) != (1.0, 1):
            _scale(first, plan.norm_scale, site, groups=plan.groups)
        behind = plan.branch_scale if plan.branch else plan.stream_scale if plan.post else 1.0
        if behind != 1.0:
            _scale(getattr(block, f"{sub_layer}_norm_out", first), behind, site)
    _become(block, {site.sub_layer: site.plan for site in own})
