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
    :param models: beginning of the name of the module with the class from which all its models inherit. It is ``""``
        if :func:`olmo_lns.apply` does not treat these models differently from others.
    """

    module: str
    title: str
    extra: str
    package: str
    installed_as: str
    setting: str
    option: str = ""
    models: str = ""

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
        models="olmo.model",
    ),
    Framework(
        "olmo_core",
        "OLMo-core",
        "olmo-core",
        "ai2-olmo-core",
        "olmo_core",
        setting="block: {_CLASS_: olmo_lns.olmo_core.BlockConfig}",
        option="--model.block._CLASS_=olmo_lns",
    ),
    Framework(
        "megatron",
        "Megatron core",
        "megatron",
        "megatron-core",
        "megatron.core",
        setting="--layernorm-scaling",
        option="--layernorm-scaling",
        models="megatron.core.",
    ),
    Framework(
        "torchtitan",
        "torchtitan",
        "torchtitan",
        "torchtitan",
        "torchtitan",
        setting="--override.imports olmo_lns.torchtitan.lns",
    ),
    Framework(
        "transformers",
        "transformers",
        "hf",
        "transformers",
        "transformers",
        setting="olmo_lns.apply(model)",
        models="transformers.modeling_utils",
    ),
)
#: Top-level module -> framework.
FRAMEWORKS: dict[str, Framework] = {row.module: row for row in _ROWS}


def framework_of(model: Any) -> str:
    """Return the module of the framework whose class a model inherits, or ``""`` for a model of another kind.

    Example: ``framework_of(LlamaForCausalLM(config))`` is ``"transformers"``.
    """
    modules = [base.__module__ for base in type(model).__mro__]
    for row in _ROWS:
        if row.models and any(f"{module}.".startswith(row.models) for module in modules):
            return row.module
    return ""
