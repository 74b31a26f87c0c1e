"""A scheme on the blocks of one transformers model: attached, counted, read back, reported.

The module of a block that carries a factor is a norm, or the branch after it. The norms whose arithmetic is known are
computed by :mod:`olmo_lns.norm` with the factor inside; any other norm (Liger's, Apex's) and a branch have their output
multiplied. A branch is scaled as a whole, not at its last projection: an adapter that PEFT puts around that projection
is then scaled with it.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from dataclasses import replace
from typing import Any

import torch

from olmo_lns.errors import CheckpointMismatchError, LNSConfigError, UpstreamChangedError
from olmo_lns.integrations import norm_sites
from olmo_lns.integrations.norm_sites import Scaled, ScaledOutput, give
from olmo_lns.integrations.transformers.families import FAMILIES, Family, at, family_of
from olmo_lns.record import Record
from olmo_lns.schemes import Plan, Scheme
from olmo_lns.schemes.initialization import factor

log = logging.getLogger("olmo_lns")


class _Replaceable(Scaled):
    """A module whose forward transformers, or a library on top of it, may replace."""

    # `kernelize` would replace the forward by a kernel that knows no factor.
    kernel_layer_name = "LNSScaled"

    def lns_plan(self, sub_layer: str) -> Plan:
        """The plan that ``forward`` computes; it has no factor if somebody put another forward in its place."""
        replaced = "forward" in vars(self) and "_old_forward" not in vars(self)  # accelerate's hooks keep the old one
        return self.lns_form if replaced else super().lns_plan(sub_layer)


class _ScaledOutput(_Replaceable, ScaledOutput):
    """A branch, or a norm whose arithmetic is not known."""


def _rms_norm(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """RMSNorm with gain, as Llama, Qwen and Mistral have it."""
    return self.lns_backend.rms_norm(hidden_states, self.weight, self.variance_epsilon, self.lns_factor)


def _rms_norm_input_dtype(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """As OLMo 2 and 3 have it: the output has the dtype of the input."""
    return _rms_norm(self, hidden_states).to(hidden_states.dtype)


def _layer_norm(self: Any, input: torch.Tensor) -> torch.Tensor:
    """torch's LayerNorm over the last dimension."""
    return self.lns_backend.layer_norm(input, self.weight, self.bias, self.eps, self.lns_factor)


def _plain_layer_norm(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """OLMo's LayerNorm: no gain, no bias, eps 1e-5, computed in fp32, output in the dtype of the input."""
    return self.lns_backend.layer_norm(hidden_states, None, None, 1e-5, self.lns_factor).to(hidden_states.dtype)


#: Norm classes whose arithmetic is known, by the module that defines them.
_FORWARDS: dict[tuple[str, str], Any] = {
    ("torch.nn.modules.normalization", "LayerNorm"): _layer_norm,
    ("transformers.models.llama.modeling_llama", "LlamaRMSNorm"): _rms_norm,
    ("transformers.models.qwen2.modeling_qwen2", "Qwen2RMSNorm"): _rms_norm,
    ("transformers.models.qwen3.modeling_qwen3", "Qwen3RMSNorm"): _rms_norm,
    ("transformers.models.mistral.modeling_mistral", "MistralRMSNorm"): _rms_norm,
    ("transformers.models.olmo.modeling_olmo", "OlmoLayerNorm"): _plain_layer_norm,
    ("transformers.models.olmo2.modeling_olmo2", "Olmo2RMSNorm"): _rms_norm_input_dtype,
    ("transformers.models.olmo3.modeling_olmo3", "Olmo3RMSNorm"): _rms_norm_input_dtype,
}


def scaled_class(stock: type) -> type:
    """Our class, with a factor, for a class of norms or branches; pickle finds it by the path of the stock class."""
    path = ":".join([*stock.__module__.split("."), stock.__name__])  # pickle would split it at a dot
    known = globals().get(path)
    if known is None or known.__bases__[1] is not stock:
        forward = _FORWARDS.get((stock.__module__, stock.__name__))
        kind, methods = (_ScaledOutput, {}) if forward is None else (_Replaceable, {"forward": forward})
        names = {"__module__": __name__, "__qualname__": path}
        known = globals()[path] = type(f"LNS{stock.__name__}", (kind, stock), {**names, **methods})
    return known


def known_family(model: Any) -> Family:
    """:raises LNSConfigError: not a transformers model of a family that this integration knows."""
    family = family_of(model)
    if family is not None and family.sub_layers:
        return family
    kind = getattr(getattr(model, "config", None), "model_type", None)
    reason = " (its norms follow the addition: there is none in front of a sub-layer)" if family else ""
    known = ", ".join(name for name, known in FAMILIES.items() if known.sub_layers)
    raise LNSConfigError(
        f"{type(model).__name__} (model_type {kind!r}){reason}: the transformers integration knows {known}"
    )


def parts(model: Any) -> tuple[Family, list[Any], int]:
    """The model's family, its blocks, and the number of blocks that its config says."""
    family = known_family(model)
    return family, list(_require(model.base_model, family.blocks, family)), int(model.config.num_hidden_layers)


def _require(module: Any, path: str, family: Family) -> Any:
    """:raises UpstreamChangedError: nothing is where it was verified to be."""
    if (found := at(module, path)) is not None:
        return found
    raise UpstreamChangedError(
        f"{type(module).__name__} has no {path}: this transformers builds {family.model_type} in a way that was not "
        "verified."
    )


def require_supported(family: Family, scheme: Scheme, n_layers: int) -> None:
    """:raises LNSConfigError: the scheme needs another form of block than the family has."""
    for number, sub_layer, plan in scheme.plans(n_layers):
        fields = [name for name in ("norm_scale", "branch_scale") if getattr(plan, name) != 1.0]
        fits = replace(plan, norm_scale=1.0, branch_scale=1.0) == family.form and len(fields) < 2
        if not fits:
            place = "in front of" if family.form.pre else "after"
            raise LNSConfigError(
                f"scheme {scheme} ({scheme.definition.title}) on {family.model_type}: its blocks have one norm {place} "
                f"each sub-layer, and block {number}, {sub_layer}, would need another form of the block. "
                "This integration multiplies norms and branches and replaces no block's forward."
            )


def attach_model(model: Any, record: Record) -> None:
    """Give every block of ``model`` the factors of the record's scheme, check them, say so.

    Freshly drawn residual output projections get the depth factor of the record's initialization. A model that has
    the scheme already (a head around a base model of ours) is only checked.
    """
    family, blocks, n_layers = parts(model)
    require_supported(family, record.scheme, n_layers)
    if any(True for _ in norm_sites.sites(model)):
        norm_sites.check(model, record.scheme, n_layers)
        return
    if getattr(model.config, "add_cross_attention", False):
        raise LNSConfigError(f"{type(model).__name__} with cross-attention has a third sub-layer that no scheme names")
    for sub_layer, place in family.sub_layers.items():
        plans = [plan for _, name, plan in record.scheme.plans(n_layers) if name == sub_layer]
        on_branch = not family.form.pre or any(plan.branch_scale != 1.0 for plan in plans)
        field = "branch_scale" if on_branch else "norm_scale"
        path = place.branch if on_branch else place.norm
        for number, block in enumerate(blocks, start=1):
            module = _require(block, path, family)
            site = norm_sites.Site(record.scheme, number, n_layers, sub_layer)
            norm_sites.attach(module, site)
            give(module, scaled_class(type(module)), getattr(site.plan, field), form=family.form, field=field)
    norm_sites.check(model, record.scheme, n_layers)
    _set_initialization(family, blocks, record)
    _report(model, at(blocks[0], family.sub_layers["attn"].norm), record)


def require_as_recorded(model: Any, record: Record) -> None:
    """Check that each block of the built model has the factors that ``record`` gives the block of that number.

    :raises CheckpointMismatchError: blocks or norms were removed, moved, doubled or replaced since it was built.
    """
    _, blocks, n_layers = parts(model)
    where = f"it has {len(blocks)} blocks"
    try:
        if len(blocks) != n_layers:
            raise UpstreamChangedError(f"its config says {n_layers}.")
        for number, block in enumerate(blocks, start=1):
            where = f"block {number}"
            norm_sites.check(block, record.scheme, n_layers, layer_numbers=[number])
    except UpstreamChangedError as error:
        raise CheckpointMismatchError(
            f"{type(model).__name__} is not what its config says ({record}): {where}: {error} A folder of it "
            "would load as another model. Fold the model before its blocks or norms are changed "
            "(olmo_lns.integrations.transformers.fold(model)), and save it then."
        ) from error


def _set_initialization(family: Family, blocks: list[Any], record: Record) -> None:
    """Note on each module that draws weights what its draw is multiplied by, and multiply the present weights."""
    if record.scaled_init == "upstream":
        return
    for number, block in enumerate(blocks, start=1):
        present = factor("scaled" if family.scaled else "plain", number, len(blocks))
        ratio = factor(record.scaled_init, number, len(blocks)) / present
        for place in family.sub_layers.values() if ratio != 1.0 else ():
            # Where the family scales, the projection is drawn when _init_weights sees the module that holds it.
            holder, _, path = place.output.rpartition(".") if family.scaled else (place.output, "", "")
            drawer = at(block, holder)
            drawer.lns_redraw = (path, ratio)
            redraw(drawer)


@torch.no_grad()
def redraw(module: Any) -> None:
    """Multiply the residual output projection that ``module`` has just drawn. Loaded weights stay as they are."""
    path, ratio = getattr(module, "lns_redraw", ("", 1.0))
    projection = at(module, path) if path else module
    if ratio != 1.0 and not getattr(projection.weight, "_is_hf_initialized", False):
        projection.weight.mul_(ratio)


def _report(model: Any, norm: Any, record: Record) -> None:
    """Write the start-up line: to the log if it has a handler, else to stderr."""
    if os.environ.get("RANK", "0") != "0":
        return
    ways = [
        "outputs multiplied"
        if isinstance(module, _ScaledOutput)
        else f"backend {module.lns_backend.name} ({module.lns_backend.reason})"
        for _, module, _ in norm_sites.sites(model)
    ]
    state = {"plain": "off", "upstream": "as upstream"}.get(record.scaled_init, f"on, {record.scaled_init}")
    line = norm_sites.start_up_line(
        record.scheme,
        int(model.config.num_hidden_layers),
        norm=type(norm).__name__.removeprefix("LNS"),
        how="; ".join(dict.fromkeys(ways)),
        initialization=f"scaled initialization {state}",
    )
    if log.hasHandlers() and log.isEnabledFor(logging.INFO):
        log.info("%s", line)
    else:
        print(line, file=sys.stderr)


def __getattr__(name: str) -> Any:
    """Make the class that another process has pickled, see :func:`scaled_class`."""
    *module, stock = name.split(":")
    if module:
        return scaled_class(getattr(importlib.import_module(".".join(module)), stock))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
