"""Scale the norms that were found, and measure each of them."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from olmo_lns import initialization, records, shadow, sites
from olmo_lns.errors import LNSConfigError, MeasurementError
from olmo_lns.integrations.any_model.fused_kernels import ArithmeticOf
from olmo_lns.integrations.any_model.located import Located
from olmo_lns.integrations.any_model.refusals import refuse_foreign_attributes
from olmo_lns.integrations.any_model.state import restored
from olmo_lns.measured import Measured
from olmo_lns.response import measure_response
from olmo_lns.scaled import Scaled, forbid_fused_kernels, scale
from olmo_lns.schemes import SUB_LAYERS, Scheme


def scale_norms(
    model: nn.Module,
    located: Located,
    scheme: Scheme,
    arithmetic_of: ArithmeticOf = lambda norm: None,
    *,
    why_trained: str = "",
    trained: bool | None = None,
) -> set[Measured]:
    """Scale the norms of a model. If they have the scheme already, measure them again.

    :param located: the norms, from :func:`locate`.
    :param arithmetic_of: a function that returns the arithmetic of a norm, or None if it is unknown.
    :param why_trained: the result of :func:`why_trained_of`, or ``""`` if ``trained`` is not None.
    :param trained: as in :func:`olmo_lns.apply`.
    :returns: what was measured.
    :raises CheckpointMismatchError: if the weights were trained without a factor.
    :raises LNSConfigError: if the scheme does more than multiply norms in a model of this depth, or the norms have
        another scheme. This is checked before anything is changed.
    :raises MeasurementError: if the output of a norm is not its factor times the output before. The model is left
        unchanged.
    """
    refuse_foreign_attributes(model, located)
    n_layers, current = len(located.norms), sites.read_back(model)
    scheme.require_only_scales_norms(n_layers, framework="olmo_lns.apply")
    if not current.is_pre_ln and current != scheme:
        raise LNSConfigError(
            f"{type(model).__name__} has the scheme {current} already, not {scheme}. Build a new model."
        )
    scaled_norms = {norm for _, norm, _ in sites.in_model(model)}
    norms = {name: model.get_submodule(name) for names in located.norms for name in names}
    is_attached = not scaled_norms.isdisjoint(norms.values())  # another tower may have the scheme already
    if not is_attached:
        source = getattr(model, "name_or_path", "") or type(model).__name__
        records.require_untrained(why_trained, scheme, source=source, trained=trained)
    measured = {Measured.SITES} if located.sites_from == "probe" else set[Measured]()
    # A norm may keep something in its attributes when it is measured.
    with shadow.real_default_device(model), sites.undo_on_failure(model), restored(nn.ModuleList(norms.values())):
        if located.projections:
            initialization.mark_matrices(located.blocks_of(model), located.projections, located.norms_of(model))
        for number, (names, shape) in enumerate(zip(located.norms, located.shapes, strict=True), start=1):
            for name in names:
                read_by = SUB_LAYERS if len(names) == 1 else (SUB_LAYERS[names.index(name)],)
                norm_sites = [sites.Site(scheme, number, n_layers, sub_layer) for sub_layer in read_by]
                norm, where, width = norms[name], f"block {number}, {name}", (shape or (located.width,))[-1]
                if is_attached:
                    if not isinstance(norm, Scaled):
                        raise MeasurementError(
                            f"{where}: this norm has no factor, because it replaced a scaled norm. Expected the norm "
                            "that was scaled. Build a new model, and apply the scheme after norms are replaced."
                        )
                    if (found := vars(norm).get("lns_sub_layers")) != tuple(norm_sites):
                        raise MeasurementError(
                            f"{where}: this norm has the factor of {found[0] if found else 'no block'}, because its "
                            "block was moved after the scheme was applied. Build a new model, and apply the scheme "
                            "when the blocks are in their final order."
                        )
                    measured |= _measure(norm, width, shape, where)
                    continue
                if len(factors := {site.plan.norm_scale for site in norm_sites}) > 1:
                    raise LNSConfigError(
                        f"{where}: {scheme} has one factor for attention and another for the feed-forward, but both "
                        "branches read this norm. Expected one factor. Use a scheme that treats both branches alike."
                    )
                sites.store(norm, *norm_sites)
                factor, arithmetic = factors.pop(), arithmetic_of(norm)
                measured |= scale(norm, factor, where=where, width=width, shape=shape, arithmetic=arithmetic)
                if name in located.hooked:
                    forbid_fused_kernels(norm)
        sites.require_complete(nn.ModuleList(norms.values()), scheme, n_layers)
    return measured


def why_trained_of(model: nn.Module, located: Located) -> str:
    """Describe which weights show that a model was trained (:func:`olmo_lns.initialization.why_trained`)."""
    return initialization.why_trained(located.norms_of(model), initialization.matrices_of(located.blocks_of(model)))


def describe_initialization(model: nn.Module, located: Located, why_trained: str) -> str:
    """Return what the start-up line says about the initialization, or ``""`` for trained weights.

    :param why_trained: the result of :func:`why_trained_of`.
    """
    if located.projections and any(map(shadow.has_no_values, model.parameters())):
        return "scaled initialization: call olmo_lns.plain_initialization(model) once the weights are drawn"
    return "" if why_trained else str(initialization.measure(nn.ModuleList(located.blocks_of(model))))


def _measure(norm: Any, width: int, shape: tuple[int, ...], where: str) -> frozenset[Measured]:
    """Measure a norm that was scaled before.

    :returns: what was measured.
    :raises MeasurementError: if its output is not its factor times the output of the stock norm.
    """
    stock = copy.deepcopy(norm)
    sites.remove_scheme(stock)
    found, expected = (measure_response(each, width, shape) for each in (norm, stock))
    if problem := found.problem(expected, getattr(norm, "lns_scale", 1.0)):
        raise MeasurementError(f"{where}: measured {problem}. Apply the scheme after norms are replaced.")
    return found.measured
