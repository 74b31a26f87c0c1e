"""Dtypes and values beside OLMo's own norms, with and without autocast."""

from __future__ import annotations

import itertools

import pytest
import torch
from olmo.config import ModelConfig
from olmo.model import RMSLayerNorm
from support import norm_reference as reference

from olmo_lns.norm import layer_norm, rms_norm

EPS, SCALE, WIDTH = 1e-6, 7**-0.5, 96
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def stock_rms(p_dtype, *, affine=True, bias=False):
    config = ModelConfig(
        d_model=WIDTH, layer_norm_eps=EPS, layer_norm_with_affine=affine, include_bias=bias, init_device="cpu"
    )
    norm = RMSLayerNorm(config).to(p_dtype)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.rand(WIDTH) + 0.5)
    return norm


@pytest.mark.parametrize(("x_dtype", "p_dtype"), list(itertools.product(DTYPES, DTYPES)), ids=str)
def test_dtype_is_that_of_olmos_norm_and_no_less_accurate(x_dtype, p_dtype):
    for affine, bias in ((False, False), (True, False), (True, True)):
        stock = stock_rms(p_dtype, affine=affine, bias=bias)
        x = torch.randn(4, 33, WIDTH).to(x_dtype)
        theirs, ours = stock(x) * SCALE, rms_norm(x, stock.weight, EPS, SCALE, bias=stock.bias)
        assert ours.dtype == theirs.dtype
        exact = reference.rms_norm(x, stock.weight, EPS, SCALE, stock.bias)
        assert reference.relative_error(ours, exact) <= 1.05 * reference.relative_error(theirs, exact) + 1e-7


@pytest.mark.parametrize(
    ("x_dtype", "low"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.float16)],
)
def test_under_autocast_the_next_linear_sees_the_same_values(x_dtype, low):
    stock = stock_rms(torch.float32)
    x = torch.randn(4, 33, WIDTH).to(x_dtype)
    linear = torch.nn.Linear(WIDTH, 8)
    full = rms_norm(x, stock.weight, EPS, SCALE)  # outside autocast: fp32
    full_layer = layer_norm(x.float(), stock.weight, None, EPS, SCALE)
    with torch.autocast("cpu", dtype=low):
        ours, ours_layer = rms_norm(x, stock.weight, EPS, SCALE), layer_norm(x.float(), stock.weight, None, EPS, SCALE)
        assert full.dtype == torch.float32 and ours.dtype == ours_layer.dtype == low
        assert torch.equal(ours, full.to(low)) and torch.equal(ours_layer, full_layer.to(low))
        assert torch.equal(linear(ours), linear(full))
        assert stock(x).dtype == torch.float32  # what this saves the cast of
        for dtype in (torch.float64, torch.float16, torch.bfloat16):
            assert rms_norm(x.to(dtype), None, EPS, SCALE).dtype == dtype


def test_statistics_are_fp32_and_extreme_rows_stay_finite():
    x = torch.full((2, 4096), 300.0, dtype=torch.float32)  # the sum of squares would overflow fp16
    with torch.autocast("cpu", dtype=torch.float16):
        torch.testing.assert_close(rms_norm(x, None, EPS, 1.0), torch.ones(2, 4096, dtype=torch.float16))
    x = torch.tensor([[0.0] * 8, [6e4] * 8, [1e-4] * 8], dtype=torch.float16, requires_grad=True)
    y = rms_norm(x, None, EPS, SCALE)
    y.sum().backward()
    assert torch.isfinite(y).all() and torch.isfinite(x.grad).all()
