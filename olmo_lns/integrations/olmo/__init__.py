"""The schemes in OLMo: ``register()`` adds the types and nothing else changes.

Registered but not selected, OLMo is bit for bit itself. With ``layer_norm_type: lns`` (or
``lns_rms``, ``lns_default``, ``lns_low_precision``) the two norms of block l carry 1/sqrt(l) and
scaled initialization is off. Parameter names, state-dict keys and optimizer groups are OLMo's.
"""

from __future__ import annotations

import os
from typing import Any

from olmo_lns import environment
from olmo_lns.errors import LNSConfigError, UpstreamChangedError

__all__ = ["register"]


def register(*, scheme: str | None = None, initialization: str | None = None) -> None:
    """Teach the installed OLMo the layer-norm types of the schemes. Idempotent; called by the autoload hook.

    :param scheme: parameters of a scheme that a config names without any, such as ``"lns:exponent=0.25"``;
        the same as ``OLMO_LNS_SCHEME``.
    :param initialization: ``plain`` or ``upstream``; the same as ``OLMO_LNS_INITIALIZATION``.
    An OLMo that is not verified is left untouched, with one warning; a type of a scheme is then an error.

    :raises UpstreamChangedError: this OLMo is not one that was verified, and ``scheme``, ``initialization`` or
        ``OLMO_LNS_INITIALIZATION``, which bears on stock models too, asks for something.
    :raises LNSConfigError: ``scheme`` or ``initialization`` is not allowed. A variable that is not: one warning, and
        an error where a model is built under a scheme.

    Example: ``register(scheme="lns:exponent=0.25")`` before ``TrainConfig.load``.
    """
    # Through the environment, so that spawned workers see one value.
    for name, value in ((environment.SCHEME, scheme), (environment.INITIALIZATION, initialization)):
        if value is not None:
            os.environ[name] = value
    try:
        import olmo.config
        import olmo.model
        import olmo.version
    except ImportError as error:
        raise LNSConfigError(f"OLMo cannot be imported ({error}): pip install 'olmo-lns[olmo]'") from error

    from olmo_lns.integrations import patching
    from olmo_lns.integrations.autoload import on_import
    from olmo_lns.integrations.olmo import model, state, types, upstream

    if scheme is None and initialization is None:
        environment.warn(types.check_environment)
    else:
        types.check_environment()

    def replace(*pairs: Any) -> bool:
        try:
            upstream.check_version(olmo.version.VERSION)
            return patching.replace_all(pairs)
        except UpstreamChangedError as error:
            patching.set_aside(upstream.NAME, error)
        if types.selected or scheme or environment.read(environment.INITIALIZATION):
            patching.require_verified(upstream.NAME)
        return False

    complete = replace(
        (upstream.CONFIG_LOAD, types.wrap_load),
        (upstream.NORM_BUILD, model.wrap_norm_build),
        (upstream.SEQUENTIAL_INIT, model.wrap_block_init),
        (upstream.LLAMA_INIT, model.wrap_block_init),
        (upstream.BLOCK_RESET, model.wrap_block_reset),
        (upstream.SEQUENTIAL_RESET, model.wrap_reset),
        (upstream.LLAMA_RESET, model.wrap_reset),
        (upstream.MODEL_RESET, model.wrap_reset),
        (upstream.MODEL_INIT, model.wrap_model_init),
        (upstream.FROM_CHECKPOINT, state.wrap_from_checkpoint),
    )
    types.extend(olmo.config.LayerNormType, olmo.config.InitFnType, verified=complete)
    if not complete:
        return
    # Not loaded by `import olmo`; a launch imports them later, this hook is then in place.
    guards: list[Any] = [(target, state.wrap_save) for target in upstream.SAVE]
    guards += [(target, state.wrap_restore) for target in upstream.RESTORE]
    on_import("olmo.checkpoint", lambda _: replace((upstream.SAVE_CONFIG, state.wrap_save_config), *guards))
    on_import("olmo.train", lambda _: replace((upstream.TRAINER_STATE, state.wrap_trainer_state)))
