"""Measure the output of a norm and the initialization of a projection; raise one rank's problem on every rank."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Mapping

import torch
from torch import nn

from olmo_lns.errors import MeasurementError

__all__ = ["Response", "check_drawn", "first", "raise_on_every_rank", "response"]


def first(output: Any) -> Any:
    """Return a module's output, or the first of its outputs."""
    return output[0] if isinstance(output, (tuple, list)) and output else output


@dataclass(frozen=True)
class Response:
    """A norm's output on random rows and the gradient of the rows, fp64. :param dtype: dtype of the computation."""

    output: torch.Tensor
    gradient: torch.Tensor | None
    dtype: torch.dtype

    def problem(self, before: Response, factor: float) -> str:
        """Describe the first of output and gradient that is not ``factor`` times its value in ``before``, or ``""``."""
        tolerance = 1e-4 if self.dtype in (torch.float32, torch.float64) else 0.02
        for name in ("output", "gradient"):
            expected, actual = getattr(before, name), getattr(self, name)
            if expected is None:
                continue
            if actual.shape != expected.shape:
                return f"{name} of shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
            # Ordinary rows, small rows and rows with a massive channel, each pair by itself.
            for expected_rows, actual_rows in zip(expected.split(2), actual.split(2), strict=True):
                size = float(expected_rows.norm())
                error = float((actual_rows - factor * expected_rows).norm())
                if not error <= tolerance * abs(factor) * size:  # also true for NaN
                    ratio = float((actual_rows * expected_rows).sum()) / size**2 if size else math.nan
                    return f"{name} of {ratio:.4g} times the framework's own, expected {factor:.4g} times"
        return ""


def response(module: nn.Module, width: int) -> Response:
    """Run a norm on random rows with random parameters, forward and backward.

    The module's parameters are neither read nor changed, and may be on the meta device or hold ``main_grad``.

    :param width: the hidden size; x is (6, 3, width), in the parameters' dtype and on their device: two of ordinary
        rows, two of small ones, which show eps, two with one massive channel, which show a clamp.
    """
    parameters = dict(module.named_parameters())
    device, dtype = next(((p.device, p.dtype) for p in parameters.values()), (torch.device("cpu"), torch.float32))
    if device.type == "meta":
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator().manual_seed(4)
    values = {
        # ds_shape: the full shape of a weight that DeepSpeed has partitioned
        name: (1 + 0.25 * torch.randn(getattr(p, "ds_shape", p.shape), generator=generator, device="cpu")).to(
            device, p.dtype
        )
        for name, p in parameters.items()
    }
    values |= {name: b.clone() for name, b in module.named_buffers() if not b.is_meta}  # running statistics
    with torch.enable_grad():
        x = torch.randn((6, 3, width), generator=generator, device="cpu")
        x[2:4] *= 1e-3
        x[4:, :, 0] += 3e4 if dtype != torch.float16 else 0.0  # whose squares overflow there
        x = x.to(device, dtype).requires_grad_()
        output = first(torch.func.functional_call(module, values, (x,)))
        weights = torch.randn(output.shape, generator=generator, device="cpu").to(device, output.dtype)
        (gradient,) = torch.autograd.grad(output, x, weights)
    return Response(output.detach().double(), gradient.double(), dtype)


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


def raise_on_every_rank(problem: str) -> None:
    """Raise on every process of a launch if one of them has a problem, before the next collective runs.

    :param problem: this process's problem, or ``""``. Every process of the launch must call this function.
    :raises MeasurementError: the problems with their ranks.
    """
    import torch.distributed as dist

    problems: list[Any] = [problem]
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        problems = [None] * dist.get_world_size()
        dist.all_gather_object(problems, problem)
    if ranks := {text: rank for rank, text in enumerate(problems) if text}:
        raise MeasurementError(
            "; ".join(f"rank {rank}: {text}" for text, rank in sorted(ranks.items(), key=lambda p: p[1]))
        )
