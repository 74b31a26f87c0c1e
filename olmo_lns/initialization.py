"""Measure the initialization of a model's matrices."""

from __future__ import annotations

from typing import Mapping

import torch

from olmo_lns.errors import MeasurementError

__all__ = ["check_drawn", "drawn_std"]


def drawn_std(weight: torch.Tensor) -> float | None:
    """Return the standard deviation of a weight, or of this process's shard of it.

    :returns: None for a weight on the meta device, of integers, or of fewer than 1,000 elements.
    """
    weight = getattr(weight, "_local_tensor", weight)
    measurable = not weight.is_meta and weight.numel() >= 1000 and weight.is_floating_point()
    return float(weight.detach().float().std()) if measurable else None


def check_drawn(weights: Mapping[str, torch.Tensor], std: float, *, where: str) -> bool:
    """Check that freshly drawn matrices have the standard deviation ``std``.

    :param weights: name -> weight, or this process's shard of it; none is changed.
    :returns: true if a weight was measured: not on the meta device, at least 1,000 elements.
    :raises MeasurementError: the found and the expected standard deviation.
    """
    measured = False
    for name, weight in weights.items():
        if (actual_std := drawn_std(weight)) is None:
            continue
        measured = True
        if not 0.85 * std <= actual_std <= 1.15 * std:
            raise MeasurementError(
                f"{where}, {name}: found weights drawn with a standard deviation of {actual_std:.4g}, expected "
                f"{std:.4g}. This upstream version does not initialize its output projections as requested. "
                "OLMO_LNS_DISABLE=1 runs without a scheme."
            )
    return measured
