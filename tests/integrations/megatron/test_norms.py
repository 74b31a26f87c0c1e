"""One norm at a time: values and gradients of the scaled module against the formula in fp64."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from support import megatron_tiny as tiny

from olmo_lns.errors import LNSConfigError
from olmo_lns.integrations.megatron.norms import attach_norm
from olmo_lns.integrations.norm_sites import Site
from olmo_lns.schemes import LNS

WIDTH, SCALE, EPS = 24, 3**-0.5, 1e-5
SITE = Site(LNS, 3, 4, "attn")


class PythonLayerNorm(torch.autograd.Function):
    """Apex's function by its signature: backward uses the gain it was given, and returns its gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Any, weight: Any, bias: Any, shape: Any, eps: float, memory_efficient: bool = False
    ) -> Any:
        unit = (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True, unbiased=False) + eps)
        ctx.save_for_backward(unit, weight, torch.rsqrt(x.var(-1, keepdim=True, unbiased=False) + eps))
        return unit * weight + bias

    @staticmethod
    def backward(ctx: Any, upstream: Any) -> Any:  # type: ignore[override]
        unit, weight, rsigma = ctx.saved_tensors
        g = upstream * weight
        dx = rsigma * (g - g.mean(-1, keepdim=True) - unit * (g * unit).mean(-1, keepdim=True))
        return dx, (upstream * unit).sum(0), upstream.sum(0), None, None, None


def apex(monkeypatch: pytest.MonkeyPatch, *, centered: bool) -> Any:
    """Megatron's wrapper of Apex, its CUDA function replaced."""
    from megatron.core.fusions import fused_layer_norm

    monkeypatch.setattr(fused_layer_norm, "HAVE_FUSED_LAYER_NORM", True)
    monkeypatch.setattr(fused_layer_norm, "FusedLayerNormAffineFunction", PythonLayerNorm, raising=False)
    cfg = tiny.config(normalization="LayerNorm", layernorm_zero_centered_gamma=centered, persist_layer_norm=False)
    return fused_layer_norm.FusedLayerNorm(cfg, WIDTH, eps=EPS)


def expected(
    norm: Any, x: torch.Tensor, upstream: torch.Tensor, *, rms: bool, centered: bool
) -> dict[str, torch.Tensor]:
    """s * Norm(x) written out, in fp64, differentiated by autograd."""
    leaf = x.double().requires_grad_()
    parameters = {name: p.detach().double().requires_grad_() for name, p in norm.named_parameters()}
    centred = leaf if rms else leaf - leaf.mean(-1, keepdim=True)
    unit = centred / (centred.pow(2).mean(-1, keepdim=True) + EPS).sqrt()
    y = unit * (parameters["weight"] + (1 if centered else 0))
    if "bias" in parameters:
        y = y + parameters["bias"]
    y = y * SCALE
    y.backward(upstream.double())
    grads = {name: p.grad for name, p in parameters.items()}
    return {"y": y.detach(), "x": leaf.grad, **grads}  # type: ignore[dict-item]


@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm", "Apex", "Apex, zero-centred"])
def test_values_and_gradients(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    norm: Any = (
        apex(monkeypatch, centered="zero" in kind) if "Apex" in kind else getattr(torch.nn, kind)(WIDTH, eps=EPS)
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.add_(torch.randn(WIDTH, generator=generator) * 0.3)
    x, upstream = (torch.randn(7, WIDTH, generator=generator) for _ in range(2))
    names = list(norm.state_dict())
    attach_norm(norm, SITE)
    leaf = x.clone().requires_grad_()
    y = norm(leaf)
    y.backward(upstream)
    right = expected(norm, x, upstream, rms=kind == "RMSNorm", centered="zero" in kind)
    found = {"y": y.detach(), "x": leaf.grad, **{name: p.grad for name, p in norm.named_parameters()}}
    assert set(found) == set(right)
    for name, value in right.items():
        torch.testing.assert_close(found[name].double(), value, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    assert list(norm.state_dict()) == names
    assert "weight" in norm._parameters and "weight" not in norm.__dict__  # the hiding is over


def test_parameters_are_seen_again_after_a_failing_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    norm = apex(monkeypatch, centered=True)
    attach_norm(norm, SITE)
    with pytest.raises(Exception, match="must match"):
        norm(torch.randn(2, WIDTH + 1))
    assert norm.weight is norm._parameters["weight"]
    assert norm.zero_centered_gamma is True


def test_a_norm_that_hands_the_residual_on() -> None:
    class TEFusedResidualRMSNorm(torch.nn.RMSNorm):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x), x

    norm: Any = TEFusedResidualRMSNorm(WIDTH, eps=EPS)
    x = torch.randn(4, WIDTH)
    plain = torch.nn.functional.rms_norm(x, (WIDTH,), None, EPS)
    attach_norm(norm, SITE)
    y, residual = norm(x)
    assert residual is x
    torch.testing.assert_close(y, plain * SCALE)


def test_twice_is_refused_and_names_stay() -> None:
    norm: Any = torch.nn.RMSNorm(WIDTH)
    attach_norm(norm, SITE)
    assert norm.lns_scale == SCALE and isinstance(norm, torch.nn.RMSNorm)
    assert type(norm).__name__ == "RMSNorm" and "lns_scale=0.57735" in repr(norm)
    with pytest.raises(LNSConfigError, match="scheme lns already"):
        attach_norm(norm, SITE)


def test_a_fused_linear_that_is_not_megatrons_is_refused() -> None:
    class LayerNormLinear(torch.nn.Linear):
        layer_norm_weight = torch.ones(WIDTH)

    with pytest.raises(LNSConfigError, match="is not Megatron's TELayerNormColumnParallelLinear"):
        attach_norm(LayerNormLinear(WIDTH, 2), SITE)


@pytest.mark.parametrize("kind", ["RMSNorm", "Apex"])
def test_a_scaled_norm_is_saved_whole(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``torch.save(module)`` and ``copy.deepcopy``, as the unscaled norm allows."""
    norm: Any = apex(monkeypatch, centered=False) if kind == "Apex" else torch.nn.RMSNorm(WIDTH, eps=EPS)
    attach_norm(norm, SITE)
    file = io.BytesIO()
    torch.save(torch.nn.Sequential(norm), file)
    file.seek(0)
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(2))
    for copied in (torch.load(file, weights_only=False)[0], copy.deepcopy(norm)):
        assert type(copied) is type(norm) and (copied.lns_scale, copied.lns_sites) == (SCALE, (SITE,))
        assert torch.equal(copied(x), norm(x))
