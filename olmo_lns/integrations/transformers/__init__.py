"""LayerNorm Scaling in transformers, for every family with Pre-LN or parallel blocks.

``register()`` adds the model types ``lns_<any type>`` to the auto classes, and compares the scheme when a ``Trainer``
resumes. The class of a model type is made on first use. :func:`apply` applies a scheme to a built model, and
:func:`fold` makes the model a stock one again.
"""

from __future__ import annotations

from typing import Any

from olmo_lns.schemes import Scheme, as_scheme

__all__ = ["apply", "fold", "register"]


def register() -> None:
    """Request the wrappers of transformers and PEFT, without importing them. A second call does nothing."""
    from olmo_lns.hook import on_import
    from olmo_lns.integrations.transformers import refusals, wrapping

    on_import("transformers.configuration_utils", wrapping.refuse_stock_configs, needed=False)
    on_import("transformers.modeling_utils", wrapping.refuse_stock_models, needed=False)
    on_import("transformers.models.auto.configuration_auto", wrapping.add_configs)
    on_import("transformers.models.auto.auto_factory", wrapping.add_models)
    on_import("transformers.conversion_mapping", wrapping.convert_weights, needed=False)
    on_import("transformers.trainer", wrapping.compare_on_resume)
    on_import("peft.utils.constants", wrapping.add_adapter_targets, needed=False)
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
    in_every_process: bool = False,
) -> Any:
    """Apply ``scheme`` to a built transformers model, in place, measure the result, and return the model.

    The model and a copy of its config get the ``lns_*`` classes, so that a saved model names the scheme. They lose the
    name under which they were loaded, because the model of that name has no scheme. If the family draws its residual
    output projections with a depth factor, as GPT-2 does with 1/sqrt(2L), this factor is removed from fresh weights.

    :param model: a model of any family whose blocks are Pre-LN or parallel, with any head.
    :param scheme: such as ``"lns"`` or ``"lns:exponent=0.25"``.
    :param blocks, norms, example, trained: as in :func:`olmo_lns.apply`.
    :param initialization: ``plain`` (default), or ``upstream`` to keep the family's initialization.
    :param in_every_process: true if all processes of a launch make this call. The first one then finds the norms, and
        an error of one process is raised in all of them.
    :raises LNSConfigError: if the blocks are not Pre-LN, another scheme is on, or ``initialization`` is neither.
    :raises CheckpointMismatchError: if the weights were trained without a factor, and ``trained`` is None.
    :raises MeasurementError: if a block cannot be run again. In every case the model is left unchanged.

    Example: ``apply(AutoModelForCausalLM.from_config(LlamaConfig()), "lns:exponent=0.25").save_pretrained("folder")``.
    """
    from olmo_lns.integrations.hints import Hints
    from olmo_lns.integrations.transformers import integration

    register()
    integration.apply(
        model,
        as_scheme(scheme),
        Hints(blocks=blocks, norms=norms, example=example, trained=trained),
        initialization=initialization,
        in_every_process=in_every_process,
    )
    return model


def fold(model: Any, dtype: Any = None, *, example: Any = None) -> Any:
    """Multiply the factors of a model into its weights, in place, and return it as a stock model.

    A norm's factor goes into its weight and bias (into 1 + weight if the family adds 1). For a norm without them, it
    goes into the weights of the projections that read the norm. Products are computed in fp64 and rounded once, to the
    dtype of the weight. Merge adapters first, because an adapter of the unfolded model does not fit the folded one.

    :param dtype: torch dtype of the changed weights. None keeps their dtypes.
    :param example: as in :func:`olmo_lns.apply`. The default depends on the family.
    :raises LNSConfigError: if the model has no scheme, if two sub-layers share a weight, if a projection that gets a
        factor has an adapter, or if the factors cannot be folded. The model is left unchanged then.

    Example: ``fold(model).save_pretrained("folded")``.
    """
    from olmo_lns.integrations.transformers import integration

    integration.fold(model, dtype, example)
    return model
