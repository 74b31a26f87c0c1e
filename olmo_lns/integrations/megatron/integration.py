"""Megatron Core's models that are built already: their norms are found by the names of the modules."""

from __future__ import annotations

from typing import Any

from torch import nn

from olmo_lns import environment
from olmo_lns.errors import LNSConfigError
from olmo_lns.integrations import any_model, megatron
from olmo_lns.integrations.hints import Hints
from olmo_lns.integrations.interface import Integration
from olmo_lns.integrations.megatron.model import unchanged_on_failure
from olmo_lns.processes import same_outcome_on_every_rank
from olmo_lns.schemes import LNS, Scheme


class MegatronCore(Integration):
    """Models and configs of Megatron Core."""

    def require_supported(self, model: nn.Module, scheme: Scheme, hints: Hints) -> None:
        environment.check()
        any_model.require_unwrapped(model)
        if scheme.name != LNS.name:
            raise LNSConfigError(
                f"The scheme is {scheme}. The Megatron integration supports lns and its exponent only. Use lns."
            )
        if unused := [f"{name}=" for name in ("blocks", "norms", "example") if getattr(hints, name) is not None]:
            raise LNSConfigError(
                f"{' and '.join(unused)} was passed for a model of Megatron Core. There the norms are found by the "
                "names of their modules. Remove the argument."
            )

    def apply(self, model: Any, scheme: Scheme, hints: Hints) -> None:
        with unchanged_on_failure(model), same_outcome_on_every_rank():
            megatron.apply(model, exponent=scheme.parameters["exponent"], trained=hints.trained)

    def require_foldable(self, model: Any) -> None:
        raise LNSConfigError(
            f"fold found a built {type(model).__name__} of Megatron Core, whose weights may be tensor-parallel parts. "
            "Fold its checkpoint instead: olmo-lns export CHECKPOINT OUT."
        )

    def plain_initialization(self, config: Any) -> None:
        megatron.plain_initialization(config)

    def make_plain(self, model: nn.Module, hints: Hints) -> str:
        raise LNSConfigError(
            f"plain_initialization found a built {type(model).__name__} of Megatron Core. It expects the model's "
            "config before the model is built. Call it on the TransformerConfig, or pass --no-scaled-init."
        )


INTEGRATION = MegatronCore()
