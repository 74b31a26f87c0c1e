"""Trained weights are refused, and fresh ones of any kind are not."""

import copy

import pytest
import torch
from support.drawn_models import constant, draw, wide, with_a_moved_gain
from support.other_models import IDS, Model
from torch import nn
from torch.nn import functional as F

import olmo_lns
from olmo_lns import initialization
from olmo_lns.errors import CheckpointMismatchError, LNSConfigError


def trained_any():
    return with_a_moved_gain(wide(constant)), lambda model: model.layers["3"].n2


def trained_olmo():
    pytest.importorskip("olmo")
    from support import olmo_models

    return olmo_models.build(perturb=True, layer_norm_type="rms"), lambda model: model.transformer.blocks[1].ff_norm


def trained_transformers():
    from support.transformers_models import stock

    return stock("llama"), lambda model: model.model.layers[1].input_layernorm


@pytest.mark.parametrize("trained", [trained_any, trained_olmo, trained_transformers])
def test_weights_that_were_trained_are_refused_unless_it_is_said(trained, monkeypatch, capfd):
    model, norm = trained()
    gain = norm(model).weight.detach().clone()
    kind = type(norm(model))
    with pytest.raises(CheckpointMismatchError, match="are not at their start.*trained=True"):
        olmo_lns.apply(model)
    assert type(norm(model)) is kind
    for options in ({"trained": True}, {"trained": False}, {}):
        if not options:
            monkeypatch.setenv("OLMO_LNS_ALLOW_MISMATCH", "1")
        olmo_lns.apply(scaled := copy.deepcopy(model), **options)
        assert norm(scaled).lns_scale < 1 and torch.equal(norm(scaled).weight, gain)
        assert "initialization" not in capfd.readouterr().err
        olmo_lns.apply(scaled)  # measured again


def test_gains_that_are_equal_in_a_norm_and_differ_between_blocks_hold_a_factor():
    model = wide(constant)
    with torch.no_grad():
        for number, block in enumerate(model.layers.values(), start=1):
            block.n1.weight.mul_(number**-0.5)
    with pytest.raises(CheckpointMismatchError, match="its norm .*n1 are not at their start"):
        olmo_lns.apply(model)


class ImageGain(nn.Module):
    """A norm whose gain has the shape of images or of a batch, as in many vision models."""

    def __init__(self, width):
        super().__init__()
        self.g = nn.Parameter(torch.ones(1, 1, width))

    def forward(self, x):
        return F.layer_norm(x, x.shape[-1:]) * self.g


def test_trained_gains_of_any_shape_are_refused():
    model = Model(norm=ImageGain)
    with torch.no_grad():
        model.layers["2"].n1.g[..., 3] += 0.1
    with pytest.raises(CheckpointMismatchError, match="its norm .*n1 are not at their start"):
        olmo_lns.apply(model)
    with pytest.raises(LNSConfigError, match="its norm .*n1 are not at their start"):
        olmo_lns.plain_initialization(model)
    olmo_lns.apply(Model(norm=ImageGain))


class WithoutGain(Model):
    """A model of blocks whose norms have no gain, as OLMo's 1B."""

    def __init__(self, **options):
        super().__init__(norm=lambda width: nn.LayerNorm(width, elementwise_affine=False), **options)


def trained_by_steps(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(30):
        logits = model(IDS)
        F.cross_entropy(logits.flatten(0, 1), IDS.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def test_trained_matrices_are_refused_where_norms_have_no_gain(capfd):
    model = trained_by_steps(draw(WithoutGain(), constant))
    with pytest.raises(
        CheckpointMismatchError, match=r"its matrices, such as \w+\.weight, are not independent.*trained=True"
    ):
        olmo_lns.apply(model)
    with pytest.raises(LNSConfigError, match="are not independent random numbers, so the model was trained before"):
        olmo_lns.plain_initialization(model)
    olmo_lns.apply(model, trained=True)
    assert "initialization" not in capfd.readouterr().err
    olmo_lns.apply(WithoutGain())


def fused(weight):
    """Queries, keys and values at three sizes, and padding."""
    nn.init.normal_(weight)
    with torch.no_grad():
        for number, part in enumerate(weight.chunk(4)):
            part.mul_(number)


@pytest.mark.parametrize(
    "fill",
    [
        nn.init.normal_,
        nn.init.xavier_uniform_,
        nn.init.trunc_normal_,
        nn.init.orthogonal_,
        nn.init.eye_,
        nn.init.zeros_,
        lambda weight: nn.init.constant_(weight, 0.5),
        lambda weight: nn.init.sparse_(weight, 0.5),
        fused,
    ],
)
def test_fresh_matrices_of_any_kind_are_fresh(fill):
    torch.manual_seed(0)
    linear = nn.Linear(64, 192, dtype=torch.bfloat16 if fill is nn.init.normal_ else None)
    fill(linear.weight)
    assert not initialization.why_trained({}, initialization.matrices_of([linear]))


def test_one_structured_matrix_of_a_block_is_no_training():
    torch.manual_seed(0)
    block = nn.ModuleDict({name: nn.Linear(64, 64) for name in "qkvo"})
    block["table"] = nn.Embedding.from_pretrained(torch.arange(64.0).expand(64, 64))
    assert not initialization.why_trained({}, initialization.matrices_of([block]))
