"""Measure what a norm computes: its output, the gradient of its input, and the dtype of its output.

A :class:`Response` is one such measurement of a norm. It is the norm's response to a random input.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import warnings
from dataclasses import dataclass, field
from typing import Any, Mapping

import torch
from torch import nn

from olmo_lns.measured import Measured

__all__ = ["TOLERANCE_16_BITS", "Response", "first_output", "measure_response", "replace_first", "tolerance_of"]

#: Allowed difference between two ways of computing a norm, relative to its size: the rounding of fp32 and of 16 bits,
#: with room for sums in another order. If the scaled norm has a wrong eps, the small rows differ by more than this. If
#: it lacks a clamp, the massive rows do.
_TOLERANCE, TOLERANCE_16_BITS = 1e-4, 0.02
#: If a factor differs from 1 by less than this share of the tolerance, it is not told from 1. Multiplying a number of
#: 16 bits by a factor nearer to 1 may change no digit of it: the step between two numbers of bf16 is up to 0.8 %.
_VISIBLE_SHARE = 0.25
#: Factor of the small rows: their mean square is then near the usual eps of 1e-6, so a wrong eps shows.
_SMALL = 1e-3
#: A massive channel, as trained models have it: a clamp of 16-bit numbers shows. Its square overflows in fp16.
_MASSIVE = 3e4
#: Number of examples of the input, two of each kind: ordinary, small, and with a massive channel.
_EXAMPLES, _EXAMPLES_OF_A_KIND = 6, 2


def first_output(output: Any) -> Any:
    """Return a module's output, or the first of its outputs."""
    return output[0] if isinstance(output, (tuple, list)) and output else output


def replace_first(output: Any, value: Any) -> Any:
    """Return a module's output in which ``value`` replaces what :func:`first_output` returns."""
    if not isinstance(output, (tuple, list)) or not output:
        return value
    values = value, *output[1:]
    return [*values] if isinstance(output, list) else type(output)(*values) if hasattr(output, "_fields") else values


def tolerance_of(dtype: torch.dtype) -> float:
    """Return the difference that is allowed between two ways of computing a norm in a dtype, relative to its size."""
    return _TOLERANCE if dtype in (torch.float32, torch.float64) else TOLERANCE_16_BITS


@dataclass(frozen=True)
class Response:
    """A measurement of a norm: its output and gradient for a random input.

    :param output: output of the norm, converted to fp64.
    :param gradient: gradient of the input for a random gradient of the output, converted to fp64, or None if it was not
        measured.
    :param tolerance: allowed difference to another response, relative to its size, from :func:`tolerance_of`.
    :param output_dtypes: dtype of the output for several inputs. A key describes an input by its dtype and by whether
        autocast is on. Inputs that the norm does not accept are left out.
    """

    output: torch.Tensor
    gradient: torch.Tensor | None
    tolerance: float
    output_dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)

    @property
    def measured(self) -> frozenset[Measured]:
        """The kinds of measurement: the output, and the gradient unless it is None."""
        return frozenset({Measured.OUTPUT} if self.gradient is None else {Measured.OUTPUT, Measured.GRADIENT})

    def problem(self, before: Response, factor: float) -> str:
        """Compare this response with the response before the norm was scaled.

        The output and the gradient must be ``factor`` times those of ``before``. The output dtypes must be the same. A
        factor may be so near to 1 that a norm without it would be within the tolerance. On the ordinary rows, the
        result must then be nearer to ``factor`` times ``before`` than to ``before`` itself. If the factor differs from
        1 by less than a quarter of the tolerance, which is 0.5 % in 16 bits, a missing factor is not noticed.

        :returns: a description of the first difference, or ``""`` if there is none.
        """
        for case, expected_dtype in before.output_dtypes.items():
            if (actual_dtype := self.output_dtypes.get(case)) != expected_dtype:
                return f"an output of {actual_dtype} for {case}, expected {expected_dtype}"
        for name in ("output", "gradient"):
            expected, actual = getattr(before, name), getattr(self, name)
            if expected is None:
                continue
            if actual.shape != expected.shape:
                return f"{name} of shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
            kinds = zip(expected.split(_EXAMPLES_OF_A_KIND), actual.split(_EXAMPLES_OF_A_KIND), strict=True)
            for kind, (expected_rows, actual_rows) in enumerate(kinds):
                size = float(expected_rows.norm())
                error = float((actual_rows - factor * expected_rows).norm())
                is_missing = (
                    kind == 0
                    and abs(factor - 1.0) > _VISIBLE_SHARE * self.tolerance
                    and error > float((actual_rows - expected_rows).norm())
                )
                if is_missing or not error <= self.tolerance * abs(factor) * size:  # also true for NaN
                    ratio = float((actual_rows * expected_rows).sum()) / size**2 if size else math.nan
                    return f"{name} of {ratio:.4g} times the framework's own, expected {factor:.4g} times"
        return ""


def measure_response(module: nn.Module, width: int, shape: tuple[int, ...] = ()) -> Response:
    """Run a norm on random rows with random parameters, forward and backward.

    The module's parameters are neither read nor changed, and may be on the meta device or hold ``main_grad``.

    The input has the shape (6, 3, width), and the dtype and device of the parameters. Its first two examples are
    ordinary. The next two are small, so that a wrong eps shows. The last two have one massive channel, so that a clamp
    shows.

    :param width: the hidden size.
    :param shape: shape of an input that the norm received in its model, batch first. It is used, with a batch of 6, if
        the norm does not take rows, as a GroupNorm of (batch, channels, height, width).
    """
    if shape:
        try:
            return measure_response(module, width)
        except Exception:  # it does not take rows; an error of this second input is raised
            return _response(module, (_EXAMPLES, *shape[1:]))
    return _response(module, (_EXAMPLES, 3, width))


def _response(module: nn.Module, shape: tuple[int, ...]) -> Response:
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
        x = torch.randn(shape, generator=generator, device="cpu")
        x[2:4] *= _SMALL
        massive = x[4:, 0] if x.dim() > 3 else x[4:, ..., 0]  # one channel; the first dimension of images
        massive += _MASSIVE if dtype != torch.float16 else 0.0  # whose squares overflow there
        x = x.to(device, dtype).requires_grad_()
        output = first_output(torch.func.functional_call(module, values, (x,)))
        weights = torch.randn(output.shape, generator=generator, device="cpu").to(device, output.dtype)
        # The gradient of this sum is that of the output in the direction of the weights. autograd.grad also takes a
        # direction, but then it imports torch's symbolic shapes, which takes almost a second.
        (gradient,) = torch.autograd.grad((output * weights).sum(), x)
        dtypes = _output_dtypes(module, values, x.detach())
    return Response(output.detach().double(), gradient.double(), tolerance_of(dtype), dtypes)


def _output_dtypes(module: nn.Module, values: Mapping[str, torch.Tensor], x: torch.Tensor) -> dict[str, torch.dtype]:
    """Return the dtype of a norm's output for each dtype of its input, and under autocast to bf16.

    An input that the norm refuses, such as one of another dtype than its weight, is left out.
    """
    dtypes = {}
    refused = (RuntimeError, TypeError, ValueError, NotImplementedError)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # torch warns of its slower path
        for dtype, autocast in itertools.product((torch.float32, torch.bfloat16), (False, True)):
            with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast), contextlib.suppress(*refused):
                y = first_output(torch.func.functional_call(module, dict(values), (x.to(dtype),)))
                dtypes[f"an input of {dtype}{' under autocast' * autocast}"] = y.dtype
    return dtypes
