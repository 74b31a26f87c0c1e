"""torchtitan's RMSNorm has known arithmetic; the outputs of other norms are multiplied."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor
from torchtitan.models.common.nn_modules import RMSNorm

from olmo_lns.norm import DtypeRule, NormArithmetic

#: RMSNorm as torch computes it. A DTensor is the input in torchtitan's whole-DTensor backend.
_RMS_NORM = NormArithmetic(dtypes=DtypeRule.INPUT, multiplied=(DTensor,))


def arithmetic_of(norm: Any) -> NormArithmetic | None:
    """Return the arithmetic of torchtitan's RMSNorm, or None for any other norm."""
    return _RMS_NORM if type(norm) is RMSNorm else None
