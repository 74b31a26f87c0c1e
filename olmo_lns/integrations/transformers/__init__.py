"""LayerNorm Scaling in transformers, on every Pre-LN and parallel family.

``register()`` adds the model types ``lns_<any type>`` to the auto classes, made on first use, and compares the scheme
when a ``Trainer`` resumes; nothing else changes. :func:`apply` applies a scheme to a built model, :func:`fold` makes
the model a stock one again.
"""

from __future__ import annotations

import copy
from typing import Any

from olmo_lns import environment
from olmo_lns.errors import LNSConfigError
from olmo_lns.schemes import Scheme, as_scheme

__all__ = ["apply", "fold", "register"]


def register() -> None:
    """Request the wrappers of transformers and PEFT, without importing them. Idempotent."""
    from olmo_lns.hook import on_import
    from olmo_lns.integrations.transformers import refusals, wrapping

    on_import("transformers.configuration_utils", wrapping.refuse_stock_configs)
    on_import("transformers.modeling_utils", wrapping.refuse_stock_models)
    on_import("transformers.models.auto.configuration_auto", wrapping.add_configs)
    on_import("transformers.models.auto.auto_factory", wrapping.add_models)
    on_import("transformers.conversion_mapping", wrapping.convert_weights)
    on_import("transformers.trainer", wrapping.compare_on_resume)
    on_import("peft.utils.constants", wrapping.add_adapter_targets)
    refusals.register()


def apply(
    model: Any,
    scheme: str | Scheme = "lns",
    *,
    blocks: Any = None,
    norms: Any = None,
    example: Any = None,
    initialization: str = "",
    trained: bool | None = None,
    locate: Any = None,
) -> Any:
    """Apply ``scheme`` to a built transformers model, in place, measure the result, and return the model.

    The model and a copy of its config get the ``lns_*`` classes, so that a saved model names the scheme, and lose the
    name under which they were loaded, since the model of that name has no scheme. If the family
    draws its residual output projections with a depth factor, as GPT-2 does with 1/sqrt(2L), fresh ones lose it.

    :param model: a model of any family whose blocks are Pre-LN or parallel, with any head.
    :param scheme: such as ``"lns"`` or ``"lns:exponent=0.25"``.
    :param blocks, norms, example, trained: as in :func:`olmo_lns.apply`.
    :param initialization: ``plain`` (default), or ``upstream`` to keep the family's initialization.
    :param locate: finds the norms; default :func:`olmo_lns.integrations.any_model.locate`, in each process by itself.
    :raises LNSConfigError: if the blocks are not Pre-LN, another scheme is on, or ``initialization`` is neither.
    :raises CheckpointMismatchError: if the weights were trained without a factor, and ``trained`` is None.
    :raises MeasurementError: if a block cannot be run again. In every case the model is left unchanged.

    Example: ``apply(AutoModelForCausalLM.from_config(LlamaConfig()), "lns:exponent=0.25").save_pretrained("folder")``.
    """
    from transformers import PreTrainedModel

    from olmo_lns.integrations import any_model
    from olmo_lns.integrations.transformers import classes, scaling

    register()
    environment.check()
    scheme_value = as_scheme(scheme)
    if initialization not in ("", "plain", "upstream"):
        raise LNSConfigError(f"initialization is {initialization!r}, but expected plain or upstream. Pass one of them.")
    if not isinstance(model, PreTrainedModel):
        raise LNSConfigError(
            f"apply found a {type(model).__name__}. It expects a model of transformers. Call olmo_lns.apply."
        )
    any_model.require_unwrapped(model)
    is_attached = isinstance(model, classes.SchemeModel)
    model_class: Any = type(model)
    if not is_attached:
        classes.scheme_class(model_class)  # which may refuse, before the model is changed
    draw = None if is_attached or trained else initialization or "plain"
    names = scaling.locate_and_scale(
        model,
        scheme_value,
        blocks,
        example,
        norms=norms,
        initialization=draw,
        trained=trained,
        find=locate or any_model.locate,
    )
    if not is_attached:
        stock_config, config = model.config, copy.deepcopy(model.config)
        stock_class: Any = type(stock_config)
        config.__class__, config.lns, config.lns_norms = classes.scheme_class(stock_class), str(scheme_value), names
        if initialization == "upstream":
            config.lns_initialization = initialization
        for module in model.modules():
            if vars(module).get("config") is stock_config:
                module.config = config
        classes.set_scheme_classes(model)
        classes.forget_origin(model)
    return model


def fold(model: Any, dtype: Any = None, *, example: Any = None) -> Any:
    """Multiply the factors of a model into its weights, in place, and return it as a stock model.

    A norm's factor goes into its weight and bias (into 1 + weight if the family adds 1). For a norm without them, it
    goes into the weights of the projections that read the norm. Products are computed in fp64 and rounded once, to the
    dtype of the weight. Merge adapters first: an adapter of the unfolded model does not fit the folded one.

    :param dtype: torch dtype of the changed weights; None keeps theirs.
    :param example: as in :func:`olmo_lns.apply`; the default depends on the family.
    :raises LNSConfigError: if the model has no scheme, if two sub-layers share a weight, if a projection that gets a
        factor has an adapter, or if the factors cannot be folded. The model is left unchanged then.

    Example: ``fold(model).save_pretrained("folded")``.
    """
    from olmo_lns.folding import fold_norms
    from olmo_lns.integrations import any_model
    from olmo_lns.integrations.transformers import classes, scaling

    if not hasattr(model, "lns_made_of"):
        raise LNSConfigError(
            f"{type(model).__name__} has no scheme, so there is nothing to fold. It is a stock model already."
        )
    any_model.refuse_offloaded(model)
    classes.require_unchanged(model)
    with any_model.undisturbed(model):
        fold_norms(model, any_model.forward(model, scaling.usual_example(model) if example is None else example), dtype)
    for module in (model.config, *model.modules()):
        if isinstance(module, classes.SchemeClass):
            module.__class__ = module.lns_made_of
    for name in ("lns", "lns_norms", "lns_initialization"):
        vars(model.config).pop(name, None)
    classes.restore_stock_names(model.config)
    return model
