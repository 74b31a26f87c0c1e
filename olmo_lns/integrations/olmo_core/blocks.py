"""Attach a scheme to a block of OLMo-core when it is built, and measure the block.

The forward of the block remains OLMo-core's. Only the outputs of its norms are multiplied.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import torch
from olmo_core.nn.transformer.config import TransformerBlockConfig

from olmo_lns import probe, sites
from olmo_lns.errors import LNSConfigError, MeasurementError, one_line
from olmo_lns.integrations.olmo_core.layouts import LAYOUTS, NormLayout
from olmo_lns.integrations.olmo_core.norms import arithmetic_of
from olmo_lns.measured import Measured
from olmo_lns.scaled import scale
from olmo_lns.schemes import SUB_LAYERS, Scheme
from olmo_lns.sites import Site


def require_supported(scheme: Scheme, name: Any, n_layers: int) -> NormLayout:
    """Return where the block type ``name`` has its norms, after a check that the scheme fits.

    :raises LNSConfigError: if the scheme needs norms in other places, or the block type supports no scheme.
    """
    if (layout := LAYOUTS.get(str(name))) is None:
        raise LNSConfigError(f"block.name={name} does not support schemes. Expected one of {', '.join(LAYOUTS)}.")
    if not layout.fits(scheme, n_layers):
        paper = "" if layout.suggested_scheme == "lns" else " (not the method of the LayerNorm Scaling paper)"
        raise LNSConfigError(
            f"scheme={scheme} does more than multiply the norms of block.name={name}, which OLMo-core does not "
            f"support. Use a scheme that multiplies the norms of this block, such as {layout.suggested_scheme}{paper}, "
            f"or another block.name: {', '.join(LAYOUTS)}."
        )
    return layout


def attach_to_block(block: Any, config: Any, *, d_model: int, block_idx: int, n_layers: int) -> None:
    """Attach the scheme of a ``BlockConfig`` to the block that OLMo-core built from it, and measure the block.

    :param block: the block, which is changed.
    :param config: the ``BlockConfig``.
    :param d_model: the hidden size.
    :param block_idx: number of the block in the whole model, from 0 as in OLMo-core.
    :param n_layers: number of blocks of the whole model.
    """
    scheme = config.resolved_scheme
    layout = require_supported(scheme, config.name, n_layers)
    measured: set[Measured] = set()
    for sub_layer in SUB_LAYERS:
        for branch, name in layout.norms[sub_layer].items():
            site = Site(scheme, block_idx + 1, n_layers, sub_layer, branch)
            if (norm := getattr(block, name, None)) is None:
                raise MeasurementError(
                    f"{site}: found a {type(block).__name__} without {name}, expected its norm there."
                )
            factor, arithmetic = getattr(site.plan, layout.factor_name), arithmetic_of(norm)
            measured |= scale(
                norm,
                factor,
                where=site,
                width=d_model,
                arithmetic=arithmetic,
                plan_without_factor=layout.plan,
                factor_name=layout.factor_name,
            )
            sites.store(norm, site)
    block.lns_measured = measured
    block.lns_initialization = config.initialization
    block.lns_not_run = f"a block of the type {config.name} cannot be run alone"
    if layout == LAYOUTS["default"]:
        block.lns_not_run = _probe(config, min(d_model, 8 * block.attention.n_heads), block_idx, n_layers)


def _probe(config: Any, width: int, block_idx: int, n_layers: int) -> str:
    """Probe a narrow block that has the structure of the config.

    This happens for each block, because OLMo-core passes the block's number to its constructor, and the structure of
    the block may depend on this number.

    :returns: why the block could not run on this machine, or ``""`` if it was probed.
    """
    values = config.stock().as_config_dict()
    mixer = values["sequence_mixer" if "sequence_mixer" in values else "attention"]
    for name in ("backend", "use_flash"):  # the narrow block runs in fp32 on a CPU
        mixer.pop(name, None)
    return _probe_narrow_block(json.dumps(values), width, block_idx, n_layers)


@functools.cache
def _probe_narrow_block(text: str, width: int, block_idx: int, n_layers: int) -> str:
    """Build and probe a narrow block.

    :param text: the block config as JSON.
    :returns: why the block could not run on this machine, or ``""`` if it was probed.
    :raises MeasurementError: if the block reads its stream through other norms than its two.
    """
    expected = tuple(name for norms in LAYOUTS["default"].norms.values() for name in norms.values())
    config = TransformerBlockConfig.from_dict(json.loads(text))
    with torch.random.fork_rng(devices=[]):  # keep the run's random state
        try:
            narrow_block = config.build(d_model=width, block_idx=block_idx, n_layers=n_layers, init_device="cpu")
        except RuntimeError as error:  # OLMo-core's, for an attention whose library or GPU is missing
            return one_line(error)
        call = probe.Call((torch.randn(2, 8, width),), {}, 0)
    try:
        names = probe.pre_ln_sites(narrow_block, call, where=f"block {block_idx + 1}").names
    except MeasurementError as error:  # the block could not be run: it has kernels for GPUs only, such as a mixture's
        return one_line(error)
    if names != expected:
        raise MeasurementError(
            f"{type(narrow_block).__name__}: its stream is read through {' and '.join(names)}, expected "
            f"{' and '.join(expected)}."
        )
    return ""
