"""LayerNorm Scaling for OLMo: ``register()`` adds the layer-norm types and nothing else changes.

Registered but not selected, OLMo is bit for bit itself. With ``layer_norm_type: lns`` (or
``lns_rms``, ``lns_default``, ``lns_low_precision``) the two norms of block l carry 1/sqrt(l) and
scaled initialization is off. Parameter names, state-dict keys and optimizer groups are OLMo's.
"""

from __future__ import annotations

import os
from typing import Any, Callable

from olmo_lns.errors import LNSConfigError
from olmo_lns.settings import EXPONENT, SCALED_INIT, Settings

__all__ = ["register"]


def register(*, exponent: float | None = None, scaled_init: str | None = None) -> None:
    """Teach the installed OLMo the lns layer-norm types. Idempotent; called by the autoload hook.

    :param exponent: of the factor; the same as ``OLMO_LNS_EXPONENT`` (default 0.5).
    :param scaled_init: ``auto``, ``keep`` or ``off``; the same as ``OLMO_LNS_SCALED_INIT``.
    :raises UpstreamChangedError: this OLMo is not one that was verified.
    :raises LNSConfigError: a setting that is not allowed.
    """
    # Through the environment, so that spawned workers and the checkpoint guard see one value.
    if exponent is not None:
        os.environ[EXPONENT] = repr(float(exponent))
    if scaled_init is not None:
        os.environ[SCALED_INIT] = scaled_init
    Settings.current()
    try:
        import olmo.config
        import olmo.model
        import olmo.version
    except ImportError as error:
        raise LNSConfigError(f"OLMo cannot be imported ({error}): pip install 'olmo-lns[olmo]'") from error

    from olmo_lns.integrations.autoload import on_import
    from olmo_lns.integrations.olmo import checkpoint, config, model, types, upstream
    from olmo_lns.integrations.patching import replace_all

    upstream.check_version(olmo.version.VERSION)
    replace_all(
        (
            (upstream.CONFIG_LOAD, config.wrap_load),
            (upstream.NORM_BUILD, model.wrap_norm_build),
            (upstream.SEQUENTIAL_INIT, model.wrap_block_init),
            (upstream.LLAMA_INIT, model.wrap_block_init),
            (upstream.BLOCK_RESET, model.wrap_reset),
            (upstream.MODEL_INIT, model.wrap_model_init),
            (upstream.FROM_CHECKPOINT, checkpoint.wrap_from_checkpoint),
        )
    )
    types.extend_enum(olmo.config.LayerNormType)
    # Not loaded by `import olmo`; a launch imports them later, this hook is then in place.
    on_import("olmo.checkpoint", lambda _: _replace((upstream.SAVE_CONFIG, checkpoint.wrap_save)))
    on_import("olmo.train", lambda _: _replace((upstream.RESTORE, checkpoint.wrap_restore), (upstream.FIT, _wrap_fit)))


def _replace(*pairs: Any) -> None:
    from olmo_lns.integrations.patching import replace_all

    replace_all(pairs)


def _wrap_fit(fit: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``Trainer.fit``: the variance monitor, when its environment variable asks for it."""

    def wrapped(self: Any) -> Any:
        if os.environ.get("OLMO_LNS_MONITOR"):
            from olmo_lns.diagnostics.monitor import maybe_install

            maybe_install(self)
        return fit(self)

    return wrapped
