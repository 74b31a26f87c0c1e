"""OLMo-core's models that are built already. They get no scheme, because their ``config.json`` would not name it."""

from __future__ import annotations

from typing import Any

from torch import nn

from olmo_lns import sites
from olmo_lns.errors import LNSConfigError
from olmo_lns.integrations.hints import Hints
from olmo_lns.integrations.interface import Integration
from olmo_lns.integrations.olmo_core.norms import arithmetic_of
from olmo_lns.norm import NormArithmetic
from olmo_lns.schemes import Scheme


class OLMoCore(Integration):
    """Models and configs of OLMo-core."""

    def arithmetic_of(self, norm: nn.Module) -> NormArithmetic | None:
        return arithmetic_of(norm) or super().arithmetic_of(norm)

    def require_supported(self, model: nn.Module, scheme: Scheme, hints: Hints) -> None:
        """Refuse a built model without a scheme.

        OLMo-core saves the config of the script with each checkpoint. A built model cannot change it, so a later resume
        would be refused.
        """
        super().require_supported(model, scheme, hints)
        if not any(sites.in_model(model)):
            raise LNSConfigError(
                f"apply found a built {type(model).__name__} of OLMo-core, whose checkpoints name the scheme in the "
                "config from which the model is built. Expected this config, before the model is built. Call "
                f'olmo_lns.olmo_core.apply(config, "{scheme.name}"), then config.build().'
            )

    def plain_initialization(self, config: Any) -> None:
        raise LNSConfigError(
            f"plain_initialization found an object of the type {type(config).__name__} of OLMo-core. It "
            "expects a built model, or the config of an OLMo or a Megatron model. In OLMo-core, set init_method to "
            "normal or fan_in."
        )


INTEGRATION = OLMoCore()
