"""LayerNorm Scaling in transformers, on every Pre-LN and parallel family.

``register()`` adds the model types ``lns_<any type>`` to the auto classes, made when they are asked for, and compares
the scheme when a ``Trainer`` resumes; nothing else changes. :func:`apply` puts a built model under a scheme,
:func:`fold` makes it a stock model again.
"""

from __future__ import annotations

import copy
from typing import Any

from olmo_lns import settings
from olmo_lns.errors import LNSConfigError
from olmo_lns.schemes import PRE_LN, Scheme, parse

__all__ = ["apply", "fold", "register"]


def register() -> None:
    """Ask for the wrappers of transformers and PEFT; imports neither. Idempotent."""
    from olmo_lns.hook import on_import
    from olmo_lns.integrations.transformers import wrapping

    on_import("transformers.models.auto.configuration_auto", wrapping.name_configs)
    on_import("transformers.models.auto.auto_factory", wrapping.find_models)
    on_import("transformers.conversion_mapping", wrapping.convert_weights)
    on_import("transformers.trainer", wrapping.compare_on_resume)
    on_import("peft.utils.constants", wrapping.adapter_targets)


def apply(
    model: Any,
    scheme: str | Scheme = "lns",
    *,
    blocks: Any = None,
    example: Any = None,
    initialization: str = "",
    trained: bool | None = None,
) -> Any:
    """Put a built transformers model under ``scheme``, in place, measure what was built, and return the model.

    The model's class becomes ours, and so does its config, a copy of the one that it was built from: what it saves
    carries the scheme. Freshly drawn output projections lose GPT-2's factor 1/sqrt(2·L).

    :param model: of any family whose blocks are Pre-LN or parallel, with any head.
    :param scheme: such as ``"lns"`` or ``"lns:exponent=0.25"``.
    :param blocks, example: as of :func:`olmo_lns.apply`.
    :param initialization: ``plain`` (default), or ``upstream`` to keep the family's own draw.
    :param trained: True: its weights were trained under ``scheme``, or are to be from here on; they stay as they are.
        False: they were drawn just now. None: drawn, unless they were loaded and their norms have moved.
    :raises LNSConfigError: its blocks are not Pre-LN, it has another scheme, or ``initialization`` is neither.
    :raises CheckpointMismatchError: its weights were trained without a factor, as far as can be seen.
    :raises MeasurementError: a block cannot be run again. In every case the model is left as it was.

    Example: ``apply(AutoModelForCausalLM.from_config(LlamaConfig()), "lns:exponent=0.25").save_pretrained("folder")``.
    """
    from transformers import PreTrainedModel

    from olmo_lns.integrations import anything
    from olmo_lns.integrations.transformers import models
    from olmo_lns.record import require_same

    register()
    settings.check()
    wanted = parse(scheme) if isinstance(scheme, str) else scheme
    if initialization not in ("", "plain", "upstream"):
        raise LNSConfigError(f"initialization {initialization!r}: in transformers expected plain or upstream.")
    if not isinstance(model, PreTrainedModel):
        raise LNSConfigError(f"apply expects a transformers model, found {type(model).__name__}.")
    anything.require_unwrapped(model)
    again = isinstance(model, models.SchemeModel)
    if not again and trained is None and _is_trained(model):
        setting = "no apply, or trained=True if the weights go on under the scheme"
        require_same(PRE_LN, wanted, source=model.name_or_path, setting=lambda scheme: setting)
    drawn = None if again or trained else initialization or "plain"
    norms = models.measure(model, wanted, blocks, example, initialization=drawn)
    if not again:
        shared, own = model.config, copy.deepcopy(model.config)
        kind: Any = type(shared)
        own.__class__, own.lns, own.lns_norms = models.ours(kind), str(wanted), norms
        if initialization == "upstream":
            own.lns_initialization = initialization
        for module in model.modules():
            if vars(module).get("config") is shared:
                module.config = own
        models.convert(model)
    return model


def _is_trained(model: Any) -> bool:
    """Return true for loaded weights in which a norm's weight has left its initial value."""
    gains = [p for p in model.parameters() if p.dim() == 1 and p.numel() > 1 and not p.is_meta]
    return bool(model.name_or_path) and any(bool((gain != gain[0]).any()) for gain in gains)


def fold(model: Any, dtype: Any = None) -> Any:
    """Multiply the factors of a model of ours into its weights, in place: it becomes a stock model and is returned.

    A norm's factor goes into its weight and bias (into 1 + weight where a family adds 1), or, for a norm without
    them, into the weights of the projections that read it. Products are in fp64 and are rounded once, to the dtype of
    the weight. Merge adapters first: one that was trained on the unfolded model does not fit the folded.

    :param dtype: torch's, of the weights that are changed; None: their own.
    :raises LNSConfigError: not a model of ours, weights that two sub-layers share, an adapter on a projection that a
        factor goes into, or factors that have no place in the weights. The model is then as it was.

    Example: ``fold(model).save_pretrained("folded")``.
    """
    from olmo_lns.fold import fold_norms
    from olmo_lns.integrations import anything
    from olmo_lns.integrations.transformers import models

    if not hasattr(model, "lns_made_of"):
        raise LNSConfigError(f"{type(model).__name__} has no scheme of ours: there is nothing to fold.")
    models.check(model)
    with anything.undisturbed(model):
        fold_norms(model, anything.forward(model, models.usual_example(model)), dtype)
    for module in (model.config, *model.modules()):
        if isinstance(module, models.Ours):
            module.__class__ = module.lns_made_of
    for name in ("lns", "lns_norms", "lns_initialization"):
        vars(model.config).pop(name, None)
    return model
