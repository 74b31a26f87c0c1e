"""Scale and measure one norm of a Megatron layer, of any class.

- :class:`ScaledGainLinear`: while ``forward`` runs, instance attributes hide gain and bias behind ``s*gain`` and
  ``s*bias``. Right for a forward that reads each once and whose backward uses the saved tensors, as TE's
  LayerNormLinear. TE's standalone norms read ``self.weight`` again in backward: dx and dgain would be off by s.
- :class:`olmo_lns.scaled.ScaledGainNorm`: torch's and TE's standalone norms run ``olmo_lns.norm`` on their parameters.

:func:`olmo_lns.scaled.scale` multiplies the module's output instead if such a norm measures a wrong output.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any, Iterator

import torch
from torch import nn

from olmo_lns import scaled
from olmo_lns.norm import DtypeRule, NormArithmetic
from olmo_lns.norm.dtypes import scaled_parameter
from olmo_lns.response import Response, first_output
from olmo_lns.scaled import Scaled, ScaledOutput

#: Attributes of a linear layer that belong to the norm inside of it.
_OF_FUSED_NORM = ("layer_norm_weight", "layer_norm_bias", "zero_centered_gamma")


class ScaledGainLinear(Scaled):
    """The stock forward over scaled parameters."""

    lns_calls_forward = True
    lns_how_applied = "in the fused kernel's gain"
    layer_norm_weight: torch.Tensor

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        attributes = vars(self)
        hidden = {name: attributes[name] for name in _OF_FUSED_NORM if name in attributes}
        gain, bias = self.layer_norm_weight, getattr(self, "layer_norm_bias", None)
        centered = bool(getattr(self, "zero_centered_gamma", False))
        attributes["layer_norm_weight"] = scaled_parameter(
            gain, self.lns_factor, dtype=gain.dtype, zero_centered=centered
        )
        if bias is not None:
            attributes["layer_norm_bias"] = scaled_parameter(bias, self.lns_factor, dtype=bias.dtype)
        if centered:  # 1 + gain was multiplied as a whole, since s(1+gain)-1 would cancel digits
            attributes["zero_centered_gamma"] = False
        try:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            for name in _OF_FUSED_NORM:
                attributes.pop(name, None)
            attributes.update(hidden)


def arithmetic_of(norm: nn.Module) -> NormArithmetic | None:
    """Return the arithmetic of a standalone norm of torch or TE, or None."""
    norm_class: Any = type(norm)
    if norm_class is nn.LayerNorm:
        return NormArithmetic(subtracts_mean=True)
    if norm_class is nn.RMSNorm:
        return NormArithmetic(dtypes=DtypeRule.INPUT)
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


def scale(module: nn.Module, factor: float, *, where: object, width: int) -> None:
    """Multiply the norm's output in ``module`` by ``factor``, and measure it.

    :param module: a norm, y = Norm(x), or TE's LayerNormLinear, y = Linear(Norm(x)). :param width: the hidden size.
    :raises MeasurementError: the found and the expected multiple; the module is left unchanged.

    Example: ``scale(layer.input_layernorm, 0.5, where="block 4, attn", width=4096)``.
    """
    scaled.scale(
        module,
        factor,
        where=where,
        width=width,
        arithmetic=None if is_fused(module) else arithmetic_of(module),
        mixin=ScaledGainLinear if is_fused(module) else None,
        respond=lambda norm: respond(norm, width),
    )


def respond(module: nn.Module, width: int) -> Response:
    """Run a norm, or a norm fused with a linear layer, on random rows with random parameters, outside FP8 and alone.

    TE's norms read their weights again in backward, so the random weights stay until the gradient exists. A fused
    linear layer runs without gradient and without the collective of sequence parallelism. Its linear bias is zero;
    under ScaledOutput it is one, to expose a factor that wrongly includes the bias. Parameters, FP8 state and the count
    of micro-batches are left unchanged.
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
            return Response(output.double(), None, torch.bfloat16)  # the precision of a TF32 matrix product
        weights = torch.randn(output.shape, generator=generator, device="cpu").to(device, output.dtype)
        (gradient,) = torch.autograd.grad(output, x, weights)
    return Response(output.detach().double(), gradient.double(), dtype)


@contextlib.contextmanager
def _changed(module: nn.Module, values: dict[str, nn.Parameter]) -> Iterator[None]:
    """Replace the module's parameters temporarily; switch sequence parallelism and the FP8 recipe off."""
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
