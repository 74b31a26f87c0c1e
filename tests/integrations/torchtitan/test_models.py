"""Built models: every decoder of torchtitan equals hooks on the stock model, or is refused with the reason."""

import logging
import sys

import pytest

pytest.importorskip("torchtitan.config.override", reason="needs torchtitan 0.3 (make test-torchtitan)")

import torch
from support import torchtitan_models as titan
from support.hooked import hooked
from torchtitan.config import override
from torchtitan.models.common.nn_modules import RMSNorm

from olmo_lns.errors import LNSConfigError, MeasurementError, UpstreamChangedError

#: Family and flavor. gpt_oss is built only: its mixture adds bf16 to fp32 on a CPU, which fails in stock torchtitan, too.
DECODERS = [
    ("llama3", "debugmodel"),
    pytest.param("qwen3", "debugmodel", marks=pytest.mark.slow),
    pytest.param("qwen3", "debugmodel_moe", marks=pytest.mark.slow),
    pytest.param("deepseek_v3", "debugmodel", marks=pytest.mark.slow),
]


@pytest.fixture(autouse=True)
def _eager(monkeypatch):
    titan.eager_attention(monkeypatch)


def built(family, *imports, flavor="debugmodel", **kwargs):
    """A model under an override, with the weights of a stock model."""
    return titan.with_weights(titan.build(family, *imports, flavor=flavor, **kwargs))


@pytest.mark.parametrize(("family", "flavor"), DECODERS)
def test_a_decoder_equals_hooks_on_the_stock_model(family, flavor):
    stock = built(family, flavor=flavor)
    scaled = built(family, (titan.LNS, {"exponent": 0.25, "keep_scaled_init": True}), flavor=flavor)
    assert list(scaled.state_dict()) == list(stock.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(scaled.parameters(), stock.parameters(), strict=True))
    plain_logits, _ = titan.run(stock)
    logits, gradients = titan.run(scaled)
    expected_logits, expected = titan.run(hooked(stock, stock.layers.values(), ("attention_norm", "ffn_norm"), 0.25))
    torch.testing.assert_close(logits, expected_logits, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(logits, plain_logits, atol=1e-3)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-6, msg=name)


def test_the_log_has_the_start_up_line(caplog):
    with caplog.at_level(logging.INFO):
        titan.build("llama3", titan.LNS)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "olmo_lns"]
    assert line.startswith("LayerNorm Scaling on: 12 norms (RMSNorm); s = 1 (block 1) to 0.4082 (block 6)")
    assert line.endswith("scaled initialization off; measured: sites, output, gradient")


def test_measuring_leaves_the_random_state_of_the_run():
    before = torch.get_rng_state()
    titan.build("llama3", titan.LNS)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_multimodal_decoder_keeps_the_norms_of_its_vision_tower():
    model = titan.build("kimi_k2_7", titan.LNS)
    scaled = [name for name, module in model.named_modules() if hasattr(module, "lns_scale")]
    assert len(scaled) == 2 * len(model.layers) and all(name.startswith("layers.") for name in scaled)


def test_gpt_oss_is_built_and_its_blocks_are_run():
    model = titan.build("gpt_oss", titan.LNS)
    factors = [model.layers[key].ffn_norm.lns_scale for key in model.layers]
    assert factors == pytest.approx([1, 2**-0.5, 3**-0.5, 0.5])


@pytest.mark.parametrize("flavor", ["debugmodel", "debugmodel_mm"])
def test_sandwich_norms_are_refused(flavor):
    with pytest.raises(LNSConfigError, match=r"its norm post_(attention|ffn)_norm sits on a branch"):
        titan.build("muse_glimmer", titan.LNS, flavor=flavor)


def test_multi_token_prediction_is_refused():
    spec = titan.config("deepseek_v3")
    spec.model.mtp_layers = [object()]
    with pytest.raises(LNSConfigError, match="has modules for multi-token prediction"):
        titan.build("deepseek_v3", titan.LNS, spec=spec)


def test_a_layer_without_a_marked_norm_is_refused():
    spec = titan.config("llama3")

    class Other(RMSNorm):
        pass

    node = spec.model.layers[2].attention_norm
    spec.model.layers[2].attention_norm = type("OtherConfig", (), {"build": lambda self: Other(node)})()
    with pytest.raises(LNSConfigError, match=r"blocks \[3\] have no attention_norm or ffn_norm"):
        titan.build("llama3", titan.LNS, spec=spec)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scheme": "lsn"}, "did you mean 'lns'"),
        ({"scheme": "lns:exponent=0.5", "exponent": 0.25}, "contradict each other"),
        ({"exponent": "half"}, "exponent"),
        ({"scheme": "preln"}, "does not only multiply the norms"),
        ({"scheme": "sandwich"}, "does not only multiply the norms"),
        ({"keep_scaled_init": "yes"}, "Expected true or false"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(LNSConfigError, match=message):
        titan.build("llama3", (titan.LNS, arguments))


def test_a_disabled_plugin_refuses_the_flag(monkeypatch):
    monkeypatch.setenv("OLMO_LNS_DISABLE", "1")
    with pytest.raises(LNSConfigError, match="OLMO_LNS_DISABLE=1 is set"):
        titan.build("llama3", titan.LNS)


@pytest.mark.parametrize("override", [titan.LNS, titan.PLAIN])
@pytest.mark.parametrize("name", ["torchtitan.components.checkpointer.dcp", "torchtitan.trainer"])
def test_a_module_whose_functions_protect_a_run_must_be_there(monkeypatch, name, override):
    monkeypatch.setitem(sys.modules, name, None)  # Python then finds no such module
    titan.build("llama3")
    with pytest.raises(UpstreamChangedError, match=f"the module {name} was not found"):
        titan.build("llama3", override)


def test_a_norm_that_bypasses_its_forward_is_refused(monkeypatch):
    stock = RMSNorm.forward
    monkeypatch.setattr(RMSNorm, "__call__", lambda self, x: stock(self, x), raising=False)
    with pytest.raises(MeasurementError, match="Expected a norm whose forward"):
        titan.build("llama3", titan.LNS)


def test_fused_swiglu_goes_with_it():
    pytest.importorskip("torchtitan.overrides.fused_swiglu")
    model = titan.build("llama3", titan.LNS, "torchtitan.overrides.fused_swiglu.fused_swiglu")
    initializer = model.layers["3"].feed_forward._param_init["w13"]
    torch.manual_seed(0)
    w13 = torch.empty(256, 2, 256)
    initializer(w13)
    assert w13[:, 0].std() == pytest.approx(0.02, rel=0.05)
    assert w13[:, 1].std() == pytest.approx(0.02, rel=0.05)


def test_an_override_of_the_same_norms_is_a_conflict():
    @override(target=RMSNorm.Config, fqns=["*.layers.*.ffn_norm"])
    def another(config):
        return config

    with pytest.raises(ValueError, match=r"both claim node"):
        titan.build("llama3", titan.LNS, f"{another.__module__}.another")
