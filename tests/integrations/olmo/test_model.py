"""The real OLMo under LNS, against hooks on a stock model; what is refused."""

import time

import pytest
import torch
from olmo.exceptions import OLMoConfigurationError
from olmo.model import OLMo, OLMoSequentialBlock
from support.hooked import hooked
from support.olmo_models import build, model_config, tokens

from olmo_lns import hook, sites
from olmo_lns.errors import LNSConfigError, UpstreamChangedError
from olmo_lns.integrations.olmo import register
from olmo_lns.schemes import LNS

register()

#: Type, affine parameters, block, size of a block group, tied weights, biases. Every pair of values is in some row.
VARIANTS = [
    ("lns", "gain and bias", "sequential", 2, True, False),
    ("lns", "gain", "llama", 1, False, True),
    ("lns", "none", "llama", 1, True, True),
    ("lns_default", "gain and bias", "llama", 2, False, True),
    ("lns_default", "gain", "llama", 1, True, False),
    ("lns_default", "none", "sequential", 1, True, True),
    ("lns_low_precision", "gain and bias", "llama", 1, True, True),
    ("lns_low_precision", "gain", "sequential", 2, False, True),
    ("lns_low_precision", "none", "llama", 2, False, False),
    ("lns_rms", "gain and bias", "llama", 1, False, True),
    ("lns_rms", "gain", "sequential", 1, True, False),
    ("lns_rms", "none", "sequential", 2, True, False),
]


@pytest.mark.parametrize(("kind", "affine", "block_type", "group", "tied", "bias"), VARIANTS)
def test_logits_and_gradients_are_those_of_a_hooked_stock_model(kind, affine, block_type, group, tied, bias):
    changes = dict(block_type=block_type, block_group_size=group, weight_tying=tied, include_bias=bias)
    changes |= dict(layer_norm_with_affine=affine != "none", bias_for_layer_norm="bias" in affine)
    base = kind.removeprefix("lns_").replace("lns", "rms")
    lns, stock, ids = build(layer_norm_type=kind, **changes), build(layer_norm_type=base, **changes), tokens()
    stock.load_state_dict(lns.state_dict())
    assert (stock(ids).logits - lns(ids).logits).abs().max() > 0.05, "the factor makes no difference"
    hooked(stock)
    outputs = []
    for model in (lns, stock):
        logits = model(ids).logits
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        outputs.append(logits.detach())
    assert (outputs[0] - outputs[1]).abs().max() <= 2e-6 * outputs[1].abs().max()
    for (name, ours), theirs in zip(lns.named_parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=2e-3, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_a_part_that_is_not_there_is_an_error_only_where_a_scheme_is_selected(monkeypatch):
    monkeypatch.setattr(hook, "_problems", {"olmo": ["olmo.model:OLMo.reset_parameters was not found"]})
    OLMo(model_config(layer_norm_type="rms"))
    with pytest.raises(
        UpstreamChangedError,
        match="this version of olmo lacks what olmo-lns needs: olmo.model:OLMo.reset_parameters was not found",
    ):
        OLMo(model_config(layer_norm_type="lns_rms"))


def test_a_norm_of_another_name_is_an_error_that_says_so(monkeypatch):
    init = OLMoSequentialBlock.__init__

    def renaming(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self.norm_1 = self.__dict__["_modules"].pop("attn_norm")

    monkeypatch.setattr(OLMoSequentialBlock, "__init__", renaming)
    monkeypatch.setattr(OLMoSequentialBlock, "reset_parameters", lambda self: None)
    with pytest.raises(UpstreamChangedError, match="OLMoSequentialBlock of this OLMo has no attn_norm. Install"):
        OLMo(model_config(layer_norm_type="lns_rms"))


def test_a_failed_measurement_leaves_nothing_half_done(monkeypatch):
    """The next model of the same config, and the config, are as if nothing had happened."""
    config = model_config(layer_norm_type="lns", init_fn="normal_scaled")
    forward = OLMoSequentialBlock.forward
    with (
        monkeypatch.context() as patch,
        pytest.raises(LNSConfigError, match="block . .OLMoSequentialBlock. is not Pre-LN"),
    ):
        patch.setattr(
            OLMoSequentialBlock, "forward", lambda self, x, **kwargs: forward(self, self.attn_norm(x), **kwargs)
        )
        OLMo(config)
    assert (str(config.layer_norm_type), str(config.init_fn)) == ("lns", "normal_scaled")
    assert sites.read_back(OLMo(config)) == LNS


def test_measuring_leaves_the_random_numbers_of_the_launch_alone_and_is_fast():
    """The demo's model has 8 blocks of width 128. A 2 s measurement would be seen."""
    ends, seconds = [], []
    for kind in ("rms", "lns_rms", "sandwich_rms"):
        config = model_config(layer_norm_type=kind, d_model=128, n_layers=8, mlp_hidden_size=512)
        torch.manual_seed(0)
        start = time.process_time()
        OLMo(config)
        seconds.append(time.process_time() - start)
        ends.append(torch.rand(1).item())
    assert len(set(ends)) == 1
    assert max(seconds) < 2


@pytest.mark.parametrize("name", ["lns", "lns_default", "sandwich_rms"])
def test_norm_after_is_refused(name):
    OLMo(model_config(layer_norm_type="rms", norm_after=True))
    with pytest.raises(OLMoConfigurationError, match="the scheme already defines the places"):
        OLMo(model_config(layer_norm_type=name, norm_after=True))


def test_the_start_up_line_is_shown_where_no_logging_is_set_up(capsys):
    build(layer_norm_type="lns_rms")
    assert capsys.readouterr().err.count("LayerNorm Scaling on: ") == 1
