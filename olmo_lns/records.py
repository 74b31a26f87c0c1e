"""Compare the scheme of a checkpoint, or of trained weights, with the built model.

The scheme of a checkpoint is recorded in the config that the framework saves with it. This is config.yaml for OLMo, the
saved arguments for Megatron, and config.json for OLMo-core and transformers. torchtitan saves no config, so the scheme
is recorded there in an entry of the checkpoint's index. Each integration reads its own record. They all use the
comparisons of this module.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from typing import Any, Callable, Mapping

from olmo_lns import environment
from olmo_lns.errors import CheckpointMismatchError, LNSConfigError, MeasurementError
from olmo_lns.schemes import SUB_LAYERS, Scheme, parse

__all__ = ["record", "require", "require_same", "require_untrained"]

log = logging.getLogger("olmo_lns")

#: Parts that torch.compile, FSDP and activation checkpointing add to the names of modules.
_WRAPPER_NAMES = re.compile(r"\b(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(\.|$)")


def record(model: Any) -> dict[str, Any]:
    """Return a record of a model's scheme, which you can save with a checkpoint that your own script writes.

    :param model: a model with or without a scheme. It may be compiled, sharded or wrapped.
    :returns: a dict that JSON and ``torch.save`` can store. ``scheme`` is the spelling of the scheme. ``norms`` maps
        the name of each norm with a factor to the number of its block, from 1.
    :raises MeasurementError: if a norm has lost its factor after the scheme was applied, or the model is only a
        pipeline stage.

    Example: ``torch.save({"model": model.state_dict(), "lns": olmo_lns.record(model)}, path)``.
    """
    from olmo_lns import sites  # imports torch, so only on use

    norms = {_own_name(each.name): each.site.layer_number for each in sites.in_model(model)}
    counts = Counter(
        (site.layer_number, site.sub_layer, site.n_layers)
        for _, _, site in sites.in_model(model)
        if not getattr(site, "branch", "")
    )
    for n_layers in {n_layers for _, _, n_layers in counts}:
        expected = [(number, sub_layer, n_layers) for number in range(1, n_layers + 1) for sub_layer in SUB_LAYERS]
        if len({counts[site] for site in expected}) > 1:
            raise MeasurementError(
                f"{type(model).__name__} has a factor in {len(set(expected) & counts.keys())} of its {len(expected)} "
                f"sub-layers. Expected a factor in each sub-layer of its {n_layers} blocks, equally often. A norm or a "
                "block was replaced after the scheme was applied, or this is only one stage of the model. Apply the "
                "scheme after the replacement, and take the record before the model is split."
            )
    return {"scheme": str(sites.read_back(model)), "norms": norms}


def _own_name(name: str) -> str:
    """Remove the parts that wrappers have added to a module's name. DDP adds ``module`` at the beginning."""
    return re.sub(r"^(module(\.|$))+", "", _WRAPPER_NAMES.sub("", name))


def require(model: Any, saved: Any) -> None:
    """Compare a model with the record of a checkpoint, before the weights of the checkpoint are loaded.

    :param model: the model that will load the weights.
    :param saved: what :func:`record` returned when the checkpoint was saved.
    :raises CheckpointMismatchError: if the schemes differ and ``OLMO_LNS_ALLOW_MISMATCH`` is not 1.
    :raises LNSConfigError: if ``saved`` is not a record, or is the record of another model.

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
        source="the checkpoint",
        setting=lambda scheme: "without olmo_lns.apply" if scheme.is_pre_ln else apply.format(str(scheme)),
        says="its record names the scheme",
    )
    if running["scheme"] == saved["scheme"] and running["norms"] != saved["norms"]:
        foreign = sorted(saved["norms"].keys() ^ running["norms"].keys())
        raise LNSConfigError(
            f"The checkpoint's record names {len(saved['norms'])} norms, but this {type(model).__name__} has "
            f"{len(running['norms'])}. The first difference is {foreign[0] if foreign else 'the number of a block'}. "
            "The record belongs to another model. Build the model that wrote the checkpoint."
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
    """Check that a checkpoint and the built model have the same scheme, before the weights are used.

    :param saved: the scheme of the checkpoint. It is Pre-LN for a config that names no scheme, and None if no config
        was saved.
    :param running: the scheme of the built model.
    :param source: name or path of the checkpoint, for the message.
    :param setting: a function that returns what the user has to type for a scheme, such as ``--layernorm-scaling``.
    :param differing: description of another difference, such as the base norm. It counts as a mismatch.
    :param says: the words that stand before the saved scheme in the message.
    :raises CheckpointMismatchError: if the two differ and ``OLMO_LNS_ALLOW_MISMATCH`` is not 1.

    Example: ``require_same(PRE_LN, LNS, source="step1000", setting=str)`` raises.
    """
    if saved == running and not differing:
        return
    if saved is None:
        if running.is_pre_ln:
            return
        finding = "no config was found beside its weights, so their scheme is not known"
        remedy = "Copy the config of its run beside the weights"
    else:
        finding = f"{says} {differing or saved}"
        remedy = f"Run with the checkpoint's setting ({setting(saved)})"
    message = f"{source}: {finding}, but this run has {running}."
    if environment.is_set(environment.ALLOW_MISMATCH):
        log.warning("%s Loading it anyway because of %s=1.", message, environment.ALLOW_MISMATCH)
        return
    raise CheckpointMismatchError(
        f"{message} {remedy}. To load the checkpoint under {running} nevertheless, set {environment.ALLOW_MISMATCH}=1."
    )


def require_untrained(why_trained: str, running: Scheme, *, source: object, trained: bool | None) -> None:
    """Refuse to apply a scheme to a model whose weights were trained without it. All integrations use this rule.

    :param why_trained: result of :func:`olmo_lns.initialization.why_trained`, which is ``""`` for fresh weights.
    :param running: the scheme that is to be applied.
    :param source: name of the model or its path, for the message.
    :param trained: what the user says about the weights. True means that they were trained under ``running``, and
        False that they are fresh. None means that the user has not said it.
    :raises CheckpointMismatchError: if the weights look trained, ``trained`` is None, and ``OLMO_LNS_ALLOW_MISMATCH``
        is not 1.
    """
    if not why_trained or trained is not None:
        return
    message = (
        f"{source}: {why_trained}. The model was therefore trained before, or a factor is already in its weights. "
        f"{running} expects fresh weights, or weights that were trained under {running}."
    )
    if environment.is_set(environment.ALLOW_MISMATCH):
        log.warning("%s It is applied anyway because of %s=1.", message, environment.ALLOW_MISMATCH)
        return
    raise CheckpointMismatchError(
        f"{message} If the weights were trained under {running}, pass trained=True. If they are fresh and only start "
        f"with such values, pass trained=False. {environment.ALLOW_MISMATCH}=1 switches this check off."
    )
