"""``y = s * Norm(x)`` with the factor in the gain and bias of the norm, not multiplied afterwards.

Two functions, one choice, and the arithmetic of the frameworks' norms as values. The functions give the same values and
gradients as multiplying the norm's output by ``scale``, to the precision of the dtype, without another pass over the
activations. docs/kernels.md has the measured times.
"""

from __future__ import annotations

from olmo_lns.norm.arithmetic import DtypeRule, NormArithmetic, arithmetic_of_torch, is_dtensor, scaled_norm
from olmo_lns.norm.backend import Backend, choose_backend, layer_norm, rms_norm

__all__ = [
    "Backend",
    "DtypeRule",
    "NormArithmetic",
    "arithmetic_of_torch",
    "choose_backend",
    "is_dtensor",
    "layer_norm",
    "rms_norm",
    "scaled_norm",
]
