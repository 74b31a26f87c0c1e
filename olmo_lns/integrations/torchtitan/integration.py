"""torchtitan's decoders that are built already. Their checkpoints name the scheme that is found in the model."""

from __future__ import annotations

from typing import Any

from torch import nn

from olmo_lns.integrations.hints import Hints
from olmo_lns.integrations.interface import Integration
from olmo_lns.integrations.torchtitan.norms import arithmetic_of, keep_argument_names
from olmo_lns.norm import NormArithmetic
from olmo_lns.schemes import Scheme


class Torchtitan(Integration):
    """Decoders of torchtitan."""

    def arithmetic_of(self, norm: nn.Module) -> NormArithmetic | None:
        return arithmetic_of(norm) or super().arithmetic_of(norm)

    def apply(self, model: Any, scheme: Scheme, hints: Hints) -> None:
        """Apply a scheme, after the names of the norms' arguments are kept, by which torchtitan shards their inputs."""
        for module in model.modules():
            keep_argument_names(module)
        super().apply(model, scheme, hints)


INTEGRATION = Torchtitan()
