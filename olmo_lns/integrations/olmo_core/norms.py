"""The arithmetic of OLMo-core's norms.

It is known for the types ``rms`` and ``default``. Of all other norms, the output is multiplied.
"""

from __future__ import annotations

from typing import Any

from olmo_core.nn import layer_norm as stock

from olmo_lns.norm import DtypeRule, NormArithmetic

#: OLMo-core computes the statistics in fp32 without autocast, and returns the dtype of x. Under tensor parallelism, x
#: is a DTensor. The output is multiplied then.
_RMS_NORM = NormArithmetic(dtypes=DtypeRule.INPUT, multiplies_dtensors=True)
_LAYER_NORM = NormArithmetic(subtracts_mean=True, dtypes=DtypeRule.INPUT, multiplies_dtensors=True)


def arithmetic_of(norm: Any) -> NormArithmetic | None:
    """Return the arithmetic of a norm, or None if it is unknown."""
    return {stock.LayerNorm: _LAYER_NORM, stock.RMSNorm: _RMS_NORM}.get(type(norm))
