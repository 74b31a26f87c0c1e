"""The real OLMo under LNS, against formulas that share no code with the package."""

import copy
import io
import math

import numpy as np
import olmo.model
import pytest
import torch
from olmo.exceptions import OLMoConfigurationError
from olmo.model import BufferCache, OLMo, OLMoSequentialBlock
from support.olmo_models import build, model_config, reference_logits, tokens

from olmo_lns.errors import UpstreamChangedError
from olmo_lns.integrations.olmo import register
from olmo_lns.integrations.olmo.model import blocks_of

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
def test_values_are_those_of_an_fp64_formula_and_a_hooked_stock_model(kind, affine, block_type, group, tied, bias):
    changes = dict(block_type=block_type, block_group_size=group, weight_tying=tied, include_bias=bias)
    changes |= dict(layer_norm_with_affine=affine != "none", bias_for_layer_norm="bias" in affine)
    base = kind.removeprefix("lns_").replace("lns", "rms")
    lns, stock, ids = build(layer_norm_type=kind, **changes), build(layer_norm_type=base, **changes), tokens()
    expected = reference_logits(lns, ids)
    np.testing.assert_allclose(lns(ids).logits.detach().numpy(), expected, rtol=2e-4, atol=2e-5)
    # The factor matters: without it the same weights give other logits.
    assert np.abs(reference_logits(lns, ids, lns=False) - expected).max() > 0.05
    stock.load_state_dict(lns.state_dict())
    for number, block in enumerate(blocks_of(stock), start=1):
        for norm in (block.attn_norm, block.ff_norm):
            factor = 1 / math.sqrt(number)
            norm.register_forward_hook(lambda _m, _i, out, s=factor: out * s)
    outputs = []
    for model in (lns, stock):
        logits = model(ids).logits
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        outputs.append(logits.detach())
    assert (outputs[0] - outputs[1]).abs().max() <= 2e-6 * outputs[1].abs().max()
    for (name, ours), theirs in zip(lns.named_parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=2e-3, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_a_block_built_without_the_factory_is_scaled_too():
    block = OLMoSequentialBlock(8, model_config(layer_norm_type="lns_rms", n_layers=16), BufferCache())
    assert block.attn_norm.lns_scale == block.ff_norm.lns_scale == pytest.approx(1 / 3)


@pytest.mark.parametrize(("lost", "left"), [((1,), "lns is on 7"), ((0, 1, 2, 3), "preln is on 0")])
def test_a_model_whose_blocks_lost_scaled_norms_is_refused(monkeypatch, lost, left):
    """A model that lost all of them would train as Pre-LN under the name of LNS."""
    original = OLMoSequentialBlock.__init__

    def init(self, layer_id, config, cache):
        original(self, layer_id, config, cache)
        if layer_id in lost:
            self.ff_norm = olmo.model.RMSLayerNorm(config)
        if len(lost) == 4:
            self.attn_norm = olmo.model.RMSLayerNorm(config)

    monkeypatch.setattr(OLMoSequentialBlock, "__init__", init)
    with pytest.raises(UpstreamChangedError, match=f"{left} sub-layers.*expected the 8 sub-layers of 4 blocks"):
        OLMo(model_config(layer_norm_type="lns_rms"))


@pytest.mark.parametrize("name", ["lns", "lns_default", "sandwich_rms"])
def test_norm_after_is_refused(name):
    OLMo(model_config(layer_norm_type="rms", norm_after=True))
    with pytest.raises(OLMoConfigurationError, match="a scheme says itself where the norms sit"):
        OLMo(model_config(layer_norm_type=name, norm_after=True))


def test_deepcopy_and_pickle_keep_the_factor():
    model, ids = build(layer_norm_type="lns_rms"), tokens()
    torch.save(model, buffer := io.BytesIO())
    buffer.seek(0)
    for clone in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        assert torch.equal(clone(ids).logits, model(ids).logits)
