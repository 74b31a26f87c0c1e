"""torchtitan's RMSNorm with the factor in its gain; the outputs of other norms are multiplied."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torchtitan.models.common.nn_modules import RMSNorm

from olmo_lns.norm import rms_norm
from olmo_lns.scaled import Scaled


class _FoldedRMSNorm(Scaled):
    """RMSNorm as torch computes it: the result has the dtype of x."""

    def forward(self: Any, x: torch.Tensor) -> Any:
        """Return ``lns_scale * RMSNorm(x)``; x of shape (..., dim)."""
        if isinstance(x, DTensor):  # the whole-DTensor backend
            return super().forward(x) * self.lns_factor  # type: ignore[misc]
        return rms_norm(x, self.weight, self.eps, self.lns_factor, backend=self.lns_backend).to(x.dtype)


def folded(norm: Any) -> type | None:
    """Return the mixin for a norm of known arithmetic; None for any other."""
    return _FoldedRMSNorm if type(norm) is RMSNorm else None
