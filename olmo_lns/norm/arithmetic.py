"""The arithmetic of a framework's norm, as a value: its attributes, and the dtype in which it computes and returns.

Frameworks have the same two norms under many class names. They differ in the name of an attribute and in their dtypes.
An integration names these differences in a :class:`NormArithmetic`, and :func:`scaled_norm` computes the norm.
"""

from __future__ import annotations

import contextlib
import enum
from dataclasses import dataclass
from typing import Any

import torch

from olmo_lns.norm.backend import Backend, layer_norm, rms_norm
from olmo_lns.norm.dtypes import autocast_dtype, without_autocast


class DtypeRule(enum.Enum):
    """The dtype of a norm's result."""

    #: torch's ``layer_norm``: that of x, and fp32 under autocast on a GPU. RMSNorm: that of x times the parameters.
    TORCH = "torch"
    #: That of x, under autocast too (OLMo-core, torchtitan, ``nn.RMSNorm``).
    INPUT = "input"
    #: x is cast to autocast's dtype, or to that of the weight, and the result has it (Transformer Engine).
    WEIGHT = "weight"
    #: Under autocast, x and the parameters are cast to its dtype, and the result has it (OLMo's low precision).
    AUTOCAST = "autocast"


@dataclass(frozen=True)
class NormArithmetic:
    """A norm over the last dimension with the attributes ``weight`` and ``bias``, which may be missing or None.

    The gain is ``weight + 1`` if the module has a true ``zero_centered_gamma``.

    :param subtracts_mean: LayerNorm; else RMSNorm. :param dtypes: the dtype of the result.
    :param eps: name of the attribute with eps; None as its value means that of x's dtype, as in ``nn.RMSNorm``.
    :param multiplied: types of tensors for which the output of the framework's own forward is multiplied (DTensor).
    :param returns_input: the result is the pair of y and x.

    Example: ``NormArithmetic(eps="variance_epsilon")`` is Llama's RMSNorm in transformers.
    """

    subtracts_mean: bool = False
    dtypes: DtypeRule = DtypeRule.TORCH
    eps: str = "eps"
    multiplied: tuple[type, ...] = ()
    returns_input: bool = False


def scaled_norm(module: Any, x: torch.Tensor, arithmetic: NormArithmetic, scale: float, backend: Backend) -> Any:
    """Return ``scale`` times the norm ``module`` of ``x``, with the factor in gain and bias.

    :param x: (..., width). :returns: shape of x, in the dtype of ``arithmetic.dtypes``; with x if ``returns_input``.
    :raises AttributeError: the module has no attribute with eps.
    """
    given, rule = x, arithmetic.dtypes
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if rule is DtypeRule.WEIGHT and weight is not None:
        x = x.to(autocast_dtype(x) or weight.dtype)
    elif rule is DtypeRule.AUTOCAST and (narrow := autocast_dtype(x)) is not None:
        x, (weight, bias) = x.to(narrow), (None if t is None else t.to(narrow) for t in (weight, bias))
    eps = getattr(module, arithmetic.eps)
    eps = torch.finfo(x.dtype).eps if eps is None else float(eps)
    centered = bool(getattr(module, "zero_centered_gamma", False))
    off = rule in (DtypeRule.INPUT, DtypeRule.AUTOCAST)
    with without_autocast(x) if off else contextlib.nullcontext():
        if arithmetic.subtracts_mean:
            y = layer_norm(x, weight, bias, eps, scale, zero_centered=centered, backend=backend)
        else:
            y = rms_norm(x, weight, eps, scale, bias=bias, zero_centered=centered, backend=backend)
    y = y if rule is DtypeRule.TORCH else y.to(x.dtype)
    return (y, given) if arithmetic.returns_input else y
