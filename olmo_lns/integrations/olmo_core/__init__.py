"""The schemes in OLMo-core; the public names are in :mod:`olmo_lns.olmo_core`.

Nothing of OLMo-core is replaced for training. ``register()`` guards its checkpoints and its Hugging Face converter:
without it a run that is resumed without the flags of its scheme would go on as another model.
"""

from __future__ import annotations

from typing import Any

from olmo_lns.errors import LNSConfigError

__all__ = ["register"]


def register() -> None:
    """Guard the loading of checkpoints and keep the record in them. Idempotent; called by the autoload hook.

    :raises UpstreamChangedError: this OLMo-core is none that was verified.
    """
    from olmo_core.version import VERSION
    from packaging.version import Version

    from olmo_lns.integrations.autoload import on_import
    from olmo_lns.integrations.olmo_core import checkpoint, upstream

    if Version(VERSION) < Version(upstream.OLDEST):
        return  # ai2-olmo brings 0.1.0, which has no models

    on_import("olmo_core.distributed.checkpoint", lambda _: _replace((upstream.LOAD_MODEL, checkpoint.wrap_load_model)))
    on_import(
        "olmo_core.nn.hf.checkpoint",
        lambda _: _replace(
            (upstream.SAVE_HF, checkpoint.wrap_save_hf), (upstream.SAVE_HF_HYBRID, checkpoint.wrap_save_hf)
        ),
    )
    on_import(
        "olmo_core.train.checkpoint",
        lambda _: _replace(
            (upstream.LOAD, checkpoint.wrap_load),
            (upstream.SAVE, checkpoint.wrap_save),
            (upstream.SAVE_ASYNC, checkpoint.wrap_save),
            (upstream.SAVE_TRAIN_STATE, checkpoint.wrap_save_train_state),
        ),
    )


def _replace(*pairs: Any) -> None:
    from olmo_lns.integrations.patching import replace_all

    replace_all(pairs)


def __getattr__(name: str) -> Any:
    # OLMo-core takes an AttributeError for "no such class" and builds its own block without a word.
    if name.endswith("Config"):
        raise LNSConfigError(f"olmo_lns.integrations.olmo_core has no {name!r}: it is olmo_lns.olmo_core.BlockConfig")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
