"""Compare the scheme of a checkpoint, or of trained weights, with the built model.

The record is the config that the framework saves: OLMo's config.yaml, Megatron's arguments, OLMo-core's and
transformers' config.json. torchtitan saves none; there it is an entry in the checkpoint's index. Each integration reads
its record; all share this comparison.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from typing import Any, Callable, Mapping

from olmo_lns import settings
from olmo_lns.errors import CheckpointMismatchError, LNSConfigError, MeasurementError
from olmo_lns.schemes import SUB_LAYERS, Scheme, parse

__all__ = ["record", "require", "require_fresh", "require_same"]

log = logging.getLogger("olmo_lns")

#: What compiling, DDP, FSDP and activation checkpointing put into the names of modules.
_WRAPPERS = re.compile(r"\b(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(\.|$)")


def record(model: Any) -> dict[str, Any]:
    """Return the scheme of a model as a small plain value, to be saved beside a checkpoint of one's own.

    :param model: a model with or without a scheme; it may be compiled, sharded or wrapped.
    :returns: ``scheme``, the spelling of the scheme, and ``norms``: name of each norm with a factor -> the number of
        its block, 1-based. JSON and ``torch.save`` take it.
    :raises MeasurementError: a norm lost its factor after the scheme was applied.

    Example: ``torch.save({"model": model.state_dict(), "lns": olmo_lns.record(model)}, path)``.
    """
    from olmo_lns import sites  # imports torch, so only on use

    norms = {_own_name(name): site.layer_number for name, _, site in sites.in_model(model)}
    counts = Counter((site.layer_number, site.sub_layer, site.n_layers) for _, _, site in sites.in_model(model))
    for n_layers in {n_layers for _, _, n_layers in counts}:
        expected = [(number, sub_layer, n_layers) for number in range(1, n_layers + 1) for sub_layer in SUB_LAYERS]
        if len({counts[site] for site in expected}) > 1:
            raise MeasurementError(
                f"{type(model).__name__}: each of its {n_layers} blocks was expected to have norms with a factor in "
                f"both sub-layers, found {len(set(expected) & counts.keys())} of {len(expected)} sub-layers. A norm "
                "or a block was replaced, or this is a stage of the model. Apply the scheme after a replacement, and "
                "take the record before the model is split."
            )
    return {"scheme": str(sites.read_back(model)), "norms": norms}


def _own_name(name: str) -> str:
    """Return a module's name in the model without wrappers, of which DDP's ``module`` is in front."""
    return re.sub(r"^(module(\.|$))+", "", _WRAPPERS.sub("", name))


def require(model: Any, saved: Any) -> None:
    """Compare a model with the record of a checkpoint, before its weights are loaded.

    :param model: the model that goes on. :param saved: what :func:`record` returned when the checkpoint was saved.
    :raises CheckpointMismatchError: the schemes differ, and ``OLMO_LNS_ALLOW_MISMATCH`` is not 1.
    :raises LNSConfigError: no record, or a record of another model.

    Example: ``olmo_lns.require(model, checkpoint["lns"])``, then ``model.load_state_dict(checkpoint["model"])``.
    """
    from olmo_lns import sites

    if not isinstance(saved, Mapping) or not {"scheme", "norms"} <= saved.keys():
        raise LNSConfigError(
            f"require() found {saved!r:.80} as a checkpoint's record. It expects the value that olmo_lns.record(model) "
            "returned when the checkpoint was saved."
        )
    running, scheme = record(model), parse(saved["scheme"])
    apply = "olmo_lns.apply(model, {0!r})"
    require_same(
        scheme,
        sites.read_back(model),
        source="the checkpoint's record",
        setting=lambda scheme: "without olmo_lns.apply" if scheme.is_pre_ln else apply.format(str(scheme)),
    )
    if running["scheme"] == saved["scheme"] and running["norms"] != saved["norms"]:
        foreign = sorted(saved["norms"].keys() ^ running["norms"].keys())
        raise LNSConfigError(
            f"the checkpoint's record is of another model than this {type(model).__name__}: it names "
            f"{len(saved['norms'])} norms, this model has {len(running['norms'])}. The first difference is "
            f"{foreign[0] if foreign else 'the number of a block'}. Build the model of the checkpoint."
        )


def require_same(
    saved: Scheme | None,
    running: Scheme,
    *,
    source: object,
    setting: Callable[[Scheme], str],
    differing: str = "",
    says: str = "its config says",
) -> None:
    """Compare a checkpoint's record with the built model, before the weights are used.

    :param saved: scheme of the checkpoint, Pre-LN for a stock config; None if no config was saved.
    :param setting: scheme -> the option that a user types for it, such as ``--layernorm-scaling``.
    :param differing: description of another difference, such as the base norm.
    :param says: subject and verb of the message's sentence, which the saved scheme follows.
    :raises CheckpointMismatchError: the two differ and ``OLMO_LNS_ALLOW_MISMATCH`` is not 1.

    Example: ``require_same(PRE_LN, LNS, source="step1000", setting=str)`` raises.
    """
    if saved == running and not differing:
        return
    if saved is None:
        if running.is_pre_ln:
            return
        finding = "no config beside it names the scheme of its weights"
        remedy = "Copy the config of its run beside the weights"
    else:
        finding = f"{says} {differing or saved}"
        remedy = f"Run with the checkpoint's setting ({setting(saved)})"
    message = f"{source}: {finding}, but this run has {running}."
    if settings.is_set(settings.ALLOW_MISMATCH):
        log.warning("%s Loading it anyway because of %s=1.", message, settings.ALLOW_MISMATCH)
        return
    raise CheckpointMismatchError(f"{message} {remedy}, or set {settings.ALLOW_MISMATCH}=1 to load it anyway.")


def require_fresh(trained_part: str, running: Scheme, *, source: object, trained: bool | None) -> None:
    """Refuse weights that were trained before a scheme is applied to their model. All integrations share this rule.

    :param trained_part: from :func:`olmo_lns.initialization.trained_part`; ``""`` for fresh weights.
    :param trained: True: the weights were trained under ``running``. False: they are fresh. None: not said.
    :raises CheckpointMismatchError: trained weights, ``trained`` is None and ``OLMO_LNS_ALLOW_MISMATCH`` is not 1.
    """
    if not trained_part or trained is not None:
        return
    message = (
        f"{source}: {trained_part}, so the model was trained before, or its weights hold a factor. {running} expects "
        f"fresh weights, or weights that were trained under {running}."
    )
    if settings.is_set(settings.ALLOW_MISMATCH):
        log.warning("%s It is applied anyway because of %s=1.", message, settings.ALLOW_MISMATCH)
        return
    raise CheckpointMismatchError(
        f"{message} If they were, apply it with trained=True. If these weights start in this way, use trained=False. "
        f"{settings.ALLOW_MISMATCH}=1 applies it to any weights."
    )
