"""Scale and measure one norm of a Megatron layer, of any class.

A norm of Megatron can be scaled in three ways:

* TE's LayerNormLinear contains a norm and a linear layer in one kernel. :class:`ScaledGainLinear` replaces its gain and
  bias by ``s * gain`` and ``s * bias`` while its forward runs. This is correct because this forward reads each of them
  once, and its backward uses the tensors that the forward has saved.
* Standalone norms of torch and TE become a :class:`olmo_lns.scaled.ScaledGainNorm`, which runs :mod:`olmo_lns.norm` on
  their parameters. The first way would be wrong for them. TE's standalone norms read ``self.weight`` again in backward,
  so the gradients of the input and the gain would be wrong by the factor s.
* For all other norms, the output is multiplied. :func:`olmo_lns.scaled.scale` measures the output of a norm after the
  first or the second way. If it is wrong, the function multiplies the output of this norm too.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any, Iterator

import torch
from torch import nn

from olmo_lns import scaled
from olmo_lns.integrations.megatron.module_names import FUSED_NORM
from olmo_lns.measured import Measured
from olmo_lns.norm import DtypeRule, NormArithmetic, arithmetic_of_torch
from olmo_lns.norm.dtypes import scaled_parameter
from olmo_lns.response import TOLERANCE_16_BITS, Response, first_output, tolerance_of
from olmo_lns.scaled import Scaled, ScaledOutput

#: Attributes of a linear layer that belong to the norm inside of it.
_OF_FUSED_NORM = (f"{FUSED_NORM}weight", f"{FUSED_NORM}bias", "zero_centered_gamma")


class ScaledGainLinear(Scaled):
    """A linear layer with the norm before it, whose stock forward runs with a scaled gain and bias of the norm."""

    lns_calls_forward = True
    lns_how_applied = "in the fused kernel's gain"
    layer_norm_weight: torch.Tensor

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        attributes = vars(self)
        hidden = {name: attributes[name] for name in _OF_FUSED_NORM if name in attributes}
        gain, bias = self.layer_norm_weight, getattr(self, "layer_norm_bias", None)
        centered = bool(getattr(self, "zero_centered_gamma", False))
        attributes["layer_norm_weight"] = scaled_parameter(
            gain, self.lns_scale_in_forward, dtype=gain.dtype, zero_centered=centered
        )
        if bias is not None:
            attributes["layer_norm_bias"] = scaled_parameter(bias, self.lns_scale_in_forward, dtype=bias.dtype)
        if centered:  # scaled_parameter returns s * (1 + gain), as s * (1 + gain) - 1 would lose digits
            attributes["zero_centered_gamma"] = False
        try:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            for name in _OF_FUSED_NORM:
                attributes.pop(name, None)
            attributes.update(hidden)


def arithmetic_of(norm: nn.Module) -> NormArithmetic | None:
    """Return the arithmetic of a standalone norm of torch or TE, or None for any other module."""
    norm_class: Any = type(norm)
    if (of_torch := arithmetic_of_torch(norm)) is not None:
        return of_torch
    names = {base.__name__ for base in norm_class.__mro__}
    of_te = "transformer_engine" in {base.__module__.partition(".")[0] for base in norm_class.__mro__}
    with_residual = "TEFusedResidualRMSNorm" in names
    if not (with_residual or (of_te and names & {"RMSNorm", "LayerNorm"})):
        return None
    return NormArithmetic(
        subtracts_mean="RMSNorm" not in names,
        dtypes=DtypeRule.WEIGHT if of_te else DtypeRule.INPUT,
        returns_input=with_residual,
    )


def is_fused(module: object) -> bool:
    """Return true for a norm fused with the linear layer after it (TE's LayerNormLinear)."""
    return getattr(module, "layer_norm_weight", None) is not None


def scale(module: nn.Module, factor: float, *, where: object, width: int) -> frozenset[Measured]:
    """Multiply the output of the norm in ``module`` by ``factor``, and measure it.

    :param module: a norm, y = Norm(x), or TE's LayerNormLinear, y = Linear(Norm(x)).
    :param where: place of the module in the model, for error messages.
    :param width: the hidden size.
    :returns: what was measured, which is the output alone for TE's LayerNormLinear.
    :raises MeasurementError: if the output is not ``factor`` times the one before. The module is left unchanged.

    Example: ``scale(layer.input_layernorm, 0.5, where="block 4, attn", width=4096)``.
    """
    return scaled.scale(
        module,
        factor,
        where=where,
        width=width,
        arithmetic=None if is_fused(module) else arithmetic_of(module),
        mixin=ScaledGainLinear if is_fused(module) else None,
        measure=lambda norm: measure_response(norm, width),
    )


def measure_response(module: nn.Module, width: int) -> Response:
    """Run a norm, or a norm with a linear layer in one kernel, on random rows with random parameters.

    FP8 and the collectives of sequence parallelism are switched off during this run. The parameters of the module, its
    FP8 state and its count of micro-batches are unchanged afterwards. TE's norms read their weights again in backward,
    so the random weights are in place until the gradient is computed.

    A linear layer with its norm is run without gradients. The bias of the linear layer is set to zero. Under
    :class:`~olmo_lns.scaled.ScaledOutput` it is set to one, because a factor that wrongly includes the bias is then
    detected.

    :param width: the hidden size.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator, fused = torch.Generator("cpu").manual_seed(4), is_fused(module)
    values = {}
    for name, parameter in module.named_parameters(recurse=False):
        if fused and name == "bias":
            drawn = torch.full(parameter.shape, float(isinstance(module, ScaledOutput)), device=device)
        elif fused and parameter.dim() > 1:
            own = torch.Generator(device).manual_seed(5)
            drawn = 0.02 * torch.randn(parameter.shape, generator=own, device=device)
        else:
            drawn = 1 + 0.25 * torch.randn(parameter.shape, generator=generator, device="cpu")
        values[name] = nn.Parameter(drawn.to(device, parameter.dtype), requires_grad=not fused)
    dtype = next((value.dtype for value in values.values()), torch.float32)
    with _changed(module, values), torch.set_grad_enabled(not fused):
        x = torch.randn((4, 1, width), generator=generator, device="cpu").to(device, dtype).requires_grad_(not fused)
        output = first_output(module(x))
        if fused:
            # torch may compute the matrix product in TF32, which is less precise than the dtype of the output.
            return Response(output.double(), None, TOLERANCE_16_BITS)
        weights = torch.randn(output.shape, generator=generator, device="cpu").to(device, output.dtype)
        (gradient,) = torch.autograd.grad(output, x, weights)
    return Response(output.detach().double(), gradient.double(), tolerance_of(dtype))


@contextlib.contextmanager
def _changed(module: nn.Module, values: dict[str, nn.Parameter]) -> Iterator[None]:
    """Replace the module's parameters, and switch sequence parallelism and FP8 off, while the context runs."""
    te = sys.modules.get("transformer_engine.pytorch")
    recipe = getattr(te, "autocast", None) or getattr(te, "fp8_autocast", None)
    attributes, parameters = dict(vars(module)), dict(module._parameters)
    module._parameters.update(values)
    for name, value in (("sequence_parallel", False), ("te_quant_params", None)):
        if name in attributes:
            setattr(module, name, value)
    try:
        with recipe(enabled=False) if recipe else contextlib.nullcontext():
            yield
    finally:
        vars(module).clear()
        vars(module).update(attributes)
        module._parameters.clear()
        module._parameters.update(parameters)
