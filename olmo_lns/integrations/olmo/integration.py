"""OLMo's models that are built already: their blocks are numbered, and their config names the scheme."""

from __future__ import annotations

from typing import Any

from torch import nn

from olmo_lns.integrations.interface import Integration
from olmo_lns.integrations.olmo import norm_types
from olmo_lns.integrations.olmo.block import arithmetic_of
from olmo_lns.integrations.olmo.model import blocks_of, request_plain_initialization
from olmo_lns.norm import NormArithmetic
from olmo_lns.schemes import Scheme


class OLMo(Integration):
    """Models and configs of OLMo."""

    def blocks_of(self, model: Any) -> list[nn.Module]:
        return blocks_of(model)

    def arithmetic_of(self, norm: nn.Module) -> NormArithmetic | None:
        from olmo.model import LayerNormBase

        return arithmetic_of(norm) if isinstance(norm, LayerNormBase) else super().arithmetic_of(norm)

    def record_scheme(self, model: Any, scheme: Scheme) -> None:
        """Name the scheme in the model's config. A training loop saves this config, and a resume compares it."""
        from olmo.config import InitFnType, LayerNormType

        norm_types.add_members(LayerNormType, InitFnType)  # the start-up hook may not have run
        base = norm_types.base_type(model.config.layer_norm_type)
        model.config.layer_norm_type = LayerNormType[norm_types.type_name(scheme, base)]

    def remove_recorded_scheme(self, model: Any) -> None:
        """Give the config OLMo's own names, so that a model that is built from it applies no factor again."""
        from olmo.model import OLMo as StockOLMo

        if not isinstance(model, StockOLMo):  # a part of one
            return
        with norm_types.stock_names(model.config):
            names = model.config.layer_norm_type, model.config.init_fn
        model.config.layer_norm_type, model.config.init_fn = names

    def plain_initialization(self, config: Any) -> None:
        request_plain_initialization(config)


INTEGRATION = OLMo()
