"""A scheme on each of OLMo-core's blocks: attached and measured when a block is built.

The forward of a block stays OLMo-core's: only norms that it already has are multiplied.
"""

from __future__ import annotations

import functools
import json
import logging
from dataclasses import dataclass, replace
from typing import Any, Mapping

import torch
from olmo_core.nn.transformer.config import TransformerBlockConfig

from olmo_lns import probe, sites
from olmo_lns.errors import LNSConfigError, MeasurementError
from olmo_lns.integrations.olmo_core.norms import folded
from olmo_lns.schemes import SUB_LAYERS, Plan, Scheme
from olmo_lns.sites import Site

log = logging.getLogger("olmo_lns")


@dataclass(frozen=True)
class Form:
    """The places of the norms in a type of block.

    :param norms: sub-layer -> the norms that a scheme's factor multiplies; the first one carries the site.
    :param field: name of that factor in a plan. :param usual: a scheme that fits.
    """

    plan: Plan
    norms: Mapping[str, tuple[str, ...]]
    field: str
    usual: str

    def fits(self, plan: Plan) -> bool:
        """Return true if ``plan`` is this form with a factor on its norms."""
        neutral: dict[str, Any] = {self.field: 1.0}
        return replace(plan, **neutral) == self.plan


_DENSE = {"attn": ("attention_norm",), "ff": ("feed_forward_norm",)}
#: The experts and the dense feed-forward stand side by side, each behind a norm of its own.
_HYBRID = {"attn": ("attention_norm",), "ff": ("feed_forward_norm", "feed_forward_moe_norm")}


def _pre(norms: Mapping[str, tuple[str, ...]]) -> Form:
    return Form(Plan(), norms, "norm_scale", "lns")


def _branch(norms: Mapping[str, tuple[str, ...]]) -> Form:
    return Form(Plan(pre=False, branch=True), norms, "branch_scale", "branchln_depth")


#: ``TransformerBlockConfig.name`` -> form.
FORMS = {
    "default": _pre(_DENSE),
    "moe": _pre(_DENSE),
    "moe_hybrid": _pre(_HYBRID),
    "reordered_norm": _branch(_DENSE),
    "moe_reordered_norm": _branch(_DENSE),
    "moe_hybrid_reordered_norm": _branch(_HYBRID),
}


def require_supported(scheme: Scheme, name: Any, n_layers: int) -> Form:
    """The form of the block type ``name``.

    :raises LNSConfigError: it has its norms elsewhere than the scheme wants them, or no scheme can be laid on it.
    """
    if (form := FORMS.get(str(name))) is None:
        raise LNSConfigError(
            f"block.name={name}: no scheme can be laid on this block. Expected one of {', '.join(FORMS)}."
        )
    if not all(form.fits(plan) for _, _, plan in scheme.plans(n_layers)):
        paper = "" if form.usual == "lns" else " (not the method of the LayerNorm Scaling paper)"
        raise LNSConfigError(
            f"scheme={scheme} does not only multiply the norms that block.name={name} has: expected a scheme for this "
            f"block, which is {form.usual}{paper}, or another block.name ({', '.join(FORMS)})."
        )
    return form


def attach_scheme(block: Any, config: Any, *, d_model: int, block_idx: int, n_layers: int) -> None:
    """Attach the scheme of a ``BlockConfig`` to the block that OLMo-core has just built from it, and measure it.

    :param block_idx: 0-based, global, as OLMo-core counts.
    """
    scheme = config.resolved_scheme
    form = require_supported(scheme, config.name, n_layers)
    for sub_layer in SUB_LAYERS:
        site = Site(scheme, block_idx + 1, n_layers, sub_layer)
        for name in form.norms[sub_layer]:
            if (norm := getattr(block, name, None)) is None:
                raise MeasurementError(
                    f"{site}: found a {type(block).__name__} without {name}, expected its norm there."
                )
            factor, mixin = getattr(site.plan, form.field), folded(type(norm))
            sites.scale(norm, factor, where=site, width=d_model, folded=mixin, form=form.plan, field=form.field)
        sites.attach(getattr(block, form.norms[sub_layer][0]), site)
    block.lns_initialization = config.initialization
    alone = form == FORMS["default"]
    block.lns_probed = alone and _probe(config, min(d_model, 8 * block.attention.n_heads), block_idx, n_layers)


def _probe(config: Any, width: int, block_idx: int, n_layers: int) -> bool:
    """Measure the sites of a narrow block with the config's structure; whether it could be run on this machine.

    Each block by its own number: OLMo-core gives it to the block, which may ask for it.
    """
    values = config.stock().as_config_dict()
    mixer = values["sequence_mixer" if "sequence_mixer" in values else "attention"]
    for name in ("backend", "use_flash"):  # the twin runs in fp32 on a CPU
        mixer.pop(name, None)
    return _probe_twin(json.dumps(values), width, block_idx, n_layers)


@functools.cache
def _probe_twin(text: str, width: int, block_idx: int, n_layers: int) -> bool:
    """:raises MeasurementError: the block of this config reads its stream through other norms than its two."""
    expected = _DENSE["attn"] + _DENSE["ff"]
    try:
        config = TransformerBlockConfig.from_dict(json.loads(text))
        with torch.random.fork_rng(devices=[]):  # the run's own draws stay what they are
            twin = config.build(d_model=width, block_idx=block_idx, n_layers=n_layers, init_device="cpu")
            call = probe.Call((torch.randn(2, 8, width),), {}, 0)
        found = probe.pre_ln_sites(twin, call, where=f"block {block_idx + 1}").names
    except (MeasurementError, RuntimeError, NotImplementedError) as error:  # kernels for GPUs, such as a mixture's
        log.debug("%s", error)
        return False
    if found != expected:
        raise MeasurementError(
            f"{type(twin).__name__}: found a block that reads its stream through {' and '.join(found)}, expected "
            f"{' and '.join(expected)}."
        )
    return True
