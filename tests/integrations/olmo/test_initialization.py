"""Standard deviations at initialization, for every matrix, against OLMo's published formulas."""

import math

import olmo.model
import pytest
import torch
from olmo.model import OLMo
from support.olmo_models import build, model_config

from olmo_lns import plain_initialization
from olmo_lns.errors import LNSConfigError, MeasurementError
from olmo_lns.integrations.olmo import register
from olmo_lns.integrations.olmo.model import blocks_of

register()

D, FF, LAYERS, STD = 256, 1024, 4, 0.02
#: A normal truncated at three standard deviations is narrower by this factor.
TRUNCATED = math.sqrt(1 - 2 * 3 * math.exp(-4.5) / math.sqrt(2 * math.pi) / math.erf(3 / math.sqrt(2)))


def expected_std(init_fn, matrix, block, *, depth_factor_on):
    fan_in = {"ff_out": FF // 2}.get(matrix, D)
    std = 1 / math.sqrt(fan_in) if init_fn == "mitchell" else STD
    if depth_factor_on and matrix in ("attn_out", "ff_out"):
        std /= {"normal": 1, "mitchell": math.sqrt(2 * block), "full_megatron": math.sqrt(2 * LAYERS)}[init_fn]
    return std if init_fn == "normal" else std * TRUNCATED


@pytest.mark.parametrize("init_fn", ["normal", "mitchell", "full_megatron"])
@pytest.mark.parametrize(
    ("kind", "block_type", "policy", "depth_factor_on"),
    [("rms", "llama", "", True), ("rms", "sequential", "plain", False), ("rms", "sequential", "upstream", True),
     ("rms", "llama", "the function", False), ("lns_rms", "sequential", "", False), ("lns_rms", "llama", "plain", False), ("lns_rms", "llama", "upstream", True)],
)  # fmt: skip
def test_every_std_is_that_of_olmos_formula(monkeypatch, kind, block_type, init_fn, policy, depth_factor_on):
    config = model_config(
        layer_norm_type=kind, init_fn=init_fn, block_type=block_type, d_model=D, mlp_hidden_size=FF, n_layers=LAYERS
    )
    if policy == "the function":
        assert plain_initialization(config) is config
    else:
        monkeypatch.setenv("OLMO_LNS_INITIALIZATION", policy)
    torch.manual_seed(0)
    model = OLMo(config)
    projections = ("att_proj",) if block_type == "sequential" else ("q_proj", "k_proj", "v_proj")
    for number, block in enumerate(blocks_of(model), start=1):
        for name in (*projections, "ff_proj", "attn_out", "ff_out"):
            std = getattr(block, name).weight.std().item()
            assert std == pytest.approx(expected_std(init_fn, name, number, depth_factor_on=depth_factor_on), rel=0.03)
        if init_fn != "normal":  # drawn within three standard deviations; the depth factor scales this limit too
            limit = 3 * expected_std(init_fn, "attn_out", number, depth_factor_on=depth_factor_on) / TRUNCATED
            assert 0.9 * limit < block.attn_out.weight.abs().max().item() <= limit * (1 + 1e-6)
    head = STD if init_fn == "normal" else TRUNCATED / math.sqrt(D)
    assert model.transformer.ff_out.weight.std().item() == pytest.approx(head, rel=0.03)


@pytest.mark.parametrize("init_fn", ["normal", "mitchell"])
def test_a_draw_that_is_wrong_in_every_matrix_is_found(monkeypatch, init_fn):
    stock = olmo.model.init_normal
    monkeypatch.setattr(
        olmo.model, "init_normal", lambda module, std, *cut, **more: stock(module, 2 * std, *cut, **more)
    )
    with pytest.raises(MeasurementError, match="attn_out"):
        OLMo(model_config(layer_norm_type="lns_rms", init_fn=init_fn, d_model=D))


@pytest.mark.parametrize(
    ("changes", "requested", "message"),
    [
        ({"init_fn": "normal_scaled"}, "plain", "init_fn normal_scaled and OLMO_LNS_INITIALIZATION=plain contradict"),
        ({"init_fn": "normal_scaled"}, "upstream", "init_fn normal_scaled and OLMO_LNS_INITIALIZATION=upstream contra"),
        ({}, "scaled", "expected one of plain, upstream. .* init_fn: normal_scaled or"),
    ],
)
def test_a_variable_that_is_wrong_or_contradicts_the_config_is_refused_for_stock_models_too(
    monkeypatch, changes, requested, message
):
    monkeypatch.setenv("OLMO_LNS_INITIALIZATION", requested)
    with pytest.raises(LNSConfigError, match=message):
        OLMo(model_config(layer_norm_type="rms", **changes))


def test_settings_that_contradict_plain_initialization_are_refused(monkeypatch):
    for config, output in (
        (model_config(init_fn="normal_scaled"), "init_fn normal_scaled"),
        (build().config, "this ModelConfig has built a model already"),
        ({}, "found an object of the type dict"),
    ):
        with pytest.raises(LNSConfigError, match=output):
            plain_initialization(config)
    monkeypatch.setenv("OLMO_LNS_INITIALIZATION", "upstream")
    with pytest.raises(LNSConfigError, match=r"INITIALIZATION=upstream and plain_initialization\(config\) contradict"):
        plain_initialization(model_config())
