"""OLMo-core's ``rms`` and ``default`` norms have known arithmetic; the outputs of others are multiplied."""

from __future__ import annotations

from typing import Any

from olmo_core.nn import layer_norm as stock
from torch.distributed.tensor import DTensor

from olmo_lns.norm import DtypeRule, NormArithmetic

#: Statistics in fp32, the result in the dtype of x, autocast off. A DTensor is the input under tensor parallelism.
_RMS_NORM = NormArithmetic(dtypes=DtypeRule.INPUT, multiplied=(DTensor,))
_LAYER_NORM = NormArithmetic(subtracts_mean=True, dtypes=DtypeRule.INPUT, multiplied=(DTensor,))


def arithmetic_of(norm: Any) -> NormArithmetic | None:
    """Return the arithmetic of a norm of OLMo-core of known class, or None."""
    return {stock.LayerNorm: _LAYER_NORM, stock.RMSNorm: _RMS_NORM}.get(type(norm))
