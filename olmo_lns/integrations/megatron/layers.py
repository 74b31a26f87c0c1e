"""Find the two norms in front of attention and MLP of a built layer, and scale exactly those.

A scheme that leaves these norms as they are gets its place in the two residual additions (:mod:`.addition`); that the
norms are found holds for it too.

| spec                      | in front of attention                        | in front of the MLP       |
|---------------------------|----------------------------------------------|---------------------------|
| TE, dense                 | inside ``self_attention.linear_qkv``         | inside ``mlp.linear_fc1`` |
| TE, MoE                   | inside ``self_attention.linear_qkv``         | ``pre_mlp_layernorm``     |
| TE, MLA                   | ``input_layernorm``                          | inside ``mlp.linear_fc1`` |
| MLA, fused down projection| inside ``self_attention.linear_qkv_down_proj``| inside ``mlp.linear_fc1``|
| local                     | ``input_layernorm``                          | ``pre_mlp_layernorm``     |

Norms of q and k, also those fused into MLA's ``linear_q_up_proj`` and ``linear_kv_up_proj``, the
final norm and the norms around an MTP module are not sites.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from olmo_lns import environment
from olmo_lns.errors import LNSConfigError
from olmo_lns.integrations import norm_sites
from olmo_lns.integrations.megatron.addition import attach_addition, unsupported
from olmo_lns.integrations.megatron.norms import attach_norm, is_fused_linear
from olmo_lns.integrations.megatron.settings import Settings
from olmo_lns.integrations.norm_sites import Site
from olmo_lns.schemes import Scheme, names

__all__ = ["FirstForward", "attach_layer", "blocks_of", "check_config", "check_scheme", "count_sites", "layers_of"]

_WORDS = {"attn": "attention", "ff": "MLP"}
_FUSED_ATTENTION = ("linear_qkv", "linear_qkv_down_proj")
_FUSED_MLP = ("linear_fc1",)

#: (attribute of the config, value that is refused or None for any true one, why)
_REFUSED = (
    ("use_transformer_engine_op_fuser", None, "the op fuser reads the norm's parameters past its forward"),
    ("inference_fuse_tp_communication", None, "its kernel reads the norm's weight past its forward"),
    ("enable_mhc_connections", None, "with hyper-connections there is no single residual stream to scale in"),
    ("enable_hyper_connections", None, "with hyper-connections there is no single residual stream to scale in"),
    ("heterogeneous_block_specs", None, "heterogeneous blocks have no common depth"),
    ("heterogeneous_layers_config_path", None, "heterogeneous blocks have no common depth"),
    ("batch_invariant_mode", None, "its RMSNorm takes the place of TE's forward, which a scaled norm does not run"),
    ("transformer_impl", "inference_optimized", "its layers read the norm's weight past its forward"),
)


#: Where the parts of a layer that are captured as CUDA graphs are named: from 0.15 on, and from 0.18 on.
_CAPTURED = ("cuda_graph_scope", "cuda_graph_modules")


def _problem(scheme: Scheme, n_layers: int) -> str:
    if scheme.definition.olmo_only:
        return "it is an experiment, which only the OLMo integration builds"
    if scheme.keeps_forward(n_layers):
        return ""
    return next((problem for _, _, plan in scheme.plans(n_layers) if (problem := unsupported(plan))), "")


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
    title = scheme.definition.title
    for name, value, why in _REFUSED:
        found = getattr(config, name, None)
        if found == value if value is not None else found:
            raise LNSConfigError(f"{title} does not support {name}={found!r}: {why}. Switch one of them off.")
    if scheme.extra_parameters(1, 1, 1):
        parallel = sys.modules.get("megatron.core.parallel_state")
        if type(getattr(parallel, "_TENSOR_MODEL_PARALLEL_GROUP", None)).__name__ == "_ConverterFakeProcessGroup":
            raise LNSConfigError(
                f"tools/checkpoint/convert.py hands on a fixed list of tensors, without the gates or branch norms of "
                f"{scheme}: they would be drawn anew. Save the run with --ckpt-format torch_dist, which loads under "
                "any tensor and pipeline parallel size."
            )
        for name in _CAPTURED:
            if (found := getattr(config, name, None)) and found != "full":
                raise LNSConfigError(
                    f"{title} does not support {name}={found!r}: the list of modules under such a graph has no place "
                    "for the parameters of a residual addition. Capture whole layers, or none."
                )


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
            attach_addition(layer, site)
    waiting = {name for name, _, _ in norm_sites.sites(layer)}
    for name in ("", *waiting):
        FirstForward(layer.get_submodule(name), name, waiting)
    return len(found)


class FirstForward:
    """In the place of a module's ``forward``, once: the layer's looks whether those of its sites have run.

    A layer that computes with a norm's parameters past the norm's ``forward``, as the op fuser does, has no factor.

    :param name: of the site in its layer; ``""`` for the layer. :param waiting: sites that have not run.
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
    """How many blocks a model has; in a hybrid one attention and MLP are layers of their own."""
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
    """The block that a layer belongs to. In a hybrid model ``*-`` repeated makes the blocks."""
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
