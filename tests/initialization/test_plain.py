"""``plain_initialization`` removes the depth factor from the residual output projections, and changes nothing else."""

import copy
import re

import pytest
import torch
from support.drawn_models import draw, nanogpt, open_lm, stds, torchtitan, wang, wide, with_a_moved_gain
from support.other_models import IDS, Model
from torch import nn

import olmo_lns
from olmo_lns.errors import LNSConfigError


@pytest.mark.parametrize("applied", [True, False])
@pytest.mark.parametrize(
    ("rule", "factor", "text"),
    [
        (nanogpt, lambda number: 4.0, r"o and down 0\.005\d? -> o and down 0\.02 \(times sqrt\(2L\)\)\n"),
        (
            torchtitan,
            lambda number: (2 * number) ** 0.5,
            r"-> o and \w+ and \w+ 0\.02 \(times sqrt\(2l\)\)\n",
        ),
        (open_lm, lambda number: (2 * number) ** 0.5, r"\(times sqrt\(2l\)\)\n"),
    ],
)
def test_plain_initialization_multiplies_what_is_scaled_and_nothing_else(rule, factor, text, applied, capfd):
    model = wide(rule)
    expected = copy.deepcopy(model)
    with torch.no_grad():
        for number, block in enumerate(expected.layers.values(), start=1):
            for name in ("o", "down", "up") if rule is torchtitan else ("o", "down"):
                getattr(block, name).weight.mul_(factor(number))
    assert olmo_lns.plain_initialization(olmo_lns.apply(model) if applied else model) is model
    assert re.search(text, line := capfd.readouterr().err), line
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=0, atol=0)
    olmo_lns.plain_initialization(model)
    assert "plain initialization: scaled initialization was off, nothing changed" in capfd.readouterr().err
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=0, atol=0)


class Inlined(Model):
    """A model without modules that run as blocks."""

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.layers.values():
            x = x + block.attn(block.n1(x))
            x = x + block.mlp(block.n2(x))
        return self.head(self.norm(x))


def given(model):
    return olmo_lns.apply(model, norms=[(block.n1, block.n2) for block in model.layers.values()])


def held_by_deepspeed(model):
    model.layers["3"].k.weight._hp_mapping = object()  # as after deepspeed.initialize
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: wide(wang), "follow no rule that olmo-lns knows"),
        (
            lambda: with_a_moved_gain(wide(nanogpt)),
            r"weights of its norm layers\.\*\.n2 are not at their start, so the model was trained before",
        ),
        (lambda: olmo_lns.apply(wide(nanogpt)).to("meta"), "no residual output projection could be measured"),
        (lambda: held_by_deepspeed(wide(nanogpt)), "Call it earlier"),
        (lambda: nn.Linear(4, 4), "example"),
        (lambda: given(Inlined()), "Draw these weights like all others"),
        (lambda: {"hidden_size": 4}, "found an object of the type dict. It expects a built model, or the config"),
    ],
)
def test_plain_initialization_refuses_what_it_does_not_recognize_and_changes_nothing(model, message):
    model = model()
    before = copy.deepcopy(model.state_dict()) if isinstance(model, nn.Module) else {}
    with pytest.raises(LNSConfigError, match=message):
        olmo_lns.plain_initialization(model)
    if before and not next(model.parameters()).is_meta:
        torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_a_matrix_that_does_not_end_a_branch_and_was_drawn_at_a_quarter_is_named_and_left_alone(capfd):
    model = draw(wide(nanogpt), lambda name, *rest: 0.005 if name == "k" else nanogpt(name, *rest))
    before = model.layers["3"].k.weight.detach().clone()
    olmo_lns.plain_initialization(model)
    assert "unchanged, since it does not end a branch: k 0.005" in capfd.readouterr().err
    assert torch.equal(model.layers["3"].k.weight, before)


@pytest.mark.parametrize("init_fn", ["mitchell", "full_megatron"])
def test_a_built_olmo_is_made_plain(init_fn, capfd):
    pytest.importorskip("olmo")
    from support import olmo_models

    model = olmo_models.build(perturb=False, layer_norm_type="rms", init_fn=init_fn)
    before = model.transformer.blocks[1].ff_out.weight.detach().clone()
    olmo_lns.plain_initialization(model)
    factor = {"mitchell": 4.0, "full_megatron": 2.0 * len(model.transformer.blocks)}[init_fn] ** 0.5
    torch.testing.assert_close(model.transformer.blocks[1].ff_out.weight.detach(), before * factor, rtol=1e-6, atol=0)
    assert "plain initialization: " in capfd.readouterr().err


def test_gpt2_in_a_wrapper_is_reported_and_made_plain(capfd):
    transformers = pytest.importorskip("transformers")
    sizes = dict(n_layer=8, n_embd=64, n_head=4, n_positions=16, vocab_size=96, bos_token_id=0, eos_token_id=0)
    wrapper = nn.Sequential(transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)))
    weight = wrapper[0].transformer.h[3].mlp.c_proj.weight
    before = weight.detach().clone()
    olmo_lns.apply(wrapper, example=lambda model: model[0](IDS, use_cache=False))
    assert re.search(r"scaled initialization found \(c_proj 0\.005, others 0\.02\)", capfd.readouterr().err)
    assert torch.equal(weight, before)
    olmo_lns.plain_initialization(wrapper)
    assert torch.equal(weight, before * 4.0)


def test_a_second_tower_is_made_plain_by_its_own_example():
    class Towers(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = wide(nanogpt), wide(nanogpt)

    model = Towers()
    for tower in ("one", "two"):
        olmo_lns.plain_initialization(model, example=lambda model, tower=tower: getattr(model, tower)(IDS))
    for tower in (model.one, model.two):
        *projections, _ = stds(tower)
        assert all(0.017 < std < 0.023 for each in projections for std in each)


@pytest.mark.parametrize("share", [lambda weight: weight, lambda weight: nn.Parameter(weight.data)])
def test_a_weight_that_two_blocks_share_is_multiplied_once(share):
    model = wide(nanogpt)
    model.layers["3"].down.weight = share(model.layers["2"].down.weight)
    expected = 4.0 * model.layers["2"].down.weight.detach()  # sqrt(2 * 8 blocks)
    olmo_lns.plain_initialization(model)
    torch.testing.assert_close(model.layers["2"].down.weight.detach(), expected)
