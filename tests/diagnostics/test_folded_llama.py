"""A Llama that multiplies its norms by 1/sqrt(l), and a stock Llama with the factor folded into the gains."""

import copy

import numpy as np
import pytest
import torch
from support.diagnostic_models import huggingface, ids
from torch import nn

from olmo_lns.diagnostics.angular import angular_distance
from olmo_lns.diagnostics.gradnorm import gradient_norms
from olmo_lns.diagnostics.jacobian import block_jacobians
from olmo_lns.diagnostics.layer_drop import drop_layers
from olmo_lns.diagnostics.variance import block_output_variance

NORMS = ("input_layernorm", "post_attention_layernorm")


class Scaled(nn.Module):
    def __init__(self, norm, scale):
        super().__init__()
        self.norm, self.scale = norm, scale

    def forward(self, x):
        return self.scale * self.norm(x)


@pytest.fixture(scope="module")
def models():
    """(unscaled, LNS at run time, LNS folded into a stock model)."""
    stock = huggingface("llama", num_hidden_layers=4)
    scaled, folded = copy.deepcopy(stock), copy.deepcopy(stock)
    for number, (a, b) in enumerate(zip(scaled.model.layers, folded.model.layers, strict=True), start=1):
        for name in NORMS:
            setattr(a, name, Scaled(getattr(a, name), number**-0.5))
            with torch.no_grad():
                getattr(b, name).weight.mul_(number**-0.5)
    return stock, scaled, folded


def numbers(model):
    batches = [ids(3, 16), ids(2, 16, seed=4)]
    variance = block_output_variance(model, None, batches)
    drop = drop_layers(model, None, batches)
    jacobian = block_jacobians(model, None, batches)
    gradients = gradient_norms(model, None, batches)
    return {
        "variance": [variance.variance, variance.rms, variance.max],
        "angular": np.concatenate(angular_distance(model, None, batches).distance),
        "last token": np.concatenate(angular_distance(model, None, batches, last_token=True).distance),
        "layer-drop": [drop.baseline_loss, *drop.loss],
        "jacobian": [jacobian.identity_distance, jacobian.diagonal_dominance],
        # A folded gain has s times the value, so its own gradient is another one; all others agree.
        "gradnorm": [[block[kind] for kind in ("attention", "mlp")] for block in gradients.kinds],
    }


def test_identical_results(models):
    stock, scaled, folded = map(numbers, models)
    for name in scaled:
        np.testing.assert_allclose(scaled[name], folded[name], rtol=2e-5, atol=1e-6, err_msg=name)
        difference = np.abs(np.asarray(stock[name]) - np.asarray(folded[name])).max()
        assert difference > 1e-3, f"{name} must tell LNS from Pre-LN, or the comparison shows nothing"
