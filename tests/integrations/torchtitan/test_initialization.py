"""The depth factor of torchtitan's initializers is off under a scheme, by request without one, and measured."""

from functools import partial

import pytest

pytest.importorskip("torchtitan.config.override", reason="needs torchtitan 0.3 (make test-torchtitan)")

import torch
from support import torchtitan_models as titan

from olmo_lns.errors import LNSConfigError, MeasurementError, UpstreamChangedError
from olmo_lns.integrations.torchtitan.initializers import remove_depth_factors


def stds(model, names, blocks=("1", "3")):
    """The standard deviations of drawn weights, by name in the block."""
    return {name: [float(model.layers[b].get_parameter(name).detach().std()) for b in blocks] for name in names}


#: Family and flavor -> weights that torchtitan draws with a depth factor.
DEPTH = {
    ("llama3", "debugmodel"): ("attention.wo.weight", "feed_forward.w2.weight", "feed_forward.w3.weight"),
    ("qwen3", "debugmodel_moe"): ("attention.wo.weight", "moe.routed_experts.inner_experts.w2_EDF"),
    ("deepseek_v3", "debugmodel"): (
        "attention.wo.weight",
        "moe.shared_experts.w2.weight",
        "moe.routed_experts.inner_experts.w2_EDF",
        "moe.routed_experts.inner_experts.w3_EFD",
    ),
    ("gpt_oss", "debugmodel"): ("attention.wo.weight", "moe.routed_experts.inner_experts.mlp2_weight_EDF"),
}


#: The mixtures are large.
MODELS = [pytest.param(*key, marks=[] if key[0] == "llama3" else pytest.mark.slow) for key in DEPTH]


@pytest.mark.parametrize(("family", "flavor"), MODELS)
@pytest.mark.parametrize("name", [titan.LNS, titan.PLAIN])
def test_depth_factors_are_off(family, flavor, name):
    model = titan.with_weights(titan.build(family, name, flavor=flavor))
    for weight, drawn in stds(model, DEPTH[family, flavor]).items():
        assert drawn == pytest.approx([0.02, 0.02], rel=0.03), weight


@pytest.mark.parametrize(("family", "flavor"), MODELS)
def test_depth_factors_are_upstreams_without_the_flag(family, flavor):
    model = titan.with_weights(titan.build(family, flavor=flavor))
    for weight, drawn in stds(model, DEPTH[family, flavor]).items():
        assert max(drawn) < 0.85 * 0.02, weight


def test_kept_initializers_draw_the_stock_weights():
    kept = titan.with_weights(titan.build("llama3", (titan.LNS, {"keep_scaled_init": True})))
    stock = titan.with_weights(titan.build("llama3"))
    assert all(torch.equal(a, b) for a, b in zip(kept.parameters(), stock.parameters(), strict=True))


def test_plain_initialization_equals_the_initialization_of_lns():
    plain = titan.with_weights(titan.build("llama3", titan.PLAIN))
    scaled = titan.with_weights(titan.build("llama3", titan.LNS))
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), scaled.parameters(), strict=True))
    assert not [m for m in plain.modules() if hasattr(m, "lns_scale")]


@pytest.mark.slow
def test_both_overrides_together_are_lns():
    both = titan.with_weights(titan.build("llama3", titan.LNS, titan.PLAIN))
    scaled = titan.with_weights(titan.build("llama3", titan.LNS))
    assert all(torch.equal(a, b) for a, b in zip(both.parameters(), scaled.parameters(), strict=True))
    assert sum(hasattr(m, "lns_scale") for m in both.modules()) == 12


def test_another_initialization_by_depth_is_refused_or_kept():
    def spec():
        spec = titan.config("llama3")
        for index, layer in enumerate(spec.model.layers):
            layer.attention.wo.param_init = {"weight": partial(torch.nn.init.normal_, std=0.02 / (index + 1))}
        return spec

    with pytest.raises(LNSConfigError, match=r"attention.wo.weight is drawn with the standard deviations"):
        titan.build("llama3", titan.LNS, spec=spec())
    titan.build("llama3", (titan.LNS, {"keep_scaled_init": True}), spec=spec())


def test_initializers_that_are_kept_elsewhere_are_an_error():
    """As after a release of torchtitan that renames the attribute."""
    model = titan.build("llama3")
    for module in model.modules():
        vars(module)["renamed"] = vars(module).pop("_param_init", None)
    with pytest.raises(UpstreamChangedError, match=r"no module of its blocks has its initializers in _param_init"):
        remove_depth_factors(model)


def test_drawn_weights_are_measured():
    model = titan.build("llama3", titan.LNS)
    model.layers["4"].attention.wo._param_init = {"weight": partial(torch.nn.init.normal_, std=0.01)}
    with pytest.raises(
        MeasurementError, match=r"layers.4.attention.wo, weight: the weights were drawn with .* Expected 0.02"
    ):
        titan.with_weights(model)
