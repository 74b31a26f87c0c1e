"""Find the two norms in front of attention and MLP of a built layer, and scale exactly those.

A scheme that leaves these norms as they are stands in the two bias-dropout-add slots of the layer
(:class:`SchemeAddition`), which every layer of every version has. Keys in a checkpoint: ``self_attn_bda.gate``,
``self_attn_bda.norm.weight``, and the same of ``mlp_bda``.

| spec                       | in front of attention                         | in front of the MLP       |
|----------------------------|-----------------------------------------------|---------------------------|
| TE, dense                  | inside ``self_attention.linear_qkv``          | inside ``mlp.linear_fc1`` |
| TE, MoE                    | inside ``self_attention.linear_qkv``          | ``pre_mlp_layernorm``     |
| TE, MLA                    | ``input_layernorm``                           | inside ``mlp.linear_fc1`` |
| MLA, fused down projection | inside ``self_attention.linear_qkv_down_proj``| inside ``mlp.linear_fc1`` |
| local                      | ``input_layernorm``                           | ``pre_mlp_layernorm``     |

Not sites: norms of q and k (also those fused into MLA's ``linear_q_up_proj`` and ``linear_kv_up_proj``), the final
norm, and the norms around an MTP module.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, Callable

import torch
from torch import nn

from olmo_lns import environment
from olmo_lns.errors import LNSConfigError
from olmo_lns.integrations import norm_sites
from olmo_lns.integrations.megatron.norms import attach_norm, is_fused_linear, scale_norm
from olmo_lns.integrations.megatron.settings import SLOTS, Settings
from olmo_lns.integrations.megatron.upstream import check_readings
from olmo_lns.integrations.norm_sites import Site, attach
from olmo_lns.schemes import Learned, Plan, Scheme, names

_WORDS = {"attn": "attention", "ff": "MLP"}
_FUSED_ATTENTION = ("linear_qkv", "linear_qkv_down_proj")
_FUSED_MLP = ("linear_fc1",)


def _partial_graph(found: Any) -> bool:
    return bool(found) and found != "full"


_PAST = "it reads the norm's parameters past its forward"
_NO_STREAM = "with hyper-connections there is no single residual stream to scale in"
_NO_DEPTH = "heterogeneous blocks have no common depth"
_NO_PLACE = "a graph of parts of a layer has no place for an addition's parameters: capture whole layers, or none"
#: Attribute of the config -> whether its value is refused, and why.
_REFUSED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "use_transformer_engine_op_fuser": (bool, _PAST),
    "inference_fuse_tp_communication": (bool, _PAST),
    "transformer_impl": (lambda found: found == "inference_optimized", _PAST),
    "enable_mhc_connections": (bool, _NO_STREAM),
    "enable_hyper_connections": (bool, _NO_STREAM),
    "heterogeneous_block_specs": (bool, _NO_DEPTH),
    "heterogeneous_layers_config_path": (bool, _NO_DEPTH),
    "batch_invariant_mode": (bool, "its RMSNorm takes the place of TE's forward, which a scaled norm does not run"),
}
#: The same under a scheme with parameters of its own: by the names from 0.15 on, and from 0.18 on.
_REFUSED_WITH_PARAMETERS = dict.fromkeys(("cuda_graph_scope", "cuda_graph_modules"), (_partial_graph, _NO_PLACE))


def _problem(scheme: Scheme, n_layers: int) -> str:
    if scheme.keeps_forward(n_layers):
        return ""
    return next((problem for _, _, plan in scheme.plans(n_layers) if (problem := _unsupported(plan))), "")


def check_scheme(scheme: Scheme, n_layers: int) -> None:
    """:raises LNSConfigError: Megatron's layers have no slot for what it does; with the reason."""
    if not scheme.is_pre_ln:
        environment.check()
    if problem := _problem(scheme, n_layers):
        possible = [name for name in names() if not _problem(Scheme.of(name), 2)]
        raise LNSConfigError(
            f"{scheme} ({scheme.definition.title}) is not available in Megatron: {problem}. Available are "
            f"{', '.join(possible)}; OLMo runs every scheme."
        )


def check_config(config: Any, scheme: Scheme) -> None:
    """:raises LNSConfigError: a setting that the scheme cannot be right with."""
    check_scheme(scheme, int(config.num_layers))
    refused = dict(_REFUSED)
    if scheme.extra_parameters(1, 1, 1):
        refused |= _REFUSED_WITH_PARAMETERS
        parallel = sys.modules.get("megatron.core.parallel_state")
        if type(getattr(parallel, "_TENSOR_MODEL_PARALLEL_GROUP", None)).__name__ == "_ConverterFakeProcessGroup":
            raise LNSConfigError(
                f"tools/checkpoint/convert.py hands on a fixed list of tensors, without the gates or branch norms of "
                f"{scheme}: they would be drawn anew. Save the run with --ckpt-format torch_dist, which loads under "
                "any tensor and pipeline parallel size."
            )
    for name, (is_refused, why) in refused.items():
        if is_refused(found := getattr(config, name, None)):
            title = scheme.definition.title
            raise LNSConfigError(f"{title} does not support {name}={found!r}: {why}. Switch one of them off.")


def attach_layer(layer: Any, settings: Settings, *, depth: int | None = None) -> int:
    """Give the sub-layers of one built ``TransformerLayer`` the scheme of ``settings``.

    :param depth: 1-based global number of the block; None takes it from the layer.
    :returns: how many sub-layers there were: 2, or 1 for a layer of a hybrid model, where attention
        and MLP are layers of their own.
    :raises LNSConfigError: the layer's structure is not one where the sites are known.
    """
    scheme = settings.scheme
    check_config(layer.config, scheme)
    if not _is_absent(getattr(layer, "cross_attention", None)):
        raise _refuse(layer, "has cross attention, a third sub-layer that no scheme defines")
    found = {
        sub_layer: _site(layer, sub_layer, norm, holder, names)
        for sub_layer, norm, holder, names in (
            ("attn", "input_layernorm", "self_attention", _FUSED_ATTENTION),
            ("ff", "pre_mlp_layernorm", "mlp", _FUSED_MLP),
        )
        if not _is_absent(getattr(layer, holder, None))
    }
    if not found:
        raise _refuse(layer, "has neither attention nor MLP")
    if depth is None:
        depth = _depth(layer, list(found))
    n_layers = blocks_of(layer.config, hybrid=len(found) == 1)
    for sub_layer, module in found.items():
        site = Site(scheme, depth, n_layers, sub_layer)
        if scheme.keeps_forward(n_layers):
            attach_norm(module, site)
        else:
            _attach_addition(layer, site)
    waiting = {name for name, _, _ in norm_sites.sites(layer)}
    for name in ("", *waiting):
        FirstForward(layer.get_submodule(name), name, waiting)
    return len(found)


class FirstForward:
    """Stands in the place of a module's first ``forward``; the layer's then checks that all of its sites have run.

    A layer that computes with a norm's parameters past the norm's ``forward``, as the op fuser does, has no factor.

    :param name: the path of the site in its layer; ``""`` for the layer. :param waiting: sites that have not run.
    """

    def __init__(self, module: nn.Module, name: str, waiting: set[str]) -> None:
        self.module, self.name, self.waiting = module, name, waiting
        module.__dict__["forward"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.module.__dict__.pop("forward", None)
        self.waiting.discard(self.name)
        result = self.module.forward(*args, **kwargs)
        if not self.name and self.waiting:
            paths = ", ".join(sorted(self.waiting))
            raise _refuse(
                self.module,
                f"did not call the forward of {paths} in its own, expected all that carry the scheme: its output is "
                "computed from their parameters without it (as by get_gpt_layer_with_transformer_engine_spec("
                "use_te_op_fuser=True)). Use a spec whose layers call them",
            )
        return result


def blocks_of(config: Any, *, hybrid: bool) -> int:
    """How many blocks a model has; in a hybrid model attention and MLP are layers of their own."""
    return int(config.num_layers) // (2 if hybrid else 1)


def layers_of(module: nn.Module) -> list[Any]:
    """The ``TransformerLayer``s in ``module``, itself among them."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    return [child for child in module.modules() if isinstance(child, TransformerLayer)]


def count_sites(model: nn.Module) -> int:
    """How many sub-layers of ``model`` have a scheme."""
    return len(list(norm_sites.sites(model)))


def _site(layer: Any, sub_layer: str, norm: str, holder: str, names: tuple[str, ...]) -> nn.Module:
    inner = getattr(layer, holder)
    candidates = {f"{holder}.{name}": getattr(inner, name, None) for name in names}
    sites: dict[str, Any] = {path: module for path, module in candidates.items() if is_fused_linear(module)}
    if not _is_absent(standalone := getattr(layer, norm, None)):
        sites[norm] = standalone
    if len(sites) != 1:
        raise _refuse(
            layer,
            f"has {len(sites)} norms in front of its {_WORDS[sub_layer]} ({', '.join(sites) or 'none'}), "
            f"expected exactly one of {', '.join((norm, *candidates))}",
        )
    return next(iter(sites.values()))


def _depth(layer: Any, halves: list[str]) -> int:
    """The block that a layer belongs to; in a hybrid model ``*-`` or ``*E`` is one block."""
    number = int(layer.layer_number)
    if len(halves) == 2:
        return number
    expected = 1 if halves == ["attn"] else 0
    if number % 2 != expected:
        raise _refuse(
            layer,
            f"is layer {number} of a hybrid pattern and holds only {_WORDS[halves[0]]}: only the plain "
            "transformer patterns are supported, '*-' or '*E' repeated",
        )
    return (number + 1) // 2


def _is_absent(module: Any) -> bool:
    return module is None or type(module).__name__ in ("IdentityOp", "IdentityFuncOp")


def _refuse(layer: Any, what: str) -> LNSConfigError:
    return LNSConfigError(f"{type(layer).__name__} {getattr(layer, 'layer_number', '?')} {what}.")


def _unsupported(plan: Plan) -> str:
    """Why Megatron's slots cannot do ``plan``; ``""`` if they can."""
    if plan.post:
        return "it normalises the sum, and no slot of Megatron's layer stands behind the residual addition"
    if not plan.pre:
        return "it has no norm in front of the sub-layers, where Transformer Engine's layers have theirs fused in"
    if plan.groups != 1:
        return "its norms take statistics over groups of channels, which no norm of Megatron does"
    if plan.pre_scale != 1.0:
        return "its factor stands in front of a norm that Transformer Engine fuses into the linear layer behind it"
    if plan.stream_scale != 1.0 or plan.alpha != 1.0 or plan.omega is not None:
        return "it multiplies the residual stream, which Megatron's recompute, fusions and exports take as it is"
    if plan.gains:
        return "it draws the v rows of linear_qkv, which lie between those of q and k, with another gain"
    return ""


class SchemeAddition(nn.Module):
    """``residual + factor * gate * dropout(norm(h + bias))``, called like Megatron's ``get_bias_dropout_add``.

    :param gate: the learned factor, (hidden_size,) or (1,), or None. :param norm: the branch's, or None.
    :param like: a parameter of the layer, for the device; ``config`` says the dtype.
    """

    lns_method = "in the residual addition"

    def __init__(self, config: Any, plan: Plan, norm: nn.Module | None, like: torch.Tensor) -> None:
        super().__init__()
        self.norm = norm
        self.factor = 1.0 if plan.branch else plan.branch_scale
        self.learned: Learned | None = plan.gate
        self.register_parameter("gate", None)
        if plan.gate is not None:
            size = plan.gate.elements(config.hidden_size)
            self.gate = nn.Parameter(torch.empty(size, device=like.device, dtype=config.params_dtype))
            # Its gradient is a sum over tokens: Megatron adds those of the ranks that hold other tokens by this mark.
            self.gate.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
            self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.gate is not None and self.learned is not None:
            nn.init.constant_(self.gate, self.learned.start)

    def forward(self, training: bool, fused: bool) -> Callable[..., torch.Tensor]:
        """The addition. A call of the module, so that hooks which gather its parameters run before it.

        :param fused: ignored: without bias and dropout the addition is one kernel anyway.
        """
        return functools.partial(self._add, training)

    def _add(
        self, training: bool, h_with_bias: tuple[torch.Tensor, torch.Tensor | None], x: torch.Tensor, dropout: float
    ) -> torch.Tensor:
        """:param h_with_bias: the sub-layer's output (length, batch, hidden_size), and a bias (hidden_size,) or None.
        :param x: the stream, as the output. :param dropout: its probability.
        """
        h, bias = h_with_bias
        if bias is not None:
            h = h + bias
        if self.norm is not None:
            h = self.norm(h)
        h = nn.functional.dropout(h, dropout, training)
        h, x = (h.to(x.dtype), x) if _keeps_stream_dtype() else (h, x.to(h.dtype))
        if self.gate is None:
            return torch.add(x, h, alpha=self.factor)
        return torch.addcmul(x, self.gate.to(h.dtype), h, value=self.factor)

    def lns_plan(self, sub_layer: str) -> Plan:
        """The plan that the addition computes."""
        factor = self.factor * getattr(self.norm, "lns_scale", 1.0)
        return Plan(branch=self.norm is not None, branch_scale=factor, gate=self.learned)

    def extra_repr(self) -> str:
        return f"factor={self.factor:.4g}"


@functools.cache
def _keeps_stream_dtype() -> bool:
    """Whether Megatron's own addition keeps an fp32 stream under bf16 branches; up to 0.16 it does not."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add

    branch, stream = torch.zeros(1, dtype=torch.bfloat16, device="cpu"), torch.zeros(1, device="cpu")
    return bool(get_bias_dropout_add(False, False)((branch, None), stream, 0.0).dtype == stream.dtype)


def _attach_addition(layer: Any, site: Site) -> None:
    """Put ``site``'s plan into its slot of a built ``TransformerLayer``.

    :raises LNSConfigError: the slot holds something else than Megatron's bias-dropout-add.
    :raises UpstreamChangedError: the layer calls its slots in a way that was not verified.
    """
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add

    check_readings()
    slot, config = SLOTS[site.sub_layer], layer.config
    if (found := getattr(layer, slot, None)) is not get_bias_dropout_add:
        name = getattr(found, "__name__", type(found).__name__)
        raise LNSConfigError(
            f"{type(layer).__name__} {layer.layer_number} has {name} as its {slot}, expected Megatron's "
            f"get_bias_dropout_add: {site.scheme} takes its place."
        )
    plan = site.plan
    norm = _branch_norm(layer) if plan.branch else None
    if norm is not None and plan.branch_scale != 1.0:
        scale_norm(norm, plan.branch_scale)
    addition = SchemeAddition(config, plan, norm, next(layer.parameters()))
    attach(addition, site)
    setattr(layer, slot, addition)


def _branch_norm(layer: Any) -> Any:
    """A norm of the class that the layer's spec names, built as the layer builds its own."""
    from megatron.core.extensions.transformer_engine import HAVE_TE, TENorm
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.spec_utils import ModuleSpec, build_module

    how = {"config": layer.config, "hidden_size": layer.config.hidden_size, "eps": layer.config.layernorm_epsilon}
    specs = (layer.submodules_config.input_layernorm, layer.submodules_config.pre_mlp_layernorm)
    named = [spec for spec in specs if spec is not IdentityOp]
    # TE's spec names one only where it is not fused into a linear layer, and main's is fused with the residual.
    if HAVE_TE and all(_is_te(spec) for spec in named):
        return TENorm(**how)
    if not named:
        raise LNSConfigError(
            f"{type(layer).__name__} {layer.layer_number} has both norms of its spec inside other modules, and "
            "Transformer Engine is not installed: nothing names the norm that the scheme puts behind the branch. Use a "
            "spec with norms of their own (input_layernorm, pre_mlp_layernorm), as the local one, or install it."
        )
    return build_module(named[0], **how) if isinstance(named[0], ModuleSpec) else named[0](**how)


def _is_te(spec: Any) -> bool:
    kind = getattr(spec, "module", spec)
    return str(getattr(kind, "__module__", "")).startswith("megatron.core.extensions.transformer_engine")
