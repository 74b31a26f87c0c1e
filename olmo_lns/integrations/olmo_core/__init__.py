"""The schemes in OLMo-core; the public names are in :mod:`olmo_lns.olmo_core`.

Nothing of OLMo-core is replaced for training. ``register()`` guards its configs, its checkpoints and its Hugging Face
converter: without it a run that is resumed without the flags of its scheme would go on as another model.
"""

from __future__ import annotations

from olmo_lns.integrations.olmo_core import checkpoint, config

__all__ = ["register"]


def register() -> None:
    """Guard what is loaded and keep the record in what is saved. Idempotent; called by the autoload hook.

    An OLMo-core that was not verified is left untouched, with a warning; a scheme then stops there.
    """
    from olmo_core.version import VERSION
    from packaging.version import Version

    from olmo_lns.integrations.autoload import on_import
    from olmo_lns.integrations.olmo_core import upstream
    from olmo_lns.integrations.patching import replace_all

    if Version(VERSION) < Version(upstream.OLDEST):
        return  # ai2-olmo brings 0.1.0, which has no models

    for module, pairs in {
        "olmo_core.config": [(upstream.FROM_DICT, config.wrap_from_dict)],
        "olmo_core.distributed.checkpoint": [
            (upstream.LOAD_MODEL, checkpoint.wrap_load_model),
            (upstream.SAVE_MODEL, checkpoint.wrap_save_model),
            (upstream.SAVE_MODEL_ASYNC, checkpoint.wrap_save_model),
        ],
        "olmo_core.generate.generation_module.transformer.generation_module": [
            (upstream.LOAD_GENERATION, checkpoint.wrap_load_generation),
            (upstream.AVERAGE, checkpoint.wrap_average),
        ],
        "olmo_core.nn.hf.checkpoint": [
            (upstream.LOAD_HF, checkpoint.wrap_load_hf),
            (upstream.SAVE_HF, checkpoint.wrap_save_hf),
            (upstream.SAVE_HF_HYBRID, checkpoint.wrap_save_hf),
        ],
        "olmo_core.train.checkpoint": [
            (upstream.LOAD, checkpoint.wrap_load),
            (upstream.SAVE, checkpoint.wrap_save),
            (upstream.SAVE_ASYNC, checkpoint.wrap_save),
            (upstream.SAVE_TRAIN_STATE, checkpoint.wrap_save_train_state),
        ],
    }.items():
        on_import(module, lambda _, pairs=pairs: replace_all(pairs, framework=upstream.NAME))  # type: ignore[misc]
