"""Find the two norms in front of attention and MLP of a built layer, and scale exactly those.

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

from typing import Any

from torch import nn

from olmo_lns.errors import LNSConfigError
from olmo_lns.integrations.megatron.norms import is_fused_linear, is_scaled, scale_norm
from olmo_lns.integrations.megatron.settings import Settings
from olmo_lns.scale import lns_scale

__all__ = ["bind_layer", "check_config", "scaled_norms"]

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
    ("transformer_impl", "inference_optimized", "its layers read the norm's weight past its forward"),
)


def check_config(config: Any) -> None:
    """:raises LNSConfigError: a setting that LayerNorm Scaling cannot be right with."""
    for name, value, why in _REFUSED:
        found = getattr(config, name, None)
        if found == value if value is not None else found:
            raise LNSConfigError(f"LayerNorm Scaling does not support {name}={found!r}: {why}. Switch one of them off.")


def bind_layer(layer: Any, settings: Settings, *, depth: int | None = None) -> int:
    """Scale the sites of one built ``TransformerLayer`` by ``depth ** -exponent``.

    :param depth: 1-based global number of the block; None takes it from the layer.
    :returns: how many sites were scaled: 2, or 1 for a layer of a hybrid model, where attention
        and MLP are layers of their own.
    :raises LNSConfigError: the layer's structure is not one where the sites are known.
    """
    check_config(layer.config)
    if not _is_absent(getattr(layer, "cross_attention", None)):
        raise _refuse(layer, "has cross attention, a third norm that LayerNorm Scaling does not define")
    found = {
        half: _site(layer, half, norm, holder, names)
        for half, norm, holder, names in (
            ("attention", "input_layernorm", "self_attention", _FUSED_ATTENTION),
            ("MLP", "pre_mlp_layernorm", "mlp", _FUSED_MLP),
        )
        if not _is_absent(getattr(layer, holder, None))
    }
    if not found:
        raise _refuse(layer, "has neither attention nor MLP")
    if depth is None:
        depth = _depth(layer, list(found))
    scale = lns_scale(depth, exponent=settings.exponent)
    for module in found.values():
        scale_norm(module, scale, depth)
    return len(found)


def scaled_norms(model: nn.Module) -> list[nn.Module]:
    """All modules of ``model`` that carry a factor, in order."""
    return [module for module in model.modules() if is_scaled(module)]


def _site(layer: Any, half: str, norm: str, holder: str, names: tuple[str, ...]) -> nn.Module:
    inner = getattr(layer, holder)
    candidates = {f"{holder}.{name}": getattr(inner, name, None) for name in names}
    sites: dict[str, Any] = {path: module for path, module in candidates.items() if is_fused_linear(module)}
    if not _is_absent(standalone := getattr(layer, norm, None)):
        sites[norm] = standalone
    if len(sites) != 1:
        raise _refuse(
            layer,
            f"has {len(sites)} norms in front of its {half} ({', '.join(sites) or 'none'}), expected exactly one "
            f"of {', '.join((norm, *candidates))}",
        )
    return next(iter(sites.values()))


def _depth(layer: Any, halves: list[str]) -> int:
    """The block that a layer belongs to. In a hybrid model ``*-`` repeated makes the blocks."""
    number = int(layer.layer_number)
    if len(halves) == 2:
        return number
    expected = 1 if halves == ["attention"] else 0
    if number % 2 != expected:
        raise _refuse(
            layer,
            f"is layer {number} of a hybrid pattern and holds only {halves[0]}: LayerNorm Scaling supports the plain "
            "transformer patterns, '*-' or '*E' repeated",
        )
    return (number + 1) // 2


def _is_absent(module: Any) -> bool:
    return module is None or type(module).__name__ in ("IdentityOp", "IdentityFuncOp")


def _refuse(layer: Any, what: str) -> LNSConfigError:
    return LNSConfigError(f"{type(layer).__name__} {getattr(layer, 'layer_number', '?')} {what}.")
