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
    """The rule by which a norm chooses the dtype of its result."""

    #: The rule of torch's functions. A LayerNorm returns the dtype of x, and fp32 under autocast on a GPU. An RMSNorm
    #: returns the dtype that torch gives the product of x and the parameters.
    TORCH = "torch"
    #: The result has the dtype of x, also under autocast (OLMo-core, torchtitan, ``nn.RMSNorm``).
    INPUT = "input"
    #: The norm casts x to the dtype of autocast, or without autocast to that of the weight. The result has this dtype
    #: (Transformer Engine).
    WEIGHT = "weight"
    #: Under autocast the norm casts x and the parameters to the dtype of autocast. The result has this dtype (OLMo's
    #: low precision).
    AUTOCAST = "autocast"


@dataclass(frozen=True)
class NormArithmetic:
    """The arithmetic by which a framework's norm over the last dimension computes its result.

    The parameters of the norm are its attributes ``weight`` and ``bias``. Each of them may be missing or None. If the
    attribute ``zero_centered_gamma`` is true, the gain is ``weight + 1``.

    :param subtracts_mean: true for a LayerNorm, false for an RMSNorm.
    :param dtypes: the rule for the dtype of the result.
    :param eps: name of the attribute that has eps. If the attribute is None, the norm uses the machine epsilon of x's
        dtype, as ``nn.RMSNorm`` does.
    :param multiplies_dtensors: true if the framework's own forward runs for a DTensor, and its output is multiplied by
        the factor.
    :param returns_input: true if the norm returns the pair of its result and x.

    Example: ``NormArithmetic(eps="variance_epsilon")`` is Llama's RMSNorm in transformers.
    """

    subtracts_mean: bool = False
    dtypes: DtypeRule = DtypeRule.TORCH
    eps: str = "eps"
    multiplies_dtensors: bool = False
    returns_input: bool = False


def arithmetic_of_torch(norm: Any) -> NormArithmetic | None:
    """Return the arithmetic of ``nn.LayerNorm`` and ``nn.RMSNorm``, or None for any other module.

    Under tensor parallelism x is a DTensor. The output is multiplied then.
    """
    if type(norm) is torch.nn.LayerNorm:
        return NormArithmetic(subtracts_mean=True, multiplies_dtensors=True)
    if type(norm) is torch.nn.RMSNorm:
        return NormArithmetic(dtypes=DtypeRule.INPUT, multiplies_dtensors=True)
    return None


def is_dtensor(x: torch.Tensor) -> bool:
    """Return true for a DTensor."""
    if type(x) is torch.Tensor:  # Importing the class takes a second, which a program without DTensors need not wait.
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(x, DTensor)


def scaled_norm(module: Any, x: torch.Tensor, arithmetic: NormArithmetic, scale: float, backend: Backend) -> Any:
    """Return ``scale`` times the norm ``module`` of ``x``, with the factor in gain and bias.

    :param x: (..., width).
    :returns: shape of x, in the dtype of ``arithmetic.dtypes``; with x if ``returns_input``.
    :raises AttributeError: if the module has no attribute with eps.
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
