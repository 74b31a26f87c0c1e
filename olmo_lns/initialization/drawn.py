"""Check the standard deviation of freshly drawn matrices, where the framework was asked for a known one."""

from __future__ import annotations

from typing import Mapping

import torch

from olmo_lns.errors import MeasurementError
from olmo_lns.initialization.rule import MEASURABLE

#: Allowed relative difference of a measured standard deviation. That of 1,000 random numbers is right to 2 %, and an
#: unexpected depth factor is at least a factor of 1.41.
_TOLERANCE = 0.15


def drawn_std(weight: torch.Tensor) -> float | None:
    """Return the standard deviation of a weight, or of this process's shard of it.

    :returns: None if the weight is on the meta device, consists of integers, or has fewer elements than
        :data:`~olmo_lns.initialization.rule.MEASURABLE`.
    """
    weight = getattr(weight, "_local_tensor", weight)
    measurable = not weight.is_meta and weight.numel() >= MEASURABLE and weight.is_floating_point()
    return float(weight.detach().float().std()) if measurable else None


def check_drawn(weights: Mapping[str, torch.Tensor], std: float, *, where: str) -> bool:
    """Check that freshly drawn matrices have the standard deviation ``std``.

    :param weights: name -> weight, or this process's shard of it. They are not changed.
    :param std: the expected standard deviation, in the unit of the weights.
    :param where: beginning of the error message.
    :returns: true if at least one weight could be measured, see :func:`drawn_std`.
    :raises MeasurementError: if a standard deviation differs by more than 15 %. The message gives both values.
    """
    measured = False
    for name, weight in weights.items():
        if (actual_std := drawn_std(weight)) is None:
            continue
        measured = True
        if not abs(actual_std - std) <= _TOLERANCE * std:
            raise MeasurementError(
                f"{where}, {name}: the weights were drawn with a standard deviation of {actual_std:.4g}. Expected "
                f"{std:.4g}. This version of the framework does not initialize its output projections as requested. "
                "Use another version of the framework, or train without the scheme's flag."
            )
    return measured
