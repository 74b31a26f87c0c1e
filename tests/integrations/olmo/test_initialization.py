"""Standard deviations at initialization, for every matrix, against OLMo's published formulas."""

from __future__ import annotations

import math

import pytest
import torch
from olmo.model import OLMo
from support.olmo_models import model_config

from olmo_lns.errors import LNSConfigError
from olmo_lns.integrations.olmo import register
from olmo_lns.integrations.olmo.initialization import depth_factor
from olmo_lns.integrations.olmo.model import blocks_of

register()

D, FF, LAYERS, STD = 256, 1024, 4, 0.02
#: A normal truncated at three standard deviations is narrower by this factor.
TRUNCATED = math.sqrt(1 - 2 * 3 * math.exp(-4.5) / math.sqrt(2 * math.pi) / math.erf(3 / math.sqrt(2)))


def expected_std(init_fn: str, matrix: str, block: int, *, depth_factor_on: bool) -> float:
    fan_in = {"ff_out": FF // 2}.get(matrix, D)
    std = 1 / math.sqrt(fan_in) if init_fn == "mitchell" else STD
    if depth_factor_on and matrix in ("attn_out", "ff_out"):
        std /= {"normal": 1, "mitchell": math.sqrt(2 * block), "full_megatron": math.sqrt(2 * LAYERS)}[init_fn]
    return std if init_fn == "normal" else std * TRUNCATED


@pytest.mark.parametrize("block_type", ["sequential", "llama"])
@pytest.mark.parametrize("init_fn", ["normal", "mitchell", "full_megatron"])
@pytest.mark.parametrize(
    ("kind", "policy", "depth_factor_on"),
    [("rms", "auto", True), ("rms", "off", False), ("rms", "keep", True), ("lns_rms", "auto", False),
     ("lns_rms", "off", False), ("lns_rms", "keep", True)],
)  # fmt: skip
def test_std_of_every_matrix(monkeypatch, block_type, init_fn, kind, policy, depth_factor_on):
    monkeypatch.setenv("OLMO_LNS_SCALED_INIT", policy)
    torch.manual_seed(0)
    model = OLMo(
        model_config(
            layer_norm_type=kind, init_fn=init_fn, block_type=block_type, d_model=D, mlp_hidden_size=FF, n_layers=LAYERS
        )
    )
    projections = ("att_proj",) if block_type == "sequential" else ("q_proj", "k_proj", "v_proj")
    for number, block in enumerate(blocks_of(model), start=1):
        for name in (*projections, "ff_proj", "attn_out", "ff_out"):
            std = getattr(block, name).weight.std().item()
            assert std == pytest.approx(expected_std(init_fn, name, number, depth_factor_on=depth_factor_on), rel=0.03)
    head = STD if init_fn == "normal" else TRUNCATED / math.sqrt(D)
    assert model.transformer.ff_out.weight.std().item() == pytest.approx(head, rel=0.03)


@pytest.mark.parametrize("init_fn", ["mitchell", "full_megatron"])
def test_truncation_scales_with_the_standard_deviation(init_fn):
    torch.manual_seed(0)
    model = OLMo(model_config(layer_norm_type="lns_rms", init_fn=init_fn, d_model=D, mlp_hidden_size=FF))
    for number, block in enumerate(blocks_of(model), start=1):
        limit = 3 * expected_std(init_fn, "attn_out", number, depth_factor_on=False) / TRUNCATED
        assert 0.9 * limit < block.attn_out.weight.abs().max().item() <= limit * (1 + 1e-6)


def test_turning_it_off_keeps_the_random_stream():
    weights = []
    for kind in ("rms", "lns_rms"):
        torch.manual_seed(5)
        weights.append(dict(OLMo(model_config(layer_norm_type=kind, init_fn="full_megatron")).named_parameters()))
    for name, stock in weights[0].items():
        factor = math.sqrt(2 * 4) if name.split(".")[-2] in ("attn_out", "ff_out") and "blocks" in name else 1.0
        torch.testing.assert_close(weights[1][name], stock * factor, rtol=1e-6, atol=0)


def test_reset_twice_does_not_divide_twice():
    model = OLMo(model_config(layer_norm_type="lns_rms", init_fn="full_megatron", d_model=D, mlp_hidden_size=FF))
    for _ in range(3):
        model.reset_parameters()
    std = blocks_of(model)[1].ff_out.weight.std().item()
    assert std == pytest.approx(STD * TRUNCATED, rel=0.03)


def test_unknown_init_fn_is_refused_by_name():
    with pytest.raises(LNSConfigError, match="kaiming_normal.*normal, mitchell or full_megatron"):
        depth_factor("kaiming_normal", 1, 4)


def test_unknown_policy_is_refused_with_a_suggestion(monkeypatch):
    monkeypatch.setenv("OLMO_LNS_SCALED_INIT", "of")
    with pytest.raises(LNSConfigError, match="'of' \\(did you mean 'off'\\?\\).*auto, keep, off"):
        OLMo(model_config(layer_norm_type="lns_rms"))
