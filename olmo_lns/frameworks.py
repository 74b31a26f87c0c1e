"""The one table of the frameworks that have an integration. No framework is imported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["FRAMEWORKS", "Framework", "framework_of"]


@dataclass(frozen=True)
class Framework:
    """A framework with an integration.

    :param module: its top-level module. The integration is the package of the same name in ``olmo_lns.integrations``.
    :param title: its name in messages.
    :param extra: the extra of this package that installs it.
    :param package: its name on PyPI.
    :param installed_as: a module that can be imported only if the framework is installed.
    :param setting: what a user writes to select a scheme, for messages.
    :param option: beginning of the command-line option that selects a scheme, or ``""`` if there is no single option.
    :param classes: beginnings of the names of the modules that define its models and its configs. A model or a config
        belongs to the framework if its class, or a base class of it, is from such a module.
    """

    module: str
    title: str
    extra: str
    package: str
    installed_as: str
    setting: str
    option: str = ""
    classes: tuple[str, ...] = ()

    @property
    def integration(self) -> str:
        """The package whose ``register()`` the start-up hook calls."""
        return f"olmo_lns.integrations.{self.module}"


_ROWS = (
    Framework(
        "olmo",
        "OLMo",
        "olmo",
        "ai2-olmo",
        "olmo",
        setting="--model.layer_norm_type=lns",
        option="--model.layer_norm_type=lns",
        classes=("olmo.model", "olmo.config"),
    ),
    Framework(
        "olmo_core",
        "OLMo-core",
        "olmo-core",
        "ai2-olmo-core",
        "olmo_core",
        setting="block: {_CLASS_: olmo_lns.olmo_core.BlockConfig}",
        option="--model.block._CLASS_=olmo_lns",
        classes=("olmo_core.nn.transformer.model", "olmo_core.nn.transformer.config"),
    ),
    Framework(
        "megatron",
        "Megatron core",
        "megatron",
        "megatron-core",
        "megatron.core",
        setting="--layernorm-scaling",
        option="--layernorm-scaling",
        classes=("megatron.core.",),
    ),
    Framework(
        "torchtitan",
        "torchtitan",
        "torchtitan",
        "torchtitan",
        "torchtitan",
        setting="--override.imports olmo_lns.torchtitan.lns",
        classes=("torchtitan.models.common.decoder",),
    ),
    Framework(
        "transformers",
        "transformers",
        "hf",
        "transformers",
        "transformers",
        setting="olmo_lns.apply(model)",
        classes=("transformers.modeling_utils",),
    ),
)
#: Top-level module -> framework.
FRAMEWORKS: dict[str, Framework] = {row.module: row for row in _ROWS}


def framework_of(target: Any) -> str:
    """Return the module of the framework whose class a model or a config inherits, or ``""`` for anything else.

    Example: ``framework_of(LlamaForCausalLM(config))`` is ``"transformers"``.
    """
    modules = [base.__module__ for base in type(target).__mro__]
    for row in _ROWS:
        if any(f"{module}.".startswith(row.classes) for module in modules if row.classes):
            return row.module
    return ""
