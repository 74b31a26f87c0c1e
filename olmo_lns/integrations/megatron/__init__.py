"""LayerNorm Scaling for Megatron-LM and Megatron Core.

``register()`` adds ``--layernorm-scaling`` and related flags to an unmodified ``pretrain_gpt.py``;
``apply()`` is for scripts that build a model. Importing this module does not import Megatron.
"""

from __future__ import annotations

from typing import Any

from olmo_lns import hook
from olmo_lns.integrations.megatron.flags import Settings
from olmo_lns.integrations.megatron.seams import WRAPPED
from olmo_lns.schemes import DEFAULT_EXPONENT

__all__ = ["apply", "plain_initialization", "register"]


def register() -> None:
    """Arrange that each Megatron module is extended right after it is executed. Idempotent.

    Nothing changes until ``--layernorm-scaling`` or ``--no-scaled-init`` is given.

    Example: ``register()``, then ``from megatron.training import pretrain``.
    """
    for path in WRAPPED:
        hook.on_import(path.partition(":")[0], wrap)


def wrap(module: Any) -> None:
    """Wrap the functions of ``module``, which has just been executed."""
    from olmo_lns.integrations.megatron import wrappers

    for path, (name, needed) in WRAPPED.items():
        if path.partition(":")[0] == module.__name__:
            hook.wrap(path, getattr(wrappers, name), needed=needed)


def apply(
    target: Any,
    *,
    exponent: float = DEFAULT_EXPONENT,
    keep_scaled_init: bool = False,
    trained: bool | None = None,
) -> int:
    """Switch LayerNorm Scaling on for a config, or for a built model.

    Prefer the config, before the model is built: ``GPTModel`` and the other language models then scale and measure
    their norms at the end of their constructors, under any pipeline split, with plain initialization of the output
    projections. A built model gets the factors only; its weights do not change.

    :param target: a ``TransformerConfig``, an object with one in ``.transformer`` (``GPTModelConfig``), a provider of
        Megatron Bridge; or a built model, a part of one, or a list of its pipeline chunks, before DDP or FSDP wrap it.
    :param exponent: exponent of ``l ** -exponent``, dimensionless, 0.5 in the paper (arXiv 2502.05795, section 4).
    :param keep_scaled_init: keep Megatron's std/sqrt(2L) for the output projections; for configs only.
    :param trained: as in :func:`olmo_lns.apply`; for built models only.
    :returns: the number of scaled norms: 0 for a config, 2 per block otherwise.
    :raises LNSConfigError: another scheme is on, or the config or a layer is not supported.
    :raises CheckpointMismatchError: the weights were trained without a factor, and ``trained`` is None.
    :raises MeasurementError: a scaled norm does not give the factor times its output before.
    :raises UpstreamChangedError: this Megatron lacks a function that is needed.

    Example: ``apply(config)``, then ``GPTModel(config, ...)``; or ``apply(model, exponent=0.25)``.
    """
    register()
    from olmo_lns.integrations.megatron.wrappers import apply_to

    return apply_to(target, Settings(True, exponent, keep_scaled_init).check(), trained)


def plain_initialization(config: Any) -> None:
    """Initialize the residual output projections of a model like every other matrix, without std/sqrt(2L).

    :param config: a ``TransformerConfig`` or a provider, before its model is built.
    :raises LNSConfigError: the config keeps scaled initialization.
    :raises UpstreamChangedError: this Megatron lacks a function that is needed.

    Example: ``plain_initialization(config)``, then ``GPTModel(config, ...)``.
    """
    register()
    from olmo_lns.integrations.megatron import wrappers

    config = getattr(config, "transformer", config)
    wrappers.require("megatron.core.")
    wrappers.mark(config, Settings(no_scaled_init=True))
    if config.init_method is None and not getattr(config, "use_mup", False):  # Megatron Bridge sets init_method later
        from megatron.core.utils import init_method_normal

        config.init_method = init_method_normal(config.init_method_std)
    config.output_layer_init_method = config.init_method
