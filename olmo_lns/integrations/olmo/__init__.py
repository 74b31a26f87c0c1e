"""Schemes in OLMo, selected by ``layer_norm_type``.

:func:`register` adds the types of this package to OLMo's, and wraps the functions that read a config, build a model and
load a checkpoint. With ``layer_norm_type: lns`` (or ``lns_rms``, ``lns_default``, ``lns_low_precision``) the outputs of
the two norms of block l are multiplied by 1/sqrt(l), and scaled initialization is off. Parameter names, state-dict keys
and optimizer groups do not change. If no scheme is selected, OLMo computes bit for bit what it computes without this
package.
"""

from __future__ import annotations

from types import ModuleType

from olmo_lns.hook import on_import, wrap

__all__ = ["register"]


def register() -> None:
    """Add the schemes' layer-norm types to the installed OLMo when its modules are imported.

    The start-up hook calls this function when OLMo is first imported. The function itself imports nothing of OLMo. A
    second call does nothing.
    """
    on_import("olmo.config", _extend_config)
    on_import("olmo.model", _wrap_model)
    on_import("olmo.train", _wrap_trainer)  # not loaded by `import olmo`


def _extend_config(module: ModuleType) -> None:
    from olmo_lns.integrations.olmo import norm_types

    norm_types.add_members(module.LayerNormType, module.InitFnType)
    wrap("olmo.config:BaseConfig.load", norm_types.wrap_load)


def _wrap_model(module: ModuleType) -> None:
    from olmo_lns.integrations.olmo import model

    wrap("olmo.model:OLMo.reset_parameters", model.wrap_reset)
    wrap("olmo.model:OLMo.__init__", model.wrap_model_init)


def _wrap_trainer(module: ModuleType) -> None:
    from olmo_lns.integrations.olmo import checkpoint

    for kind in ("sharded", "unsharded"):
        wrap(f"olmo.train:Trainer.restore_{kind}_checkpoint", checkpoint.wrap_restore)
