"""Norms with a factor in their gain and bias: ``y = s * Norm(x)``.

:func:`rms_norm` and :func:`layer_norm` compute the same values and gradients as a norm whose output is multiplied by
``scale``, to the precision of the dtype. They need no further pass over the activations. :func:`choose_backend` selects
the kernels that compute them, and :class:`NormArithmetic` describes how a framework's norm computes. docs/kernels.md
has the measured times.
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
