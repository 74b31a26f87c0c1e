"""The norms of a block by themselves: dtypes and rounding."""

from __future__ import annotations

import pytest
import torch
from support import norm_reference as reference
from support.olmo_models import TINY, build

from olmo_lns.integrations.olmo import register

register()

GROUPS, WIDTH = 4, TINY["d_model"]


def grouped_norm(base):
    model = build(layer_norm_type=f"groupln_{base}:groups={GROUPS}", include_bias=True, bias_for_layer_norm=True)
    return model.transformer.blocks[1].attn_norm


def exact(norm, x, base):
    """In fp64, from the equation."""
    formula = reference.rms_norm if base == "rms" else lambda x, w, e, s: reference.layer_norm(x, w, None, e, s)
    unit = formula(x.double().unflatten(-1, (GROUPS, -1)), None, norm.eps, 1.0).flatten(-2)
    return unit * norm.weight.double() + norm.bias.double()


@pytest.mark.parametrize("base", ["rms", "default", "low_precision"])
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_grouped_norms_round_once_under_autocast(base, x_dtype):
    norm = grouped_norm(base)
    x = torch.randn(2, 9, WIDTH, generator=torch.Generator().manual_seed(0)).to(x_dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = norm(x)
    assert y.dtype == torch.bfloat16
    seen = x.bfloat16() if base == "low_precision" else x
    assert reference.worst_rounding(y, exact(norm, seen, base)) < 1.01


@pytest.mark.parametrize(("base", "out"), [("rms", torch.float32), ("default", torch.bfloat16)])
def test_grouped_norms_of_16_bit_inputs_without_autocast(base, out):
    """As OLMo's norms without groups: promoted with the parameters, or of the input's dtype."""
    norm = grouped_norm(base)
    x = torch.randn(2, 9, WIDTH, generator=torch.Generator().manual_seed(0)).bfloat16()
    y = norm(x)
    assert y.dtype == out
    assert reference.relative_error(y, exact(norm, x, base)) < (1e-6 if out == torch.float32 else 3e-3)
